"""How are vectors stored? A codec turns them into a pytree of buffers and back, through any layout."""

from typing import Any, Protocol

import jax.numpy as jnp
from flax import struct
from jax import lax

from decoder.cache.layouts import Layout
from decoder.types import Array


class Codec(Protocol):
  """group: tokens encoded together (1: each token alone). plain: the one buffer that holds the vectors as they are,
  float32, or bfloat16, which may be held as uint16, for kernels that read it in place; None where there is none."""

  group: int

  def init(self, layout: Layout, heads: int, size: int) -> Any: ...
  def write(self, storage: Any, layout: Layout, values_BTKH: Array, positions_BT: Array) -> Any: ...
  def read(self, storage: Any, layout: Layout, block: Array) -> Array: ...
  def plain(self, storage: Any) -> Array | None: ...


@struct.dataclass
class Raw:
  """Vectors as they are, in one floating-point type. bits: hold types of 2 bytes as uint16, through which no gradient
  passes. On CPU XLA has no writes of its own for bfloat16: it converts a whole buffer to float32 and back for each."""

  dtype: Any = struct.field(pytree_node=False, default=jnp.float32)
  bits: bool = struct.field(pytree_node=False, default=False)
  group: int = struct.field(pytree_node=False, default=1)

  def init(self, layout: Layout, heads: int, size: int) -> Array:
    return jnp.zeros(layout.buffer_shape(heads, size), self._held)

  def write(self, storage: Array, layout: Layout, values_BTKH: Array, positions_BT: Array) -> Array:
    return layout.write(storage, _as(values_BTKH.astype(self.dtype), self._held), positions_BT)

  def read(self, storage: Array, layout: Layout, block: Array) -> Array:
    return _as(layout.read(storage, block), self.dtype)

  def plain(self, storage: Array) -> Array | None:
    return None if self.dtype == jnp.float16 else storage

  @property
  def _held(self) -> Any:
    return jnp.uint16 if self.bits and jnp.dtype(self.dtype).itemsize == 2 else self.dtype


def _as(x: Array, dtype: Any) -> Array:
  return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
