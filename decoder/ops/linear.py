"""Products with a weight, and its rows. Weights keep the published [out, in] order: XLA's CPU backend streams it as
fast or faster for few rows than [in, out], checkpoints need no transposing, and quantised blocks run along `in`."""

import jax.numpy as jnp

from decoder.ops import quantised
from decoder.ops.kernels.matmul import matmul
from decoder.types import Array, QTensor


def linear(x: Array, weight_FD: Array | QTensor, bias_F: Array | None = None) -> Array:
  """x [..., D] times weight_FD transposed, plus bias: [..., F], in x's type."""
  out = matmul(x, weight_FD)
  if bias_F is None:
    return out
  return out + jnp.broadcast_to(bias_F.astype(x.dtype), out.shape)


def look_up(weight_FD: Array | QTensor, rows: Array) -> Array:
  """Rows of a weight: [..., D], float32 for a QTensor. Indices are clipped."""
  if isinstance(weight_FD, QTensor):
    return quantised.take_rows(weight_FD, rows)
  return jnp.take(weight_FD, rows, axis=0, mode="clip")
