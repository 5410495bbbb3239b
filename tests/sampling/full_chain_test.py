"""The full chain against the oracle: whatever is set, one compiled program a vocabulary, in a batch of unlike rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sampling import oracle
from sampling.oracle import NOTHING, Row, draw_logits

from decoder.sampling import Context, SamplingSettings, categorical
from decoder.sampling.orders import ORDER

LENGTH = 24  # room for tokens
ENDS = 4
OTHERS = (
  dict(temperature=0.7, top_k=3, typical_p=0.5, dry_multiplier=1.0, repetition_penalty=1.5, min_new_tokens=3),
  dict(temperature=0.0, frequency_penalty=2.0, no_repeat_ngram_size=1, eta_cutoff=0.1, forced_bos=1),
)


@functools.partial(jax.jit, static_argnums=0)
def _rows(update, logits_BV, state, context):
  return jax.vmap(update)(logits_BV, state, context)


def context_of(row, seed=0):
  tokens = np.zeros(LENGTH, np.int32)
  tokens[: len(row.tokens)] = row.tokens
  ends = np.full(ENDS, -1, np.int32)
  ends[: len(row.ends)] = row.ends
  return Context(
    tokens, np.int32(len(row.tokens)), np.int32(row.prompt), ends, np.int32(row.limit), jax.random.key(seed)
  )


def stack(*trees):
  def together(*leaves):
    return jnp.stack(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)

  return jax.tree.map(together, *trees)


def run(asked, logits, row=NOTHING, seed=0, others=OTHERS):
  """Logits that the full chain leaves of the first row; the others are there to disturb it."""
  chains = [SamplingSettings(**each).chain(True) for each in (asked, *others)]
  rows = [context_of(row, seed), *[context_of(Row((1, 0, 1, 0, 1), 2, (0,)), 7)] * len(others)]
  logits_BV = np.stack([logits, *[np.cos(np.arange(len(logits)) * 1.7)] * len(others)]).astype(np.float32)
  return np.asarray(_rows(chains[0].update, logits_BV, stack(*(c.init() for c in chains)), stack(*rows))[0])


def kept(asked, logits, **more):
  return set(np.nonzero(run({"temperature": 1.0, **asked}, logits, **more) > -np.inf)[0].tolist())


FILTERS = {
  "top_k": ("top_k", [1, 2, 7, 1000]),
  "top_p": ("top_p", [1e-3, 0.25, 0.5, 0.9, 0.999]),
  "min_p": ("min_p", [1e-3, 0.05, 0.5, 1.0]),
  "typical": ("typical_p", [1e-3, 0.2, 0.5, 0.75, 0.95]),
  "epsilon": ("epsilon_cutoff", [1e-6, 3e-4, 0.02, 0.25, 0.9]),
  "eta": ("eta_cutoff", [1e-6, 3e-4, 0.02, 0.25, 0.9]),
  "top_n_sigma": ("top_n_sigma", [0.01, 0.5, 1.0, 2.0, 100.0]),
  "xtc": ("xtc_threshold", [1e-4, 0.01, 0.1, 0.25, 0.5, 1.0]),
  "mirostat": ("mirostat_tau", [0.01, 0.5, 1.5, 4.0]),
}
STEPS = st.sampled_from([(name, setting, value) for name, (setting, values) in FILTERS.items() for value in values])


def check_filter(logits, name, setting, value):
  more = {"xtc_probability": 1.0} if name == "xtc" else {}
  got = kept({setting: value, **more}, logits)
  must, may = oracle.bounds(name, 2 * value if name == "mirostat" else value, logits)  # μ begins at twice the target
  assert must <= got <= may, (name, value, sorted(must - got)[:9], sorted(got - may)[:9])


LARGE = ((49152, "ties"), (262144, "plain"), (262144, "masked"))


@given(
  st.sampled_from([2, 17, 300]), st.integers(0, 10**6), st.sampled_from(["plain", "ties", "flat", "masked"]), STEPS
)
@examples(max_examples=300, deadline=None, derandomize=True)
def test_filters_keep_what_the_oracle_keeps(size, seed, kind, step):
  check_filter(draw_logits(seed, size, kind), *step)


@pytest.mark.parametrize(
  ("size", "kind"),
  [(49152, "plain"), *(pytest.param(*more, marks=pytest.mark.slow) for more in LARGE)],
)
def test_filters_of_large_vocabularies(size, kind):
  for number, (name, (setting, values)) in enumerate(FILTERS.items()):
    check_filter(draw_logits(number, size, kind), name, setting, values[len(values) // 2])


def test_the_oracle_tells_wrong_filters_apart():
  """Negative control: numbers that are off by a tenth keep other sets."""
  for name, (setting, _) in FILTERS.items():
    if name == "top_k":
      continue
    more = {"xtc_probability": 1.0} if name == "xtc" else {}
    logits = draw_logits(3, 300, "plain") / 3
    value = {"top_n_sigma": 1.5, "mirostat_tau": 3.0, "xtc_threshold": 0.01}.get(setting, 0.004)
    value = 0.5 if name in ("top_p", "typical") else 0.1 if name == "min_p" else value
    must, may = oracle.bounds(name, 2 * value if name == "mirostat" else value, logits)
    assert must <= kept({setting: value, **more}, logits) <= may
    assert not must <= kept({setting: 1.15 * value, **more}, logits) <= may or not (
      must <= kept({setting: value / 1.15, **more}, logits) <= may
    ), name


IDS = st.integers(0, 6)  # few, so that texts repeat
ROWS = st.builds(
  lambda tokens, prompt, ends, limit: Row(tuple(tokens), min(prompt, len(tokens)), ends, limit),
  st.lists(IDS, min_size=1, max_size=LENGTH),
  st.integers(1, LENGTH),
  st.sampled_from([(), (2,), (3, 16)]),
  st.integers(2, LENGTH + 1),
)
SCOPES = st.sampled_from(["all", "output", 1, 3, 100])


def words(longest):
  return st.lists(st.lists(IDS, min_size=1, max_size=longest).map(tuple), min_size=1, max_size=5, unique=True)


CHANGES = st.one_of(
  st.tuples(st.just("repetition"), st.tuples(st.sampled_from([0.5, 1.2, 3.0]), SCOPES)),
  st.tuples(st.just("presence"), st.tuples(st.sampled_from([-1.0, 0.5, 2.0]), SCOPES)),
  st.tuples(st.just("frequency"), st.tuples(st.sampled_from([-1.0, 0.5, 2.0]), SCOPES)),
  st.tuples(st.just("dry"), st.tuples(st.sampled_from([0.8, 2.0]), st.sampled_from([1.0, 1.5]), st.integers(1, 3),
                                      SCOPES, st.sampled_from([(), (0,), (1, 4)]))),
  st.tuples(st.just("no_repeat_ngram"), st.tuples(st.integers(1, 5))),
  st.tuples(st.just("sequence_bias"), st.tuples(words(3).map(lambda many: {w: i - 1.5 for i, w in enumerate(many)}))),
  st.tuples(st.just("bad_words"), st.tuples(words(4))),
  st.tuples(st.just("logit_bias"), st.tuples(st.dictionaries(IDS, st.sampled_from([-3.0, 0.25, 7.0]), min_size=1))),
  st.tuples(st.just("allowed_tokens"), st.tuples(st.lists(IDS, min_size=1))),
  st.tuples(st.just("suppress"), st.tuples(st.lists(IDS, min_size=1))),
  st.tuples(st.just("begin_suppress"), st.tuples(st.lists(IDS, min_size=1))),
  st.tuples(st.just("min_new_tokens"), st.tuples(st.integers(1, 9))),
  st.tuples(st.just("forced_bos"), st.tuples(IDS)),
  st.tuples(st.just("forced_eos"), st.tuples(IDS)),
  st.tuples(st.just("length_decay"), st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.5]))),
)  # fmt: skip
SETTINGS = {
  "repetition": ("repetition_penalty", "repetition_scope"),
  "presence": ("presence_penalty", "penalty_scope"),
  "frequency": ("frequency_penalty", "penalty_scope"),
  "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_scope", "dry_breakers"),
  "no_repeat_ngram": ("no_repeat_ngram_size",),
  "suppress": ("suppress_tokens",),
  "begin_suppress": ("begin_suppress_tokens",),
}


def asked(name, numbers):
  if name == "length_decay":
    return {name: numbers}
  return dict(zip(SETTINGS.get(name, (name,)), numbers))


def same(got, want):
  """Equal up to what the temperature of 1 does: the maximum is subtracted."""
  np.testing.assert_allclose(got, want - want.max(), rtol=1e-5, atol=1e-5)


@given(ROWS, CHANGES, st.integers(0, 10**6))
@examples(max_examples=400, deadline=None, derandomize=True)
def test_penalties_and_masks_leave_what_the_oracle_leaves(row, change, seed):
  logits = draw_logits(seed, 17, "ties" if seed % 2 else "plain")
  want = oracle.apply(*change, logits, row)
  got = run({"temperature": 1.0, **asked(*change)}, logits, row)
  same(got, want) if np.isfinite(want.max()) else np.testing.assert_array_equal(got > -np.inf, False)


@pytest.mark.parametrize("broken", ["one occurrence more", "another scope", "one token longer", "one token later"])
def test_the_oracle_tells_wrong_penalties_apart(broken):
  """Negative control."""
  row, logits = Row((1, 2, 3, 1, 2, 3, 1, 2), 3, (4,), 9), np.linspace(1, 2, 17)
  wrong = {
    "one occurrence more": (dict(frequency_penalty=1.0), "frequency", (1.5,)),
    "another scope": (dict(repetition_penalty=2.0, repetition_scope="output"), "repetition", (2.0, 1)),
    "one token longer": (dict(dry_multiplier=1.0, dry_allowed_length=2), "dry", (1.0, 1.75, 3)),
    "one token later": (dict(min_new_tokens=5), "min_new_tokens", (6,)),
  }
  settings, name, numbers = wrong[broken]
  with pytest.raises(AssertionError):
    same(run({"temperature": 1.0, **settings}, logits, row), oracle.apply(name, numbers, logits, row))


def test_transforms_come_in_the_documented_order():
  """semantics.md: masks, biases, penalties, DRY, temperature, top_k, top_p, min_p, and the rest."""
  row = Row((1, 2, 3, 1, 2, 3, 1, 2), 3, (4,), 99)
  steps = [
    ("allowed_tokens", (tuple(range(15)),)), ("logit_bias", ({3: 1.5, 9: -2.0},)), ("bad_words", (((2, 5),),)),
    ("min_new_tokens", (9,)), ("repetition", (1.3,)), ("presence", (0.5,)), ("frequency", (0.25,)), ("dry", (0.5,)),
  ]  # fmt: skip
  settings = {}
  for name, numbers in steps:
    settings |= asked(name, numbers)
  settings |= dict(temperature=1.7, top_k=9, top_p=0.9, min_p=0.1, typical_p=0.8)
  steps += [("temperature", (1.7,)), ("top_k", (9,)), ("top_p", (0.9,)), ("min_p", (0.1,)), ("typical", (0.8,))]
  for seed in range(20):
    want = logits = draw_logits(seed, 17, "plain") / 5
    for name, numbers in steps:
      want = oracle.apply(name, numbers, want, row)
    got = run(settings, logits, row)
    np.testing.assert_array_equal(got > -np.inf, want > -np.inf)
    np.testing.assert_allclose(got[want > -np.inf], want[want > -np.inf], rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_alone_and_among_others():
  settings = dict(temperature=0.9, typical_p=0.9, repetition_penalty=1.2, xtc_probability=0.5, xtc_threshold=0.05)
  row, logits = Row((1, 2, 1, 2, 3), 2, (4,)), draw_logits(5, 17, "plain") / 5
  for seed in range(4):
    among = run(settings, logits, row, seed)
    np.testing.assert_array_equal(run(settings, logits, row, seed, others=()), among)
    swapped = run(settings, logits, row, seed, others=(OTHERS[1], dict(top_p=0.5, temperature=2.0)))
    np.testing.assert_array_equal(swapped, among)


@pytest.mark.parametrize(
  "plain",
  [
    dict(temperature=0.0),
    dict(temperature=1.3, repetition_penalty=1.2),
    dict(temperature=0.6, top_k=5, top_p=0.9, min_p=0.05),
  ],
)
def test_the_short_chain_does_as_the_full_one_does(plain):
  """The same set, the same token; logits up to the rounding of two compilations."""
  row, settings = Row((1, 2, 1, 2, 3), 2, (4,)), SamplingSettings(**plain)
  short = settings.chain(False)
  assert len(short.update.links) < len(settings.chain(True).update.links)
  update = jax.jit(lambda *row: short.update(*row))
  for seed in range(10):
    logits = draw_logits(seed, 17, "plain")
    left = update(jnp.asarray(logits), short.init(), context_of(row, seed))
    full = run(plain, logits, row, seed)
    np.testing.assert_array_equal(np.isfinite(left), np.isfinite(full))
    np.testing.assert_allclose(left, full, rtol=1e-6)
    assert categorical(jax.random.key(seed), left) == categorical(jax.random.key(seed), full)


def test_settings_and_lists_are_data():
  """One hash for all: what is not in the hash compiles nothing."""
  many = [dict(), dict(bad_words=[[1, 2]] * 9, logit_bias=dict.fromkeys(range(100), 1.0)), dict(dry_multiplier=1.0)]
  chains = [SamplingSettings(temperature=1.0, **each).chain(True) for each in many]
  assert chains[0].update.names == ORDER
  assert len({c.update for c in chains}) == len({c.observe for c in chains}) == 1
  shapes = {tuple(np.shape(leaf) for leaf in jax.tree.leaves(c.init())) for c in chains}
  assert len(shapes) == 1
  longer = SamplingSettings(logit_bias=dict.fromkeys(range(300), 1.0)).chain(True).init()
  assert {len(x) for x in jax.tree.leaves(longer) if np.ndim(x)} == {8, 16, 128, 512} - {8}
