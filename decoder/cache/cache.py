"""The cache a decode step threads: layouts by group, storage by layer, one immutable pytree.

A model names the groups of its layers (`LayerSpec`); `allocate` gives them a layout and a codec. An attention layer is
handed an `Entry`, which appends its tokens and attends; it never sees slots, blocks or formats.

Drafts of a tree share positions, so they cannot be written yet: after `branch(visible_BTT)` the next block of tokens
goes to a raw scratch tail, is attended through the mask, and `keep(path_BT)` commits one path of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from decoder.cache.codecs import Codec, Raw
from decoder.cache.encoded import Encoded
from decoder.cache.layouts import Contiguous, Layout
from decoder.ops import attention
from decoder.ops.kernels import attention as kernel
from decoder.types import NONE, Array

CROSS = "cross"  # the group of what an encoder has read, which decoding only reads


class LayerSpec(NamedTuple):
  """What one attention layer stores for a token. group: layers of a group share a layout; CROSS holds tokens of the
  text that an encoder has read. window: tokens its queries look back, None for all."""

  group: str
  kv_heads: int
  head_dim: int
  window: int | None = None


@struct.dataclass
class Tail:
  """A block of drafted tokens that share positions. visible_BTT[b, i, j]: draft i sees draft j."""

  positions_BT: Array
  visible_BTT: Array


@struct.dataclass
class Entry:
  """Keys and values of one layer, as its attention sees them."""

  layout: Layout
  storage: dict[str, Any]
  codec: Codec = struct.field(pytree_node=False)
  kv_heads: int = struct.field(pytree_node=False)
  tail: Tail | None = None
  drafts: dict[str, Array] | None = None

  def append(self, positions_BT: Array, k_BTKH: Array, v_BTKH: Array, rotate: Callable | None = None) -> "Entry":
    """Stores new tokens. k comes unrotated; this layout never renumbers a token, so it is rotated once, here."""
    values = {"k": k_BTKH if rotate is None else rotate(k_BTKH, positions_BT), "v": v_BTKH}
    if self.tail is not None:
      return self.replace(drafts=values)
    write = self.codec.write
    return self.replace(storage={n: write(self.storage[n], self.layout, values[n], positions_BT) for n in self.storage})

  def attend(self, query: attention.Query) -> tuple[Array, "Entry"]:
    """Attention of `query` over everything stored: [B, T, N, H], and the entry as it is afterwards."""
    if query.rotate is not None:
      query = query._replace(q_BTNH=query.rotate(query.q_BTNH, query.positions_BT))

    k, v = (self.codec.plain(self.storage[name]) for name in ("k", "v"))
    if self.tail is None and self.layout.in_order and kernel.fits(query, k, v):
      blocks = self.layout.blocks(query.positions_BT, query.window)
      return kernel.decode_attend(query, k, v, self.layout.positions, blocks, self.layout.block), self

    def read(layout: Layout, storage: dict[str, Any], block: Array) -> tuple[Array, Array]:
      return tuple(self.codec.read(storage[name], layout, block) for name in ("k", "v"))

    return self.layout.attend(query, self.kv_heads, self.storage, read, self._drafted(query)), self

  def _drafted(self, query: attention.Query) -> attention.Partial | None:
    """The softmax over the tail, where there is one."""
    if self.tail is None or self.drafts is None:
      return None
    folded = attention.fold_heads(query.q_BTNH, self.kv_heads)
    seen = attention.visible(query.positions_BT, self.tail.positions_BT, query.window) & self.tail.visible_BTT
    k, v = (self.drafts[name].swapaxes(1, 2) for name in ("k", "v"))
    return attention.absorb(attention.empty(folded), folded, query, k, v, seen)


@struct.dataclass
class Cache:
  """layouts: by group name. layers: each layer's storage. extent_B: tokens each row may reach (prompt and limit),
  which length-dependent rope reads. tail, drafts: only between `branch` and `keep`."""

  layouts: dict[str, Layout]
  layers: tuple[dict[str, Any], ...]
  extent_B: Array
  spec: tuple[LayerSpec, ...] = struct.field(pytree_node=False)
  codec: Codec = struct.field(pytree_node=False)
  tail: Tail | None = None
  drafts: tuple[dict[str, Array], ...] | None = None

  @property
  def capacity(self) -> int:
    """Tokens a row can hold, besides those of an encoder."""
    return min(layout.capacity for group, layout in self.layouts.items() if group != CROSS)

  @property
  def batch(self) -> int:
    return self.extent_B.shape[0]

  def claim(self, positions_BT: Array) -> "Cache":
    """Takes room for new tokens; a model calls it once a step, before its layers."""
    if self.tail is not None:
      return self.replace(tail=self.tail.replace(positions_BT=positions_BT))
    return self._growing(lambda layout: layout.claim(positions_BT))

  def claim_encoded(self, positions_BS: Array) -> "Cache":
    """Takes room for what an encoder has read; done once, before the layers of the group CROSS append it."""
    return self.replace(layouts={**self.layouts, CROSS: self.layouts[CROSS].claim(positions_BS)})

  def layer(self, index: int) -> Entry:
    """What layer `index` is handed."""
    spec = self.spec[index]
    return Entry(self.layouts[spec.group], self.layers[index], self.codec, spec.kv_heads, self.tail)

  def with_layer(self, index: int, entry: Entry) -> "Cache":
    """The cache with what layer `index` made of its entry."""
    layers = (*self.layers[:index], entry.storage, *self.layers[index + 1 :])
    drafts = self.drafts if entry.drafts is None else (*(self.drafts or ()), entry.drafts)
    return self.replace(layers=layers, drafts=drafts)

  def branch(self, visible_BTT: Array) -> "Cache":
    """Makes the next block a tree of drafts: draft i sees draft j where visible_BTT[:, i, j] (itself included)."""
    positions = jnp.full(visible_BTT.shape[:2], NONE, jnp.int32)
    return self.replace(tail=Tail(positions, visible_BTT), drafts=None)

  def keep(self, path_BT: Array) -> "Cache":
    """Commits one path of the drafted tree, given as indices into its block (NONE: no more), and drops the rest."""
    if self.tail is None:
      raise ValueError("keep() wants a drafted block: call branch(visible_BTT), then the model's forward, then keep()")
    chosen = jnp.maximum(path_BT, 0)
    positions = jnp.where(path_BT >= 0, jnp.take_along_axis(self.tail.positions_BT, chosen, axis=1), NONE)
    cache = self.replace(tail=None, drafts=None).claim(positions)
    index = chosen[:, :, None, None]
    for number, values in enumerate(self.drafts or ()):
      kept = {name: jnp.take_along_axis(x, index, axis=1) for name, x in values.items()}
      cache = cache.with_layer(number, cache.layer(number).append(positions, kept["k"], kept["v"]))
    return cache

  def truncate(self, length_B: Array) -> "Cache":
    """Forgets positions ≥ length: the rollback of speculation. No bytes move."""
    return self._growing(lambda layout: layout.truncate(length_B))

  def select(self, rows_R: Array) -> "Cache":
    """Row r becomes row rows_R[r]."""
    layouts = {name: layout.select(rows_R) for name, layout in self.layouts.items()}
    layers = self._each_buffer(lambda layout, x: layout.select_buffer(x, rows_R))
    return self.replace(layouts=layouts, layers=layers, extent_B=self.extent_B[rows_R])

  def spread(self, beams: int) -> "Cache":
    """The same rows, to be gone on from by so many beams each; nothing is copied. Each further block of tokens has one
    token a beam, and takes a slot for each."""
    return self._growing(lambda layout: layout.branched(beams))

  def follow(self, parents_BW: Array) -> "Cache":
    """After `spread`: beam w goes on from the text of beam parents_BW[b, w] of its row, NONE from none. Moves no bytes
    of keys and values."""
    return self._growing(lambda layout: layout.follow(parents_BW))

  def insert(self, rows_R: Array, other: "Cache") -> "Cache":
    """Row r of `other` replaces row rows_R[r]; rows_R ≥ B are dropped."""
    if other.spec != self.spec or other.codec != self.codec:
      raise ValueError(f"insert() wants a cache of the same model and codec, got {other.codec} for {self.codec}")
    layouts = {name: layout.insert(rows_R, other.layouts[name]) for name, layout in self.layouts.items()}
    layers = self._each_buffer(lambda layout, x, y: layout.insert_buffer(x, rows_R, y), other.layers)
    extent = self.extent_B.at[rows_R].set(other.extent_B, mode="drop")
    return self.replace(layouts=layouts, layers=layers, extent_B=extent)

  def trim(self, slots: int) -> "Cache":
    """The same rows with their first `slots` slots alone, to be moved and inserted elsewhere: tokens are read in the
    order of their positions there, and those in other slots are lost. Also of a cache of numpy arrays, and then without
    a copy."""
    layouts = {name: layout.trim(slots) for name, layout in self.layouts.items()}
    layers = self._each_buffer(lambda layout, x: layout.trim_buffer(x, slots))
    return self.replace(layouts=layouts, layers=layers)

  @property
  def form(self) -> tuple:
    """What tells two compilations of a program over caches of one model apart."""
    return self.codec, tuple(x.shape for x in jax.tree.leaves(self.layouts))

  def _growing(self, change: Callable) -> "Cache":
    """Changes the layouts of what decoding writes: what an encoder has read stays as it is."""
    kept = {name: layout if name == CROSS else change(layout) for name, layout in self.layouts.items()}
    return self.replace(layouts=kept)

  def _each_buffer(self, change: Callable, *others: tuple) -> tuple:
    changed = []
    for spec, *stored in zip(self.spec, self.layers, *others):
      layout = self.layouts[spec.group]
      changed.append(jax.tree.map(lambda *x, layout=layout: change(layout, *x), *stored))
    return tuple(changed)


def allocate(
  spec: Sequence[LayerSpec], batch: int, capacity: int, *, layout: Any = Contiguous, codec: Codec | None = None,
  source: int = 1, encoded: Any = Encoded,
) -> Cache:  # fmt: skip
  """An empty cache of `batch` rows for `capacity` tokens each, and for `source` tokens that an encoder reads, if the
  model has one.

  spec: one LayerSpec a layer, from the model's `cache_spec()`. layout: has `allocate(batch, capacity)`;
  encoded: likewise, of what an encoder reads.
  Takes batch × capacity × Σ kv_heads × head_dim × 2 × (bytes of the codec) bytes. ValueError for sizes below 1.
  """
  codec = Raw() if codec is None else codec
  groups = dict.fromkeys(s.group for s in spec)
  layouts = {
    group: encoded.allocate(batch, source) if group == CROSS else layout.allocate(batch, capacity) for group in groups
  }
  layers = tuple({name: codec.init(layouts[s.group], s.kv_heads, s.head_dim) for name in ("k", "v")} for s in spec)
  return Cache(layouts, layers, jnp.full((batch,), capacity, jnp.int32), tuple(spec), codec)
