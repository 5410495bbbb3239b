"""How are vectors stored? A codec turns them into a pytree of buffers and back, through any layout."""

from typing import Any, Protocol

import jax.numpy as jnp
from flax import struct

from decoder.cache.layouts import Layout
from decoder.types import Array


class Codec(Protocol):
  """group: tokens encoded together (1: each token alone). plain: the one buffer that holds the vectors as they are, for
  kernels that read it in place; None where there is none."""

  group: int

  def init(self, layout: Layout, heads: int, size: int) -> Any: ...
  def write(self, storage: Any, layout: Layout, values_BTKH: Array, positions_BT: Array) -> Any: ...
  def read(self, storage: Any, layout: Layout, block: Array) -> Array: ...
  def plain(self, storage: Any) -> Array | None: ...


@struct.dataclass
class Raw:
  """Vectors as they are, in one floating-point type."""

  dtype: Any = struct.field(pytree_node=False, default=jnp.float32)
  group: int = struct.field(pytree_node=False, default=1)

  def init(self, layout: Layout, heads: int, size: int) -> Array:
    return jnp.zeros(layout.buffer_shape(heads, size), self.dtype)

  def write(self, storage: Array, layout: Layout, values_BTKH: Array, positions_BT: Array) -> Array:
    return layout.write(storage, values_BTKH, positions_BT)

  def read(self, storage: Array, layout: Layout, block: Array) -> Array:
    return layout.read(storage, block)

  def plain(self, storage: Array) -> Array:
    return storage
