"""Attention of a few query tokens over a contiguous cache, on CPU through C++: filled blocks only, read in place."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.ops import attention
from decoder.ops.kernels import build
from decoder.ops.kernels.dispatch import native_or_plain, traced_once
from decoder.types import Array

FEW = 16  # query tokens; a prompt's chunk has enough work a key for XLA's dots
_LANES = 16  # head sizes are read in whole vectors
_TYPES = (jnp.float32, jnp.bfloat16)  # of queries
_HELD = (*_TYPES, jnp.uint16)  # of keys and values: uint16 are the bits of bfloat16


def fits(query: attention.Query, k_BKSH: Array | None, v_BKSH: Array | None) -> bool:
  """Whether `decode_attend` is made for these shapes and types, and its kernel could be built."""
  if k_BKSH is None or v_BKSH is None or query.bias is not None:
    return False
  tokens, head_dim = query.q_BTNH.shape[1], query.q_BTNH.shape[3]
  known = query.q_BTNH.dtype in _TYPES and k_BKSH.dtype in _HELD and k_BKSH.dtype == v_BKSH.dtype
  return known and tokens <= FEW and head_dim % _LANES == 0 and build.ready()


def decode_attend(
  query: attention.Query, k_BKSH: Array, v_BKSH: Array, kv_positions: Array, blocks: tuple[Array, Array], block: int
) -> Array:
  """Attention of `query` (q already rotated) over blocks first … last − 1 of a cache row: [B, T, N, H].

  k_BKSH, v_BKSH: float32, or bfloat16, also by its bits as uint16. kv_positions: the position each slot holds, [B, S],
  or [B, T, S] where each query token has its own. block: slots to a block. The result is `reference`'s up to rounding.
  """
  span = jnp.stack([jnp.asarray(x, jnp.int32) for x in blocks])
  asked = _Asked(query.scale, query.window, query.softcap, block)
  run = _traced_once if isinstance(span, jax.core.Tracer) else _chosen  # of known blocks there are gradients
  return run(asked, query.q_BTNH, k_BKSH, v_BKSH, query.positions_BT, kv_positions, span)


class _Asked(NamedTuple):
  """What is fixed when a program is made; see `Query`."""

  scale: float
  window: int | None
  softcap: float | None
  block: int


def _native(asked: _Asked, q_BTNH: Array, *others: Array) -> Array:
  call = jax.ffi.ffi_call("decoder_attend", jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32), vmap_method="sequential")
  out = call(
    q_BTNH.astype(jnp.float32), *others,
    block=np.int64(asked.block), window=np.int64(asked.window or 0),
    scale=np.float32(asked.scale), softcap=np.float32(asked.softcap or 0.0),
  )  # fmt: skip
  return out.astype(q_BTNH.dtype)


def _plain(asked: _Asked, q_BTNH: Array, k: Array, v: Array, positions_BT: Array, kv: Array, span: Array) -> Array:
  query = attention.Query(q_BTNH, positions_BT, asked.scale, window=asked.window, softcap=asked.softcap)
  return reference(query, k, v, kv, (span[0], span[1]), asked.block)


_chosen = native_or_plain(_native, _plain)
_traced_once = traced_once(_chosen)


def reference(
  query: attention.Query, k_BKSH: Array, v_BKSH: Array, kv_positions: Array, blocks: tuple[Array, Array], block: int
) -> Array:
  """The same through XLA."""

  def read(index: Array) -> tuple[Array, Array, Array]:
    k, v = (floats(lax.dynamic_slice_in_dim(x, index * block, block, axis=2)) for x in (k_BKSH, v_BKSH))
    return k, v, lax.dynamic_slice_in_dim(kv_positions, index * block, block, axis=kv_positions.ndim - 1)

  return attention.attend(query, k_BKSH.shape[1], read, *blocks, None)


def floats(x: Array) -> Array:
  """What bits stand for."""
  return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
