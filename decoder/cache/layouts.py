"""Where does a token's entry live? A layout maps positions to slots; it owns the positions, not the bytes.

One idea: `positions_BS[b, s]` is the position that slot s of row b holds, NONE if it holds nothing. Everything
(padding, rollback, finished rows) is said by changing positions; the bytes of a forgotten slot just stay until they
are written over. How the bytes look is the codec's business.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from flax import struct

from decoder.cache.branching import Branching
from decoder.cache.slots import attend_blocks, put, span
from decoder.ops.attention import Partial, Query
from decoder.types import NONE, Array


class Layout(Protocol):
  """Shared by the layers of a group; every method is pure. positions: what each slot holds, [B, S], or [B, T, S] where
  each query token sees slots of its own. in_order: whether blocks lie one after another in buffers [B, K, S, H],
  `block` slots each, so that a kernel may read them in place. attend: a query over what is stored, `drafts` included;
  read: (layout, storage, block) -> (k_BKSH, v_BKSH) of one block. branched: the layout of so many beams a row."""

  positions: Array
  capacity: int
  in_order: bool

  def buffer_shape(self, heads: int, size: int) -> tuple[int, ...]: ...
  def claim(self, positions_BT: Array) -> "Layout": ...
  def write(self, buffer: Array, values_BTKH: Array, positions_BT: Array) -> Array: ...
  def blocks(self, positions_BT: Array, window: int | None) -> tuple[Array, Array]: ...
  def read(self, buffer: Array, block: Array) -> Array: ...
  def read_positions(self, block: Array) -> Array: ...
  def attend(self, query: Query, kv_heads: int, storage: Any, read: Callable, drafts: Partial | None) -> Array: ...
  def branched(self, beams: int) -> "Layout": ...
  def truncate(self, length_B: Array) -> "Layout": ...
  def select(self, rows_R: Array) -> "Layout": ...
  def select_buffer(self, buffer: Array, rows_R: Array) -> Array: ...
  def insert(self, rows_R: Array, other: "Layout") -> "Layout": ...
  def insert_buffer(self, buffer: Array, rows_R: Array, other_buffer: Array) -> Array: ...
  def trim(self, slots: int) -> "Layout": ...
  def trim_buffer(self, buffer: Array, slots: int) -> Array: ...


@struct.dataclass
class Contiguous:
  """Position p lives in slot p; buffers are [B, K, S, H].

  A write at NONE, or at or past `capacity`, is dropped: it never lands on another token's slot.
  block: slots read at a time. Slots are padded to whole blocks; padding is never written.
  """

  positions_BS: Array
  capacity: int = struct.field(pytree_node=False)
  block: int = struct.field(pytree_node=False)
  in_order = True

  @property
  def positions(self) -> Array:
    return self.positions_BS

  @classmethod
  def allocate(cls, batch: int, capacity: int, block: int = 256) -> "Contiguous":
    """An empty layout for `batch` rows of `capacity` tokens. Raises ValueError for sizes below 1."""
    if batch < 1 or capacity < 1 or block < 1:
      raise ValueError(f"a cache needs batch, capacity and block ≥ 1, got {batch}, {capacity} and {block}")
    block = min(block, capacity)
    slots = -(-capacity // block) * block
    return cls(jnp.full((batch, slots), NONE, jnp.int32), capacity, block)

  def buffer_shape(self, heads: int, size: int) -> tuple[int, ...]:
    batch, slots = self.positions_BS.shape
    return (batch, heads, slots, size)

  def claim(self, positions_BT: Array) -> "Contiguous":
    """Takes slots for new tokens; done once a step, before the layers write."""
    rows = jnp.arange(positions_BT.shape[0])[:, None]
    taken = self.positions_BS.at[rows, self._slots(positions_BT)].set(positions_BT, mode="drop")
    return self.replace(positions_BS=taken)

  def write(self, buffer: Array, values_BTKH: Array, positions_BT: Array) -> Array:
    return put(buffer, values_BTKH, self._slots(positions_BT))

  def blocks(self, positions_BT: Array, window: int | None) -> tuple[Array, Array]:
    """The range of blocks, first … last − 1, that queries at these positions may need."""
    last = jnp.max(self.positions_BS) // self.block + 1
    if window is None:
      return jnp.int32(0), last
    lowest = jnp.min(jnp.where(positions_BT >= 0, positions_BT, self.capacity))
    return jnp.minimum(jnp.maximum(lowest - window + 1, 0) // self.block, last), last

  def read(self, buffer: Array, block: Array) -> Array:
    return span(buffer, block, self.block, axis=2)

  def read_positions(self, block: Array) -> Array:
    return span(self.positions_BS, block, self.block, axis=1)

  def attend(self, query: Query, kv_heads: int, storage: Any, read: Callable, drafts: Partial | None) -> Array:
    return attend_blocks(self, query, kv_heads, storage, read, drafts)

  def branched(self, beams: int) -> Layout:
    """The same rows, each gone on from by so many beams."""
    return Branching.of(self, beams)

  def truncate(self, length_B: Array) -> "Contiguous":
    """Forgets positions ≥ length."""
    return self.replace(positions_BS=jnp.where(self.positions_BS < length_B[:, None], self.positions_BS, NONE))

  def select(self, rows_R: Array) -> "Contiguous":
    """Row r becomes a copy of row rows_R[r]; this layout has no tables, so buffers are copied too."""
    return self.replace(positions_BS=self.positions_BS[rows_R])

  def select_buffer(self, buffer: Array, rows_R: Array) -> Array:
    return buffer[rows_R]

  def insert(self, rows_R: Array, other: "Contiguous") -> "Contiguous":
    """Row r of `other` replaces row rows_R[r]. `other` may have fewer slots, not more. Rows ≥ B are dropped."""
    room, held = self.positions_BS.shape[1], other.positions_BS.shape[1]
    if held > room:
      raise ValueError(f"cannot insert rows of {held} slots into a cache of {room}: allocate it with capacity ≥ {held}")
    spare = jnp.full((other.positions_BS.shape[0], room - held), NONE, jnp.int32)
    rows = jnp.concatenate([other.positions_BS, spare], axis=1)
    return self.replace(positions_BS=self.positions_BS.at[rows_R].set(rows, mode="drop"))

  def insert_buffer(self, buffer: Array, rows_R: Array, other_buffer: Array) -> Array:
    return buffer.at[rows_R, :, : other_buffer.shape[2]].set(other_buffer.astype(buffer.dtype), mode="drop")

  def trim(self, slots: int) -> "Contiguous":
    """The first `slots` slots alone, for another layout's `insert`; tokens in others are lost."""
    slots = min(slots, self.positions_BS.shape[1])
    return self.replace(positions_BS=self.positions_BS[:, :slots], capacity=slots, block=slots)

  def trim_buffer(self, buffer: Array, slots: int) -> Array:
    return buffer[:, :, :slots]

  def _slots(self, positions_BT: Array) -> Array:
    outside = (positions_BT < 0) | (positions_BT >= self.capacity)
    return jnp.where(outside, self.positions_BS.shape[1], positions_BT)  # an index past the end is dropped
