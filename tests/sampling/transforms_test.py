"""Which tokens a chain of transforms keeps, against a float64 oracle that sorts; and the cases C13 … C27."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.oracle import draw_logits

from decoder.sampling import Context, chain, min_p, repetition, temperature, top_k, top_p

CONTEXT = Context(jnp.zeros(4, jnp.int32), jnp.int32(1), jnp.int32(1))
MAKE = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}


@functools.partial(jax.jit, static_argnums=0)
def _apply(update, logits_BV, state):
  return jax.vmap(lambda x, s: update(x, s, CONTEXT))(logits_BV, state)


def apply(link, logits, *others):
  """Processed logits; with several links, a batch of rows that each have their own."""
  links = [link, *others]
  state = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(i) for i in x]), *(each.init() for each in links))
  rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (len(links), np.shape(logits)[-1]))
  out = np.asarray(_apply(link.update, rows, state))
  return out if others else out[0]


def kept(link, logits):
  return set(np.nonzero(apply(link, logits) > -np.inf)[0].tolist())


def log(*p):
  return np.log(np.array(p, np.float64)).astype(np.float32)


@pytest.mark.parametrize("k", [0, -1, None])
def test_C13_top_k_off_keeps_all(k):
  for logits in (np.zeros(8), np.arange(2.0), np.r_[0.0, -50.0, 30.0]):
    assert kept(top_k(k), logits) == set(range(len(logits)))


@pytest.mark.parametrize(("size", "scale"), [(50, 1.0), (7, 9.0), (300, 0.01)])
def test_C15_traced_top_k_of_zero(size, scale):
  logits = np.random.default_rng(size).normal(size=size) * scale
  off, one = apply(chain(top_k(0), top_p(0.9)), logits, chain(top_k(1), top_p(0.9)))
  np.testing.assert_array_equal(off, apply(chain(top_k(None), top_p(0.9)), logits))
  assert set(np.nonzero(off > -np.inf)[0]) == oracle(logits, [("top_p", 0.9)])[0]
  assert np.nonzero(one > -np.inf)[0].tolist() == [np.argmax(logits)]


@pytest.mark.parametrize(
  ("seen", "logits", "value", "want"),
  [
    ((1, 1, 1, 1), (1.0, 3.0), 1.5, (1.0, 2.0)),
    ((2, 0, 2, 0), (0.0, 5.0, -1.0), 4.0, (0.0, 5.0, -4.0)),
    ((0, 1), (2.0, -2.0, 8.0), 0.5, (4.0, -1.0, 8.0)),
  ],
)
def test_C27_a_token_seen_often_is_penalised_once(seen, logits, value, want):
  row = Context(jnp.asarray(seen), jnp.int32(len(seen)), jnp.int32(1))
  link = repetition(value)
  np.testing.assert_array_equal(link.update(jnp.asarray(logits), link.init(), row), want)


def test_C27_repetition_penalty_once_per_distinct_token():
  row = Context(jnp.array([0, 1, 0, 3]), jnp.int32(3), jnp.int32(1))  # the fourth token is not there yet
  link = repetition(2.0)
  penalised = link.update(jnp.array([2.0, -2.0, 0.0, 1.0]), link.init(), row)
  np.testing.assert_array_equal(penalised, [1.0, -4.0, 0.0, 1.0])
  per_occurrence = np.array([2.0, -2.0, 0.0, 1.0])  # negative control: the fault of the case
  for token in (0, 1, 0):
    per_occurrence[token] *= 0.5 if per_occurrence[token] >= 0 else 2
  assert not np.array_equal(penalised, per_occurrence)
  np.testing.assert_array_equal(repetition(1.0).update(jnp.arange(4.0), repetition(1.0).init(), row), jnp.arange(4.0))


@pytest.mark.parametrize("value", [0, 0.0, 1e-45, 1e-300])
def test_C17_temperature_zero_keeps_the_lowest_of_tied_maxima(value):
  for logits, first in (([1, 5, 5, 2], 1), ([7, 7], 0), ([-3, -9, -3, -3, -4], 0), ([0.0, -0.0, 0.0], 0)):
    assert kept(temperature(value), logits) == {first}


def test_C18_temperature_zero_in_a_mixed_batch():
  greedy, warm = apply(temperature(0.0), [1.0, 5.0, 4.0, -np.inf], temperature(1.0))
  assert np.nonzero(greedy > -np.inf)[0].tolist() == [1]
  np.testing.assert_allclose(warm, [-4, 0, -1, -np.inf], atol=1e-6)


def test_C20_exact_nucleus_boundary():
  p = log(0.5, 0.25, 0.125, 0.125)
  assert kept(top_p(0.75), p) == {0, 1}
  assert kept(top_p(0.7500011), p) == {0, 1, 2}, "negative control"


def test_C21_filters_are_sequential():
  p = log(0.4, 0.3, 0.2, 0.1)
  assert kept(chain(top_k(2), top_p(0.57)), p) == {0}
  assert kept(top_p(0.57), p) == {0, 1}, "what a joint filter would keep"


def test_C22_ties_at_the_kth_value():
  assert kept(top_k(2), log(0.4, 0.2, 0.2, 0.2)) == {0, 1}
  assert kept(top_k(2), log(0.2, 0.2, 0.2, 0.4)) == {0, 3}


def test_C23_ties_at_the_nucleus_edge():
  assert kept(top_p(0.5), log(0.4, 0.2, 0.2, 0.2)) == {0, 1}
  assert kept(top_p(0.8), log(0.4, 0.2, 0.2, 0.2)) == {0, 1, 2}


def test_C24_top_k_beyond_the_vocabulary():
  for k in (3, 4, 10, 2**31 - 1, 2**40):
    assert kept(top_k(k), [0.0, 1.0, 2.0]) == {0, 1, 2}


def test_C25_top_p_of_zero_is_refused():
  with pytest.raises(ValueError, match="temperature=0"):
    top_p(0)


def test_C26_temperature_before_or_after_truncation():
  p = log(0.5, 0.3, 0.15, 0.05)
  assert kept(chain(temperature(2.0), top_p(0.9)), p) == {0, 1, 2, 3}
  assert kept(chain(top_p(0.9), temperature(2.0)), p) == {0, 1, 2}
  p = log(0.6, 0.25, 0.1, 0.05)
  assert kept(chain(temperature(2.0), min_p(0.2)), p) == {0, 1, 2, 3}
  assert kept(chain(min_p(0.2), temperature(2.0)), p) == {0, 1}


def oracle(logits, steps):
  """(must keep, may keep): by sorting in float64; they differ where a decision is nearer than 1e-6 (relative)."""
  x = np.asarray(logits, np.float32).astype(np.float64)
  must, near = set(np.nonzero(x > -np.inf)[0].tolist()), set()
  for name, value in steps:
    order = sorted(must, key=lambda i: (-x[i], i))
    weight = np.exp(x[order] - x[order[0]]) if order else np.zeros(0)
    if name == "temperature":
      if value < np.finfo(np.float32).tiny:
        order = order[:1]
      else:
        x = (x - x[order[0]]) / float(np.float32(value))
    elif name == "top_k":
      order = order[:value] if value > 0 else order
    elif name == "top_p" and value < 1:
      share, p = np.cumsum(weight) / weight.sum(), float(np.float32(value))
      count = int(np.sum(share < p * (1 - 1e-6))) + 1
      near |= set(order[int(np.sum(share < p * (1 - 2e-6))) + 1 : int(np.sum(share < p * (1 + 2e-6))) + 1])
      order = order[:count]
    elif name == "min_p" and value > 0:
      p = float(np.float32(value))
      near |= {i for i, w in zip(order, weight) if abs(w - p) < 3e-6 * p}
      order = [i for i, w in zip(order, weight) if w >= p]
    must = set(order)
  return must - near, must | near


VALUES = {
  "temperature": [0.0, 1e-40, 1e-30, 1e-3, 0.3, 0.7, 1.0, 1.7, 50.0],
  "top_k": [-1, 0, 1, 2, 3, 7, 50, 1000],
  "top_p": [1e-30, 1e-3, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999, 1.0],
  "min_p": [0.0, 1e-30, 1e-3, 0.05, 0.1, 0.5, 0.9, 1.0],
}
STEP = st.sampled_from([(name, value) for name, values in VALUES.items() for value in values])


def check(logits, name, value):
  got = kept(MAKE[name](value), logits)
  must, may = oracle(logits, [(name, value)])
  assert must <= got <= may, (name, value, sorted(must - got)[:9], sorted(got - may)[:9])


KINDS = ["plain", "ties", "flat", "masked"]


@given(st.sampled_from([2, 3, 8, 300, 1000]), st.integers(0, 10**6), st.sampled_from(KINDS), STEP)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_kept_set_equals_sorting(size, seed, kind, step):
  check(draw_logits(seed, size, kind), *step)


@pytest.mark.parametrize("size", [49152, 50000])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_set_equals_sorting_for_large_vocabularies(size, kind):
  for seed in range(2):
    logits = draw_logits(seed, size, kind)
    for step in (("top_k", 40), ("top_p", 0.9), ("top_p", 0.2), ("min_p", 0.1)):
      check(logits, *step)


@given(st.integers(0, 10**6), st.sampled_from(["plain", "ties", "masked"]), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_chains_keep_what_sorting_step_by_step_keeps(seed, kind, data):
  """One order is one compilation: these are the orders of the default chain and its reverse."""
  names = data.draw(st.sampled_from([("temperature", "top_k", "top_p", "min_p"), ("min_p", "top_p", "top_k")]))
  steps = [(name, data.draw(st.sampled_from(VALUES[name]))) for name in names]
  logits = draw_logits(seed, 64, kind)
  must, may = oracle(logits, steps)
  if must != may:
    return  # a step's decision hangs on rounding, and so do all after it
  assert kept(chain(*(MAKE[n](v) for n, v in steps)), logits) == must


def test_the_oracle_tells_wrong_rules_apart():
  """Negative control: ties by the highest id; one token more; no renormalisation."""
  logits = (np.round(np.random.default_rng(1).normal(size=64) * 4) / 4).astype(np.float32)
  k, p, both = oracle(logits, [("top_k", 5)]), oracle(logits, [("top_p", 0.6)]), [("top_k", 5), ("top_p", 0.8)]
  for size in range(1, 40):
    mirrored = {63 - i for i in kept(top_k(size), logits[::-1])}
    if mirrored != oracle(logits, [("top_k", size)])[0]:
      break
  else:
    pytest.fail("the wrong rule for ties was never seen")
  assert not kept(top_k(6), logits) <= k[1]
  assert not kept(top_p(0.7), logits) <= p[1]
  assert kept(top_p(0.8), logits) & kept(top_k(5), logits) != oracle(logits, both)[0]


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1.2e-38, 1e-30, 1e-6, 1e6, 8e37])
def test_extreme_temperatures_are_finite(value):
  out = apply(temperature(value), [3.0, 1.0, 3.0, -np.inf, -2.0])
  assert not np.isnan(out).any()
  assert out.max() < np.inf
  assert out[3] == -np.inf
  assert out.argmax() == 0


@pytest.mark.parametrize(
  "logits", [[6e4, -6e4, 6e4 - 32, 3e38], [65504.0] * 4, [-65504.0, -6e4, -65504.0, -65472.0], [3e38, -3e38, 0, 1]]
)
def test_C33_large_logits_do_not_overflow(logits):
  """Logits near the end of half precision, and of single."""
  for link in (temperature(1e-4), top_p(0.9), min_p(0.1), top_k(2)):
    out = apply(link, logits)
    assert not np.isnan(out).any()
    assert np.isfinite(out.max())


@pytest.mark.parametrize("link", [temperature(0.0), temperature(0.7), top_k(2), top_p(0.5), min_p(0.5)])
def test_what_is_masked_stays_masked(link):
  """Nothing revives a masked token, and an all-masked row is not made to look sound."""
  out = apply(link, [-np.inf, 1.0, -np.inf, 0.5])
  assert (out[[0, 2]] == -np.inf).all()
  nothing = apply(link, [-np.inf] * 4)
  assert not np.isfinite(nothing).any()


@pytest.mark.parametrize("link", [temperature(0.0), temperature(0.7)])
def test_nan_stays_visible(link):
  assert not np.isfinite(apply(link, [0.0, np.nan, 1.0, 0.5]).max())


@pytest.mark.parametrize(
  ("make", "bad", "name"),
  [
    (make, bad, name)
    for name, make in MAKE.items()
    for bad in (-2, -0.5, math.nan, math.inf, -math.inf, True)
  ]
  + [(top_k, 2.5, "top_k"), (top_p, 1.5, "top_p"), (min_p, 1.01, "min_p"), (temperature, 3e38, "temperature")],
)  # fmt: skip
def test_impossible_numbers_name_the_setting(make, bad, name):
  with pytest.raises(ValueError, match=f"^{name} must be .*got {re.escape(repr(bad))}"):
    make(bad)


def test_a_changed_number_compiles_nothing():
  rows = jnp.zeros((1, 16))
  links = [chain(temperature(t), top_k(k), top_p(p)) for t, k, p in ((1.0, 3, 0.5), (0.0, 0, 1.0), (2.0, -1, 0.1))]
  for link in links:
    _apply(link.update, rows, jax.tree.map(lambda x: jnp.asarray(x)[None], link.init()))
  assert len({hash(link.update) for link in links}) == 1
  before = _apply._cache_size()
  _apply(chain(temperature(9.0), top_k(1), top_p(0.3)).update, rows,
         jax.tree.map(lambda x: jnp.asarray(x)[None], links[0].init()))  # fmt: skip
  assert _apply._cache_size() == before
