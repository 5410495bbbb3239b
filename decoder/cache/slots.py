"""Reading and writing the slots of a row, whatever layout says which slot is whose."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from decoder.ops.attention import Partial, Query, attend
from decoder.types import NONE, Array


def put(buffer: Array, values_BTKH: Array, slots_BT: Array) -> Array:
  """Values written to slots of [B, K, S, H]; a slot past the end is dropped. One scatter over (row, head, slot): in
  place where the buffer is donated, on CPU and on TPU alike."""
  batch, heads = buffer.shape[:2]
  rows, heads = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
  return buffer.at[rows, heads, slots_BT[:, None, :]].set(values_BTKH.swapaxes(1, 2).astype(buffer.dtype), mode="drop")


def span(x: Array, block: Array, size: int, axis: int) -> Array:
  """The entries of one block along an axis."""
  return lax.dynamic_slice_in_dim(x, block * size, size, axis=axis)


def attend_blocks(
  layout: Any, query: Query, kv_heads: int, storage: Any, read: Callable, drafts: Partial | None
) -> Array:
  """Attention over the blocks of a layout that hold something: [B, T, N, H]. The rest as in `Layout.attend`."""
  first, last = layout.blocks(query.positions_BT, query.window)
  return attend(
    query, kv_heads, lambda block: (*read(layout, storage, block), layout.read_positions(block)), first, last, drafts
  )


def needed_blocks(positions: Array, positions_BT: Array, window: int | None, block: int) -> tuple[Array, Array]:
  """The range of blocks, first … last − 1, that queries at positions_BT may need of slots that hold `positions`, in no
  order: [..., S]."""
  oldest = jnp.int32(0)
  if window is not None:
    newest = jnp.iinfo(jnp.int32).max
    oldest = jnp.maximum(jnp.min(jnp.where(positions_BT >= 0, positions_BT, newest)) - window + 1, 0)
  needed_S = jnp.any(positions >= oldest, axis=tuple(range(positions.ndim - 1)))
  index_S = jnp.arange(needed_S.shape[0], dtype=jnp.int32)
  last = jnp.max(jnp.where(needed_S, index_S, NONE)) // block + 1
  return jnp.minimum(jnp.min(jnp.where(needed_S, index_S, needed_S.shape[0])) // block, last), last
