"""What sampling adds to a decode step, what whole chains cost, and the exact nucleus of a large vocabulary against a
full sort.

Usage:
  python scripts/benchmark_sampling.py                     # the default model, one row; then V = 262144, 8 rows
  python scripts/benchmark_sampling.py --weights keep      # the shortest step, of which sampling is the largest part

Settings alternate within each round: one compiled program serves them all. Bars: filtered 1.05, unfiltered 1.12 times
the greedy step; everything on at once ≤ 2 ms; the nucleus at least 10 times as fast as by sorting, with the same kept
set.
"""

import functools
import statistics
import time

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_integer("rounds", 25, "Alternating rounds; medians count.")
flags.DEFINE_integer("tokens", 16, "Tokens a round and setting.")
flags.DEFINE_integer("vocabulary", 262144, "Logits a row for the comparison with sorting.")
flags.DEFINE_integer("rows", 8, "Rows for the comparison with sorting.")
flags.adopt_module_key_flags(entry)

PROMPT = (
  "The history of the city begins with a small settlement near the river, where traders met and boats were built."
)
SETTINGS = {
  "greedy": dict(temperature=0.0),
  "temperature .8, top_k 40, top_p .9, min_p .05": dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05),
  "temperature .8, top_p .9": dict(temperature=0.8, top_p=0.9),
  "temperature 1": dict(temperature=1.0),
}
P = 0.9
PLAIN = dict(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
EVERYTHING = dict(
  temperature=0.8, dynatemp_range=0.2, top_k=200, top_p=0.95, min_p=0.01, typical_p=0.95, epsilon_cutoff=1e-4,
  eta_cutoff=1e-4, top_n_sigma=4.0, xtc_probability=0.5, repetition_penalty=1.1, presence_penalty=0.1,
  frequency_penalty=0.1, dry_multiplier=0.8, no_repeat_ngram_size=4, logit_bias=dict.fromkeys(range(100), 1.0),
  sequence_bias={(3, 4): 1.0}, bad_words=[[5, 6, 7], [8]], suppress_tokens=[9], begin_suppress_tokens=[10],
  min_new_tokens=600, forced_eos=2, length_decay=(10, 1.01),
)  # fmt: skip


def main() -> None:
  compare_steps()
  compare_chains()
  compare_with_sorting()


def compare_steps() -> None:
  from decoder.measure.latency import alternating

  lm = entry.load({})
  tokens = FLAGS.tokens * (FLAGS.rounds + 1) + 1
  running = {name: begin(lm, tokens, settings) for name, settings in SETTINGS.items()}
  works = {name: functools.partial(decoding.advance, FLAGS.tokens) for name, decoding in running.items()}
  times = alternating(works, FLAGS.rounds)
  print(f"one row, V = {lm.network.vocab_size}; a step, median of {FLAGS.rounds} rounds (quartiles of the ratio)")
  for name, taken in times.items():
    low, ratio, high = statistics.quantiles([mine / greedy for mine, greedy in zip(taken, times["greedy"])])
    print(
      f"  {name:46} {statistics.median(taken) / FLAGS.tokens:7.2f} ms  {ratio:.3f} ({low:.3f}–{high:.3f})", flush=True
    )


def begin(lm, tokens: int, settings: dict):
  """A decoding that has read the prompt."""
  request = lm.request(PROMPT, max_new_tokens=tokens, ignore_eos=True, seed=0, **settings)
  decoding = lm.start([request])
  decoding.advance(1)
  return decoding


def compare_chains() -> None:
  """Update, draw and observe of one row, in a loop as decode has it: 49,152 logits, 1,500 tokens of context."""
  import jax
  import numpy as np

  from decoder.measure.latency import alternating
  from decoder.sampling import Context, SamplingSettings

  rng = np.random.default_rng(0)
  logits_TV = rng.normal(size=(FLAGS.tokens, 49152)).astype(np.float32) * 4
  tokens_L, ends_E = rng.integers(0, 49152, 2048).astype(np.int32), np.array([2, -1], np.int32)
  row = Context(tokens_L, np.int32(1500), np.int32(1000), ends_E, np.int32(4000), jax.random.key(0))
  running, plain = {}, {"greedy, short": ({}, False), "plain, short": (PLAIN, False), "plain, full": (PLAIN, True)}
  for name, (asked, full) in {**plain, "everything, full": (EVERYTHING, True)}.items():
    chain = SamplingSettings(**asked).chain(full)
    running[name] = jax.jit(drawing(chain)), jax.device_put((logits_TV, chain.init(), row))
  works = {name: lambda run=run: jax.block_until_ready(run[0](*run[1])) for name, run in running.items()}
  taken = alternating(works, 50)
  print(f"one row of 49,152 logits: milliseconds a step, median of 50 loops of {FLAGS.tokens} steps, alternating")
  for name, times in taken.items():
    print(f"  {name:18} {statistics.median(times) / FLAGS.tokens:6.2f}", flush=True)


def drawing(chain):
  """A loop that draws a token from each of several logits."""
  import jax
  import jax.numpy as jnp

  from decoder.sampling import categorical

  def steps(logits_TV, state, row):
    def step(number, carry):
      state, row = carry
      row = row._replace(key=jax.random.fold_in(row.key, number))
      batch = jax.tree.map(lambda x: x[None], (logits_TV[number], state, row))
      state, token = jax.tree.map(lambda x: x[0], jax.vmap(one)(*batch))
      return state, row._replace(tokens_L=row.tokens_L.at[row.length].set(token), length=row.length + 1)

    def one(logits_V, state, row):
      left_V = chain.update(logits_V, state, row)
      token = categorical(row.key, left_V)
      return chain.observe(state, token, left_V), token

    state = jax.tree.map(jnp.asarray, state)
    return jax.lax.fori_loop(0, logits_TV.shape[0], step, (state, row))[1].tokens_L

  return steps


def compare_with_sorting() -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np

  from decoder.sampling import Context, top_p

  link, nothing = top_p(P), Context(jnp.zeros(1, jnp.int32), jnp.int32(0), jnp.int32(0))
  ours = jax.jit(jax.vmap(lambda x_V: link.update(x_V, link.init(), nothing) > -jnp.inf))
  sorting = jax.jit(jax.vmap(lambda x_V: kept_by_sorting(x_V)))
  print(f"top_p {P} of V = {FLAGS.vocabulary}, {FLAGS.rows} rows: milliseconds, and how the kept sets differ")
  noise = np.random.default_rng(0).normal(size=(FLAGS.rows, FLAGS.vocabulary)).astype(np.float32)
  for name, spread in (("peaked", 6.0), ("in between", 2.0), ("flat", 0.3)):
    logits_BV = jnp.asarray(noise * np.float32(spread))
    times = {"ours": [], "sorting": []}
    for number in range(4):
      for label, keep in (("ours", ours), ("sorting", sorting)):
        start = time.perf_counter()
        kept = np.asarray(keep(logits_BV))
        if number:
          times[label].append((time.perf_counter() - start) * 1e3)
        if label == "ours":
          found = kept
    mine, theirs = (statistics.median(times[label]) for label in ("ours", "sorting"))
    print(
      f"  {name:10} {found.sum() / FLAGS.rows:9.0f} kept a row  {mine:7.1f}  {theirs:7.1f} by sorting  "
      f"{theirs / mine:5.1f} ×  {int((found != kept).sum())} ids differ", flush=True,
    )  # fmt: skip


def kept_by_sorting(x_V):
  """The same set from the whole order: largest first, then the lowest id."""
  import jax.numpy as jnp

  order_V = jnp.argsort(-x_V, stable=True)
  weights_V = jnp.exp(x_V[order_V] - x_V[order_V[0]])
  before_V = jnp.cumsum(weights_V) - weights_V
  return jnp.zeros(x_V.shape, bool).at[order_V].set(before_V < P * jnp.sum(weights_V))


if __name__ == "__main__":
  entry.run(main)
