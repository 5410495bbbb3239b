"""What flash-decoding promises: temporaries of one block whatever the capacity."""

import jax
import jax.numpy as jnp
import pytest

from decoder.cache import LayerSpec, Raw, allocate
from decoder.ops import attention
from decoder.ops.attention import Query
from decoder.ops.kernels import attention as kernel

N, K = 4, 2  # query and key/value heads
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
