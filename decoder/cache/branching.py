"""Where do the texts of several beams live? All in one row: what they share is stored once.

One idea: the beams of an example are a block of tokens of one row, and `positions_BWS[b, w, s]` is the position that
slot s holds *in the text of beam w*, NONE where that text does not pass through it. So a reordering of beams changes
this table and moves no keys or values; a slot that no beam passes through any more is free for the next token; and
what attention reads is the tree of texts that still live, rather than W copies of what they share.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax

from decoder.cache.slots import attend_blocks, needed_blocks, put, span
from decoder.ops.attention import Partial, Query
from decoder.types import NONE, Array


@struct.dataclass
class Branching:
  """A row of slots for the texts of W beams; buffers are [B, K, S, H] as in `Contiguous`, which `of` goes on from.

  slots_BW: where each beam's newest token lives; S, which is written nowhere, for none. A block of tokens has one token
  a beam. The slots must be as many as the prompt's tokens and W for each further one: a token that finds none is lost.
  """

  positions_BWS: Array
  slots_BW: Array
  capacity: int = struct.field(pytree_node=False)
  block: int = struct.field(pytree_node=False)
  in_order = True

  @classmethod
  def of(cls, prompts: Any, beams: int) -> "Branching":
    """Every beam's text begins with what the row holds. ValueError for fewer slots than beams."""
    batch, slots = prompts.positions_BS.shape
    if not 1 <= beams <= slots:
      raise ValueError(f"a row of {slots} slots serves 1 … {slots} beams, got {beams}; allocate more capacity")
    positions_BWS = jnp.broadcast_to(prompts.positions_BS[:, None], (batch, beams, slots))
    return cls(positions_BWS, jnp.full((batch, beams), slots, jnp.int32), prompts.capacity, prompts.block)

  @property
  def positions(self) -> Array:
    return self.positions_BWS

  def buffer_shape(self, heads: int, size: int) -> tuple[int, ...]:
    batch, _, slots = self.positions_BWS.shape
    return (batch, heads, slots, size)

  def claim(self, positions_BT: Array) -> "Branching":
    """Takes the lowest free slots, so that the blocks that hold something stay few."""
    batch, beams, slots = self.positions_BWS.shape
    if positions_BT.shape[1] != beams:
      raise ValueError(f"a cache of {beams} beams takes one token a beam at a time, got {positions_BT.shape[1]}")
    free_BS = jnp.all(self.positions_BWS < 0, axis=1)
    order_BS = jnp.where(free_BS, -jnp.arange(slots, dtype=jnp.int32)[None], -slots)
    slots_BW = jnp.where(positions_BT >= 0, -lax.top_k(order_BS, beams)[0], slots)
    rows, own = jnp.arange(batch)[:, None], jnp.arange(beams)[None]
    taken = self.positions_BWS.at[rows, own, slots_BW].set(positions_BT, mode="drop")
    return self.replace(positions_BWS=taken, slots_BW=slots_BW)

  def write(self, buffer: Array, values_BTKH: Array, positions_BT: Array) -> Array:
    """To the slots that were claimed last."""
    return put(buffer, values_BTKH, self.slots_BW)

  def blocks(self, positions_BT: Array, window: int | None) -> tuple[Array, Array]:
    """The range of blocks, first … last − 1, that queries at these positions may need."""
    return needed_blocks(self.positions_BWS, positions_BT, window, self.block)

  def read(self, buffer: Array, block: Array) -> Array:
    return span(buffer, block, self.block, axis=2)

  def read_positions(self, block: Array) -> Array:
    """[B, W, slots of a block]: as each beam sees them."""
    return span(self.positions_BWS, block, self.block, axis=2)

  def attend(self, query: Query, kv_heads: int, storage: Any, read: Callable, drafts: Partial | None) -> Array:
    return attend_blocks(self, query, kv_heads, storage, read, drafts)

  def truncate(self, length_B: Array) -> "Branching":
    """Forgets positions ≥ length."""
    kept = jnp.where(self.positions_BWS < length_B[:, None, None], self.positions_BWS, NONE)
    return self.replace(positions_BWS=kept)

  def follow(self, parents_BW: Array) -> "Branching":
    """Beam w goes on from the text of beam parents_BW[b, w] of its example; NONE leaves it without a text. No bytes of
    the cache move."""
    kept = jnp.take_along_axis(self.positions_BWS, jnp.maximum(parents_BW, 0)[..., None], axis=1)
    return self.replace(positions_BWS=jnp.where(parents_BW[..., None] >= 0, kept, NONE))

  def select(self, rows_R: Array) -> "Branching":
    """Row r, all its beams, becomes a copy of row rows_R[r]."""
    return self.replace(positions_BWS=self.positions_BWS[rows_R], slots_BW=self.slots_BW[rows_R])

  def select_buffer(self, buffer: Array, rows_R: Array) -> Array:
    return buffer[rows_R]

  def insert(self, rows_R: Array, other: "Branching") -> "Branching":
    """Row r of `other`, of as many beams and slots, replaces row rows_R[r]. Rows ≥ B are dropped."""
    if other.positions_BWS.shape[1:] != self.positions_BWS.shape[1:]:
      got, want = other.positions_BWS.shape[1:], self.positions_BWS.shape[1:]
      raise ValueError(f"cannot insert rows of {got} (beams, slots) into a cache of {want}: they must be equal")
    return self.replace(
      positions_BWS=self.positions_BWS.at[rows_R].set(other.positions_BWS, mode="drop"),
      slots_BW=self.slots_BW.at[rows_R].set(other.slots_BW, mode="drop"),
    )

  def insert_buffer(self, buffer: Array, rows_R: Array, other_buffer: Array) -> Array:
    return buffer.at[rows_R].set(other_buffer.astype(buffer.dtype), mode="drop")

  def trim(self, slots: int) -> "Branching":
    """Always ValueError: `insert` wants all slots."""
    raise ValueError(f"rows of beams cannot be cut to {slots} slots; move them whole, or before spread()")

  def trim_buffer(self, buffer: Array, slots: int) -> Array:
    return buffer[:, :, :slots]
