"""What sampling adds to a decode step, and the exact nucleus of a large vocabulary against a full sort.

Usage:
  python scripts/benchmark_sampling.py                     # the default model, one row; then V = 262144, 8 rows
  python scripts/benchmark_sampling.py --weights keep      # the shortest step, of which sampling is the largest part

Settings alternate within each round: one compiled program serves them all. Bars: filtered 1.05, unfiltered 1.12 times
the greedy step; the nucleus at least 10 times as fast as by sorting, with the same kept set.
"""

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


def main() -> None:
  compare_steps()
  compare_with_sorting()


def compare_steps() -> None:
  lm = entry.load({})
  tokens = FLAGS.tokens * (FLAGS.rounds + 1) + 1
  running = {name: begin(lm, tokens, settings) for name, settings in SETTINGS.items()}
  times = {name: [] for name in SETTINGS}
  for number in range(FLAGS.rounds + 1):
    for name, decoding in running.items():
      start = time.perf_counter()
      decoding.advance(FLAGS.tokens)
      if number:  # the first round touches
        times[name].append((time.perf_counter() - start) * 1e3 / FLAGS.tokens)
  print(f"one row, V = {lm.network.vocab_size}; a step, median of {FLAGS.rounds} rounds (quartiles of the ratio)")
  for name, taken in times.items():
    low, ratio, high = statistics.quantiles([mine / greedy for mine, greedy in zip(taken, times["greedy"])])
    print(f"  {name:46} {statistics.median(taken):7.2f} ms  {ratio:.3f} ({low:.3f}–{high:.3f})", flush=True)


def begin(lm, tokens: int, settings: dict):
  """A decoding that has read the prompt."""
  request = lm.request(PROMPT, max_new_tokens=tokens, ignore_eos=True, seed=0, **settings)
  decoding = lm.start([request])
  decoding.advance(1)
  return decoding


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
