"""The C++ attention against `ops.attention` through XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops.attention import Query
from decoder.ops.kernels import attention, build

pytestmark = pytest.mark.skipif(not build.ready(), reason="no C++ compiler built the CPU kernels here")

#        B, T, N, K, H, S, block, window, softcap
CASES = [
  (1, 1, 9, 3, 64, 256, 256, None, None),
  (2, 3, 4, 2, 64, 512, 128, None, None),
  (3, 1, 8, 8, 128, 1024, 256, 100, None),
  (2, 5, 6, 1, 80, 30, 10, None, 30.0),
  (1, 1, 9, 3, 64, 8192, 256, None, None),
  (2, 16, 10, 2, 16, 700, 100, 64, 5.0),
]


def problem(case, dtype="float32", seed=0):
  B, T, N, K, H, S, block, window, softcap = case
  rng = np.random.default_rng(seed)
  held = rng.integers(T, S + 1, B)
  held[0] = S
  slots = np.arange(S)[None]
  positions_BS = np.where(slots < held[:, None], slots, -1).astype(np.int32)
  positions_BT = (held[:, None] - T + np.arange(T)[None]).astype(np.int32)
  if T > 1:
    positions_BT[-1, -1] = -1  # a finished row's query
  q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, N, H), (B, K, S, H), (B, K, S, H)))
  query = Query(q, jnp.asarray(positions_BT), H**-0.5, window=window, softcap=softcap)
  lowest = positions_BT[positions_BT >= 0].min()
  first = 0 if window is None else max(0, lowest - window + 1) // block
  blocks = jnp.int32(first), jnp.int32(positions_BS.max() // block + 1)
  return query, k.astype(dtype), v.astype(dtype), jnp.asarray(positions_BS), blocks, block


def native(query, k, v, positions_BS, blocks, block):
  def call(q, k, v, positions_BT, positions_BS, blocks):
    asked = query._replace(q_BTNH=q, positions_BT=positions_BT)
    assert attention.fits(asked, k, v)
    return attention.decode_attend(asked, k, v, positions_BS, blocks, block)

  return jax.jit(call)(query.q_BTNH, k, v, query.positions_BT, positions_BS, blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_is_the_attention_of_ops(case, dtype):
  query, k, v, *rest = problem(case, dtype)
  expected = attention.reference(query, k.astype(jnp.float32), v.astype(jnp.float32), *rest)
  if dtype == "bfloat16":
    k, v = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (k, v))
    np.testing.assert_allclose(attention.reference(query, k, v, *rest), expected, atol=0.02)  # multiplies in bfloat16
  np.testing.assert_allclose(native(query, k, v, *rest), expected, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] > 1])
def test_tokens_may_see_slots_of_their_own(case):
  """As beams of one row do: [B, T, S]."""
  query, k, v, positions_BS, *rest = problem(case)
  hidden_BTS = np.random.default_rng(1).random((*query.positions_BT.shape, k.shape[2])) < 0.5
  positions_BTS = jnp.where(hidden_BTS, -1, positions_BS[:, None])
  expected = attention.reference(query, k, v, positions_BTS, *rest)
  np.testing.assert_allclose(native(query, k, v, positions_BTS, *rest), expected, atol=1e-5)
  assert np.abs(expected - attention.reference(query, k, v, positions_BS, *rest)).max() > 1e-3


def test_a_key_too_many_is_seen():
  """Negative control: one more visible key of 30 is far outside the tolerance."""
  query, k, v, positions_BS, *rest = problem(CASES[3])
  expected = attention.reference(query, k, v, positions_BS, *rest)
  later = query._replace(positions_BT=jnp.where(query.positions_BT >= 0, query.positions_BT - 1, -1))
  assert np.abs(native(later, k, v, positions_BS, *rest) - expected).max() > 1e-3


def test_a_query_without_keys_is_zero_and_nothing_is_read_past_the_blocks():
  query, k, v, positions_BS, _, block = problem(CASES[1])
  k = k.at[:, :, block:].set(jnp.nan)
  v = v.at[:, :, block:].set(jnp.nan)
  out = native(query, k, v, positions_BS, (jnp.int32(0), jnp.int32(1)), block)
  assert np.isfinite(out).all()
  hidden = query._replace(positions_BT=jnp.full_like(query.positions_BT, -1))
  assert (native(hidden, k, v, positions_BS, (jnp.int32(0), jnp.int32(1)), block) == 0).all()


def test_nan_in_a_visible_key_is_not_hidden():
  query, k, v, *rest = problem(CASES[0])
  assert np.isnan(native(query, k.at[0, 0, 5, 3].set(jnp.nan), v, *rest)[:, :, :3]).all()
  assert np.isnan(native(query, k, v.at[0, 0, 5, 3].set(jnp.nan), *rest)[:, :, :3, 3]).all()


def test_far_scores_underflow_to_nothing_rather_than_to_nan():
  query, k, v, *rest = problem(CASES[0])
  query = query._replace(q_BTNH=query.q_BTNH * 1e3)
  np.testing.assert_allclose(native(query, k, v, *rest), attention.reference(query, k, v, *rest), atol=1e-4)


def test_the_cache_is_read_in_place():
  query, k, v, *rest = problem(CASES[4])

  def step(cache, q):
    cache = tuple(x.at[:, :, 0].set(1.0) for x in cache)
    return cache, attention.decode_attend(query._replace(q_BTNH=q), *cache, *rest)

  compiled = jax.jit(step, donate_argnums=0).lower((k, v), query.q_BTNH).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= k.nbytes + v.nbytes
  assert memory.temp_size_in_bytes < k.nbytes // 8


def test_gradients_are_those_of_the_reference():
  query, k, v, *rest = problem(CASES[1])

  def loss(attend, q):
    return jnp.sum(attend(query._replace(q_BTNH=q), k, v, *rest) ** 2)

  # the reference's loop has a traced trip count: forward mode only
  ours, plain = (
    jax.jvp(lambda q, f=f: loss(f, q), (query.q_BTNH,), (query.q_BTNH,))[1]
    for f in (attention.decode_attend, attention.reference)
  )
  np.testing.assert_allclose(ours, plain, rtol=1e-4)


def test_what_does_not_fit_is_refused():
  query, k, v, *_ = problem((1, 17, 2, 1, 64, 64, 64, None, None))
  assert not attention.fits(query, k, v)
  query, k, v, *_ = problem((1, 1, 2, 1, 24, 64, 64, None, None))
  assert not attention.fits(query, k, v)
  query, k, v, *_ = problem(CASES[0])
  assert not attention.fits(query, k.astype(jnp.int8), v.astype(jnp.int8))
