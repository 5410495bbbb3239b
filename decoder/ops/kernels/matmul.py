"""Few rows times a weight, on CPU through C++: decoding reads every weight once a token, and XLA's dots for few rows
read floats more slowly than the memory would allow, and quantised weights not at all without writing them out first."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.ops import quantised
from decoder.ops.kernels import build
from decoder.types import Array, QTensor

FEW = 16  # rows; above, float weights are no longer what a product waits for, and XLA's blocked dot is better
_TYPES = (jnp.float32, jnp.bfloat16)


def matmul(x: Array, weight_FD: Array | QTensor) -> Array:
  """x [..., D] times weight_FD transposed: [..., F] in x's type, accumulated in float32."""
  return _native_or_dot(x, weight_FD) if _fits(x, weight_FD) and build.ready() else dot(x, weight_FD)


def dot(x: Array, weight_FD: Array | QTensor) -> Array:
  """The same through XLA."""
  contracted = (((x.ndim - 1,), (1,)), ((), ()))
  if not isinstance(weight_FD, QTensor):
    return lax.dot_general(x, weight_FD.astype(x.dtype), contracted)
  if quantised.KINDS[weight_FD.kind].grouped:
    return lax.dot_general(x, quantised.dequantise(weight_FD, x.dtype), contracted)
  values_FD, scales_F, _ = quantised.by_rows(weight_FD)
  out = lax.dot_general(x, values_FD.astype(x.dtype), contracted, preferred_element_type=jnp.float32)
  return (out * jnp.broadcast_to(scales_F, out.shape)).astype(x.dtype)


def _fits(x: Array, weight: Array | QTensor) -> bool:
  if x.dtype not in _TYPES or not x.size:
    return False
  if isinstance(weight, QTensor):
    return weight.striped
  return weight.dtype in _TYPES and weight.size > 0 and x.size <= FEW * x.shape[-1]


@jax.custom_jvp
def _native_or_dot(x: Array, weight_FD: Array | QTensor) -> Array:
  return lax.platform_dependent(x, weight_FD, cpu=_native, default=dot)


@_native_or_dot.defjvp
def _native_or_dot_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
  return _native_or_dot(*primals), jax.jvp(dot, primals, tangents)[1]


def _native(x: Array, weight_FD: Array | QTensor) -> Array:
  result = jax.ShapeDtypeStruct((*x.shape[:-1], weight_FD.shape[0]), jnp.float32)
  wide = x.astype(jnp.float32)  # f32: as the sums are
  if not isinstance(weight_FD, QTensor):
    return jax.ffi.ffi_call("decoder_matmul", result, vmap_method="sequential")(wide, weight_FD).astype(x.dtype)
  q = weight_FD
  call = jax.ffi.ffi_call("decoder_quantised", result, vmap_method="sequential")
  minimums = q.scales if q.minimums is None else q.minimums  # an operand must be there, if only to be ignored
  kind = np.int64(list(quantised.KINDS).index(q.kind))
  return call(wide, q.values, q.scales, minimums, kind=kind).astype(x.dtype)
