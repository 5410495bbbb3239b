"""The head of an order without sorting, against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.sampling import Context, top_p
from decoder.sampling.selection import FEW, head, keep_head, keep_number, only_if

LARGE = 262_144
CONTEXT = Context(jnp.zeros(1, jnp.int32), jnp.int32(0), jnp.int32(0))


def draw(kind, rows=8, size=LARGE, seed=0):
  rng = np.random.default_rng(seed)
  spread = {"peaked": 6.0, "between": 2.0, "flat": 0.3, "ties": 1.0, "equal": 0.0, "masked": 1.0, "tiny": 1e-30}[kind]
  x = rng.normal(size=(rows, size)) * spread
  if kind == "ties":
    x = np.round(x * 4) / 4
  if kind == "masked":
    x[rng.random(x.shape) < 0.9] = -np.inf
  return x.astype(np.float32) + np.float32(0)  # a partial sort tells −0 from +0, the callers of `head` do not


def sorted_nucleus(x_V, p):
  """(ids that must be kept, ids that may be), by sorting in float64; they differ where a mass is within 1e-6 of p."""
  order = np.argsort(-x_V, kind="stable")
  weight = np.exp(x_V[order].astype(np.float64) - x_V[order[0]])
  before = (np.cumsum(weight) - weight) / weight.sum()
  must, may = np.zeros(x_V.shape, bool), np.zeros(x_V.shape, bool)
  must[order[before < p * (1 - 1e-6)]] = True
  may[order[before < p * (1 + 1e-6)]] = True
  return must, may & (x_V > -np.inf)


@pytest.mark.parametrize("kind", ["peaked", "between", "flat", "ties", "equal", "masked", "tiny"])
def test_C83_nucleus_of_a_large_vocabulary_is_the_one_of_a_full_sort(kind):
  x_BV = draw(kind)
  link = top_p(0.9)
  kept_BV = np.asarray(jax.jit(jax.vmap(lambda x: link.update(x, link.init(), CONTEXT)))(x_BV)) > -np.inf
  for x_V, kept_V in zip(x_BV, kept_BV):
    must_V, may_V = sorted_nucleus(x_V, float(np.float32(0.9)))
    assert not (must_V & ~kept_V).any()
    assert not (kept_V & ~may_V).any()
    assert (may_V & ~must_V).sum() <= 5, "the oracle would pass anything"


def test_C83_another_mass_would_be_seen():
  """Negative control: a mass of .90001 keeps tokens that the oracle refuses."""
  (x_V,) = draw("flat", rows=1)
  link = top_p(0.90001)
  kept_V = np.asarray(jax.jit(lambda x: link.update(x, link.init(), CONTEXT))(x_V)) > -np.inf
  assert (kept_V & ~sorted_nucleus(x_V, float(np.float32(0.9)))[1]).any()


@pytest.mark.parametrize(
  ("number", "size"),
  [*((FEW, size) for size in (100, 16_384, 16_385, 49_152, 50_257)), (1, 64), (1, 65), (5, 4), (5, 321), (5, 50_257)],
)
@pytest.mark.parametrize("kind", ["peaked", "ties", "equal", "masked"])
def test_the_head_is_that_of_a_partial_sort(kind, number, size):
  chosen = jax.jit(lambda x_V: head(x_V, number))
  for x_V in draw(kind, rows=3, size=size):
    for got, want in zip(chosen(x_V), jax.lax.top_k(x_V, min(number, size))):
      np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("needed", ["none", "one", "all"])
def test_what_no_row_needs_is_skipped_however_deep_the_vmaps(depth, needed):
  """As with beams, which are rows of rows. A plain `cond` is none any more under one vmap."""
  shape = (2,) * depth
  needed_B = np.full(shape, needed == "all")
  needed_B[(0,) * depth] |= needed == "one"
  x_BV = np.arange(np.prod(shape, dtype=int) * 4, dtype=np.float32).reshape(*shape, 4)

  def nested(function):
    for _ in range(depth):
      function = jax.vmap(function)
    return jax.jit(function)

  mine = nested(lambda needed, x_V: only_if(needed, lambda x_V, more_V: x_V + more_V, x_V, 2 * x_V))
  plain = nested(lambda needed, x_V: jax.lax.cond(needed, lambda x_V: 3 * x_V, lambda x_V: x_V, x_V))
  np.testing.assert_array_equal(mine(needed_B, x_BV), np.where(needed_B[..., None], 3 * x_BV, x_BV))
  branches = [one.lower(needed_B, x_BV).as_text().count("stablehlo.case") for one in (mine, plain)]
  assert branches == [1, depth == 0]


_by_weight, _by_number = jax.jit(lambda x, n: keep_head(x, jnp.ones_like(x), n)), jax.jit(keep_number)


@pytest.mark.parametrize("number", [1, 255, 256, 257, 1000, 9999, 10_000])
@pytest.mark.parametrize("kind", ["peaked", "ties", "equal", "tiny"])
def test_heads_of_any_length(kind, number):
  """By number, where all weigh the same: the search is then one among logits, and at last one among ids."""
  (x_V,) = draw(kind, rows=1, size=10_000)
  want = np.argsort(-x_V, kind="stable")[:number]
  for left_V in (_by_weight(x_V, jnp.float32(number)), _by_number(x_V, jnp.float32(number))):
    assert set(np.nonzero(np.asarray(left_V) > -np.inf)[0].tolist()) == set(want.tolist())
