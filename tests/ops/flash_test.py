"""What flash-decoding promises: temporaries of one block whatever the capacity, and parts that merge to the whole."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.cache import LayerSpec, Raw, allocate
from decoder.ops import attention
from decoder.ops.attention import Query
from decoder.ops.kernels import attention as kernel
from decoder.ops.kernels import build

B, T, N, K, H = 2, 2, 4, 2, 16
BLOCK = 256  # slots, as caches are read


def temporaries(step, slots: int) -> int:
  """Bytes that one attention step over a donated cache of `slots` needs besides it."""
  cache = jax.eval_shape(lambda: allocate((LayerSpec("global", K, 64),), 1, slots, codec=Raw(jnp.float32)))
  q = jax.ShapeDtypeStruct((1, 1, N, 64), jnp.float32)
  positions = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  return jax.jit(step, donate_argnums=0).lower(cache, q, positions).compile().memory_analysis().temp_size_in_bytes


def entry_step(cache, q, positions):
  """Ours: append, then attend through whatever the platform has."""
  cache = cache.claim(positions)
  entry = cache.layer(0).append(positions, q[:, :, :K], q[:, :, K:])
  out, entry = entry.attend(Query(q, positions, 0.125))
  return cache.with_layer(0, entry), out


def through_xla(cache, q, positions):
  """Ours without the kernel."""
  cache = cache.claim(positions)
  entry = cache.layer(0).append(positions, q[:, :, :K], q[:, :, K:])
  layout = entry.layout
  out = kernel.reference(
    Query(q, positions, 0.125), entry.storage["k"], entry.storage["v"], layout.positions_BS,
    layout.blocks(positions, None), layout.block,
  )  # fmt: skip
  return cache.with_layer(0, entry), out


def full_softmax(cache, q, positions):
  """Plain attention: scores of every slot at once."""
  cache = cache.claim(positions)
  entry = cache.layer(0).append(positions, q[:, :, :K], q[:, :, K:])
  folded = attention.fold_heads(q, K)
  query = Query(q, positions, 0.125)
  seen = attention.visible(positions, entry.layout.positions_BS, None)
  done = attention.absorb(attention.empty(folded), folded, query, entry.storage["k"], entry.storage["v"], seen)
  return cache.with_layer(0, entry), attention.finish(done)


@pytest.mark.parametrize("step", [entry_step, through_xla])
def test_temporaries_do_not_grow_with_the_capacity(step):
  """A block of keys and of values in float32 is 2 · 256 · K · 64 · 4 bytes = 256 KiB."""
  small, large = temporaries(step, 4096), temporaries(step, 65536)
  assert large <= small + 16384
  assert large <= 2 * 2 * BLOCK * K * 64 * 4


def test_a_full_softmax_would_be_seen():
  """Negative control."""
  small, large = temporaries(full_softmax, 4096), temporaries(full_softmax, 65536)
  assert large > 8 * small
  assert large > 2 * 2 * BLOCK * K * 64 * 4


def problem(seed: int, slots: int):
  """Ragged rows: hidden and forgotten slots, a query that is padding, one row with fewer tokens."""
  rng = np.random.default_rng(seed)
  q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, N, H), (B, K, slots, H), (B, K, slots, H)))
  held = np.tile(np.arange(slots, dtype=np.int32), (B, 1))
  held[rng.random(held.shape) < 0.2] = -1
  held[1, slots // 2 :] = -1
  positions = np.array([[slots - 2, slots - 1], [slots // 3, -1]], np.int32)
  return Query(q, jnp.asarray(positions), H**-0.5), k, v, jnp.asarray(held)


@jax.jit
def part(query, k, v, held, start, stop):
  """The softmax over slots start … stop − 1, the others hidden."""
  folded = attention.fold_heads(query.q_BTNH, K)
  slots = jnp.arange(held.shape[1])[None]
  held = jnp.where((slots >= start) & (slots < stop), held, -1)
  return attention.absorb(
    attention.empty(folded), folded, query, k, v, attention.visible(query.positions_BT, held, None)
  )


merge, finish = jax.jit(attention.merge), jax.jit(attention.finish)


SLOTS = 64
CUTS = st.lists(st.integers(0, SLOTS), max_size=6)


def merged(query, k, v, held, cuts, order):
  """Parts between the cuts, merged one after another in any order."""
  bounds = [0, *sorted(cuts), SLOTS]
  parts = [part(query, k, v, held, *pair) for pair in itertools.pairwise(bounds)]
  order.shuffle(parts)
  total = parts[0]
  for one in parts[1:]:
    total = merge(total, one)
  return attention.unfold_heads(finish(total), T)


@given(st.integers(0, 10**6), CUTS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_parts_merge_to_one_pass(seed, cuts, order):
  query, k, v, held = problem(seed, SLOTS)
  whole = attention.unfold_heads(finish(part(query, k, v, held, 0, SLOTS)), T)
  np.testing.assert_allclose(merged(query, k, v, held, cuts, order), whole, atol=1e-6)


def test_a_part_counted_twice_or_left_out_would_be_seen():
  """Negative control."""
  query, k, v, held = problem(0, SLOTS)
  whole = attention.finish(part(query, k, v, held, 0, SLOTS))
  one, other = part(query, k, v, held, 0, 20), part(query, k, v, held, 20, SLOTS)
  for wrong in (one, attention.merge(attention.merge(one, other), other)):
    assert np.abs(attention.finish(wrong) - whole).max() > 1e-2


@functools.cache
def compiled(attend, block):
  def run(q, positions, k, v, held):
    return attend(Query(q, positions, H**-0.5), k, v, held, (jnp.int32(0), jnp.int32(SLOTS // block)), block)

  return jax.jit(run)


@pytest.mark.skipif(not build.ready(), reason="no C++ compiler built the CPU kernels here")
@given(st.integers(0, 10**6), CUTS, st.randoms(use_true_random=False), st.sampled_from([8, 16, 32, 64]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_kernel_and_its_reference_are_the_merged_parts(seed, cuts, order, block):
  query, k, v, held = problem(seed, SLOTS)
  want = merged(query, k, v, held, cuts, order)
  assert kernel.fits(query, k, v)
  for attend in (kernel.decode_attend, kernel.reference):
    got = compiled(attend, block)(query.q_BTNH, query.positions_BT, k, v, held)
    np.testing.assert_allclose(got, want, atol=1e-6)
