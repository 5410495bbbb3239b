"""Where does a token's entry live when a row's slots are divided among devices? Blocks are dealt out in turn.

Position p is in block p // block; block j lies on shard j mod n, as its block j // n. So all shards hold as much,
however short the text is, and each reads its own part only: attention is computed by each over what it holds, and the
partial softmaxes are merged (the split of flash-decoding, arXiv:2205.14135, across devices), for contexts longer than
one device's memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from decoder.cache.branching import Branching
from decoder.cache.layouts import Contiguous
from decoder.cache.slots import needed_blocks, put
from decoder.ops import attention
from decoder.types import NONE, Array

AXIS = "sequence"


@dataclasses.dataclass(frozen=True)
class Spreading:
  """Allocates `Spread` layouts over the axis `sequence` of a mesh."""

  mesh: Mesh

  def allocate(self, batch: int, capacity: int, block: int = 256) -> "Spread":
    """As `Contiguous`, padded to whole blocks for each shard."""
    shards = self.mesh.shape[AXIS]
    if batch < 1 or capacity < 1 or block < 1:
      raise ValueError(f"a cache needs batch, capacity and block ≥ 1, got {batch}, {capacity} and {block}")
    block = min(block, -(-capacity // shards))
    slots = -(-capacity // (block * shards)) * block * shards
    return Spread(jnp.full((batch, slots), NONE, jnp.int32), capacity, block, self.mesh)


class Divided:
  """A layout whose slots are divided. mesh: over whose axis `sequence`. over: one shard's positions -> what that shard
  holds, as a layout of its own."""

  mesh: Mesh
  over: Callable[[Array], Any]
  in_order = False

  def attend(
    self, query: attention.Query, kv_heads: int, storage: Any, read: Callable, drafts: attention.Partial | None
  ) -> Array:
    return _attend(self, query, kv_heads, storage, read, drafts)


@struct.dataclass
class Spread(Divided, Contiguous):
  """positions_BS and buffers [B, K, S, H] are divided along S, in as many parts as the mesh's axis `sequence` is
  long."""

  mesh: Mesh = struct.field(pytree_node=False)

  def write(self, buffer: Array, values_BTKH: Array, positions_BT: Array) -> Array:
    return _put(self.mesh, buffer, values_BTKH, self._slots(positions_BT))

  def over(self, positions: Array) -> Contiguous:
    return Contiguous(positions, self.capacity, self.block)

  def branched(self, beams: int) -> "SpreadBranching":
    shared = Branching.of(self, beams)
    return SpreadBranching(shared.positions_BWS, shared.slots_BW, shared.capacity, shared.block, self.mesh)

  def insert(self, rows_R: Array, other: "Spread") -> "Spread":
    """As in `Contiguous`; a block keeps its shard."""
    held_BS = self._widened(other.positions_BS, 1, NONE)
    return self.replace(positions_BS=self.positions_BS.at[rows_R].set(held_BS, mode="drop"))

  def insert_buffer(self, buffer: Array, rows_R: Array, other_buffer: Array) -> Array:
    return buffer.at[rows_R].set(self._widened(other_buffer, 2, 0).astype(buffer.dtype), mode="drop")

  def trim(self, slots: int) -> "Spread":
    """Always ValueError: the first slots are not those of the first positions."""
    raise ValueError(
      f"rows whose slots are divided among devices cannot be cut to {slots}; use a mesh without sequence"
    )

  def _widened(self, x: Array, axis: int, spare: int) -> Array:
    """The slots of a smaller layout where this one has them."""
    room, held, shards = self.positions_BS.shape[1], x.shape[axis], self.mesh.shape[AXIS]
    if held > room:
      raise ValueError(f"cannot insert rows of {held} slots into a cache of {room}: allocate it with capacity ≥ {held}")
    parts = x.reshape(*x.shape[:axis], shards, held // shards, *x.shape[axis + 1 :])
    widths = [(0, 0)] * parts.ndim
    widths[axis + 1] = (0, (room - held) // shards)
    return jnp.pad(parts, widths, constant_values=spare).reshape(*x.shape[:axis], room, *x.shape[axis + 1 :])

  def _slots(self, positions_BT: Array) -> Array:
    shards, slots = self.mesh.shape[AXIS], self.positions_BS.shape[1]
    block, within = positions_BT // self.block, positions_BT % self.block
    slots_BT = block % shards * (slots // shards) + block // shards * self.block + within
    outside = (positions_BT < 0) | (positions_BT >= self.capacity)
    return jnp.where(outside, slots, slots_BT)


@struct.dataclass
class SpreadBranching(Divided, Branching):
  """The slots of beams, divided likewise."""

  mesh: Mesh = struct.field(pytree_node=False)

  def write(self, buffer: Array, values_BTKH: Array, positions_BT: Array) -> Array:
    return _put(self.mesh, buffer, values_BTKH, self.slots_BW)

  def over(self, positions: Array) -> Branching:
    return Branching(positions, self.slots_BW, self.capacity, self.block)


def _put(mesh: Mesh, buffer: Array, values_BTKH: Array, slots_BT: Array) -> Array:
  """`put`, by each shard of what falls to it."""

  def own(shard: Array, buffer: Array, values_BTKH: Array, slots_BT: Array) -> Array:
    held = buffer.shape[2]
    slots_BT = slots_BT - shard[0] * held
    return put(buffer, values_BTKH, jnp.where(slots_BT < 0, held, slots_BT))  # past the end: dropped

  along, whole = PartitionSpec(None, None, AXIS), PartitionSpec()
  return _each(mesh, own, (along, whole, whole), along)(_numbers(mesh), buffer, values_BTKH, slots_BT)


def _attend(
  layout: Divided, query: attention.Query, kv_heads: int, storage: Any, read: Callable, drafts: attention.Partial | None
) -> Array:
  """Attention over what all shards hold, and over `drafts`, which each of them has: [B, T, N, H]."""
  asked = (query.q_BTNH, query.positions_BT, query.bias)

  def own(shard: Array, storage: Any, kv_positions: Array, asked: tuple, drafts: Any) -> Array:
    q_BTNH, positions_BT, bias = asked
    mine = query._replace(q_BTNH=q_BTNH, positions_BT=positions_BT, bias=bias, rotate=None)
    held = layout.over(kv_positions)
    first, last = needed_blocks(kv_positions, positions_BT, query.window, layout.block)

    def read_own(block: Array) -> tuple[Array, Array, Array]:
      return (*read(held, storage, block), held.read_positions(block))

    partial = attention.absorb_blocks(mine, kv_heads, read_own, first, last, None)
    merged = _merged(partial)
    return attention.finished(mine, merged if drafts is None else attention.merge(merged, drafts))

  along, whole = PartitionSpec(None, None, AXIS), PartitionSpec()
  positions = PartitionSpec(*(None,) * (layout.positions.ndim - 1), AXIS)
  specs = (jax.tree.map(lambda _: along, storage), positions, whole, whole)
  operands = (_numbers(layout.mesh), storage, layout.positions, asked, drafts)
  return _each(layout.mesh, own, specs, whole)(*operands)


def _merged(partial: attention.Partial) -> attention.Partial:
  """The softmax over the keys of all shards."""
  peak = lax.pmax(partial.peak_BKQ, AXIS)
  shrink = jnp.exp(partial.peak_BKQ - peak)
  mass, value = lax.psum((partial.mass_BKQ * shrink, partial.value_BKQH * shrink[..., None]), AXIS)
  return attention.Partial(peak, mass, value)


def _each(mesh: Mesh, own: Callable, in_specs: tuple, out_specs: Any) -> Callable:
  """By each shard; what the other axes of the mesh divide stays for the partitioner."""
  return jax.shard_map(
    own, mesh=mesh, in_specs=(PartitionSpec(AXIS), *in_specs), out_specs=out_specs, axis_names={AXIS}, check_vma=False
  )


def _numbers(mesh: Mesh) -> Array:
  """The number of each shard, given to it: XLA's partitioner on CPU does not tell it inside a partly manual program."""
  return jnp.arange(mesh.shape[AXIS], dtype=jnp.int32)
