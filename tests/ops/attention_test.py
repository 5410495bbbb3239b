"""The block loop of attention against a dense float64 softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops import attention
from decoder.ops.attention import Query
from decoder.types import NONE

B, T, N, H, S = 3, 4, 4, 8, 24
CASES = {
  "plain": dict(kv_heads=4, window=None, softcap=None),
  "gqa": dict(kv_heads=2, window=None, softcap=None),
  "window": dict(kv_heads=4, window=5, softcap=None),
  "softcap": dict(kv_heads=1, window=7, softcap=3.0),
}


def oracle(q, k, v, positions, kv_positions, *, scale, window, softcap):
  """q [B,T,N,H], k and v [B,K,S,H] -> [B,T,N,H], written out row by row in float64."""
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(q.shape[:3]):
    head = n // (q.shape[2] // k.shape[1])
    score = k[b, head].astype(np.float64) @ q[b, t, n].astype(np.float64) * scale
    if softcap is not None:
      score = softcap * np.tanh(score / softcap)
    here, there = positions[b, t], kv_positions[b]
    seen = (there >= 0) & (there <= here)
    if window is not None:
      seen &= there > here - window
    if seen.any():
      weight = np.exp(score[seen] - score[seen].max())
      out[b, t, n] = weight @ v[b, head][seen].astype(np.float64) / weight.sum()
  return out


def problem(kv_heads, seed=0):
  """Ragged: row 0 is short, row 1 has slots in no order and a hole, row 2's first query is padding."""
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((B, T, N, H), (B, kv_heads, S, H), (B, kv_heads, S, H)))
  held = np.full((B, S), NONE, np.int32)
  held[0, :6] = np.arange(6)
  held[1] = rng.permutation(S)
  held[1, 3] = NONE
  held[2] = np.arange(S)
  positions = np.array([[2, 3, 4, 5], [20, 21, 22, 23], [NONE, 9, 10, 11]], np.int32)
  return q, k, v, positions, held


def attend(q, k, v, positions, held, size, *, kv_heads, window, softcap, first=0, last=None, partial=None):
  k, v, held = jnp.asarray(k), jnp.asarray(v), jnp.asarray(held)

  def read(block):
    cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)  # noqa: E731
    return cut(k, 2), cut(v, 2), cut(held, 1)

  query = Query(jnp.asarray(q), jnp.asarray(positions), H**-0.5, window=window, softcap=softcap)
  last = S // size if last is None else last
  return attention.attend(query, kv_heads, read, jnp.int32(first), jnp.int32(last), partial)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 8, S])
def test_blocks_equal_dense_attention(case, size):
  options = CASES[case]
  q, k, v, positions, held = problem(options["kv_heads"])
  want = oracle(q, k, v, positions, held, scale=H**-0.5, window=options["window"], softcap=options["softcap"])
  got = attend(q, k, v, positions, held, size, **options)
  np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("broken", ["window + 1", "no softcap", "heads interleaved", "slot order as position"])
def test_oracle_tells_wrong_variants_apart(broken):
  """Negative control."""
  options = dict(CASES["softcap"], kv_heads=2)
  q, k, v, positions, held = problem(2)
  want = oracle(q, k, v, positions, held, scale=H**-0.5, window=options["window"], softcap=options["softcap"])
  if broken == "window + 1":
    options["window"] += 1
  elif broken == "no softcap":
    options["softcap"] = None
  elif broken == "heads interleaved":
    q = q[:, :, [0, 2, 1, 3]]
  else:
    held = np.where(held >= 0, np.arange(S, dtype=np.int32)[None], NONE)
  assert np.abs(attend(q, k, v, positions, held, 8, **options) - want).max() > 1e-2


def test_a_query_that_sees_nothing_gives_zeros():
  options = CASES["plain"]
  q, k, v, positions, held = problem(4)
  got = attend(q, k, v, positions, np.full_like(held, NONE), 8, **options)
  assert not np.asarray(got).any()
  assert not np.asarray(attend(q, k, v, positions, held, 8, **options))[2, 0].any()
  none = attend(q, k, v, positions, held, 8, last=0, **options)
  assert not np.asarray(none).any()


def test_scores_of_extreme_size_stay_finite():
  options = CASES["plain"]
  q, k, v, positions, held = problem(4)
  want = oracle(q * 300, k * 300, v, positions, held, scale=H**-0.5, window=None, softcap=None)
  np.testing.assert_allclose(attend(q * 300, k * 300, v, positions, held, 8, **options), want, atol=2e-3)


@pytest.mark.parametrize("cut", [1, 2])
def test_parts_merge_to_the_whole(cut):
  options = CASES["window"]
  q, k, v, positions, held = problem(4)
  query = Query(jnp.asarray(q), jnp.asarray(positions), H**-0.5, window=options["window"])
  folded = attention.fold_heads(query.q_BTNH, 4)

  def part(start, stop):
    seen = attention.visible(query.positions_BT, jnp.asarray(held[:, start:stop]), query.window)
    blocks = jnp.asarray(k[:, :, start:stop]), jnp.asarray(v[:, :, start:stop])
    return attention.absorb(attention.empty(folded), folded, query, *blocks, seen)

  whole = attention.finish(part(0, S))
  one, other = part(0, 8 * cut), part(8 * cut, S)
  for merged in (attention.merge(one, other), attention.merge(other, one)):
    np.testing.assert_allclose(attention.finish(merged), whole, atol=1e-6)
  with_nothing = attention.merge(one, attention.empty(folded))
  np.testing.assert_array_equal(attention.finish(with_nothing), attention.finish(one))
  continued = attend(q, k, v, positions, held, 8, first=cut, partial=one, **options)
  np.testing.assert_allclose(continued, attention.unfold_heads(whole, T), atol=1e-6)


def test_folding_heads_is_undone_by_unfolding():
  x = jnp.arange(2 * 3 * 4 * 5, dtype=jnp.float32).reshape(2, 3, 4, 5)
  for kv_heads in (1, 2, 4):
    np.testing.assert_array_equal(attention.unfold_heads(attention.fold_heads(x, kv_heads), 3), x)
