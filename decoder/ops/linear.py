"""Products with a weight. Weights keep the published [out, in] order: XLA's CPU backend streams it as fast or
faster for few rows than [in, out], checkpoints need no transposing, and quantised blocks run along `in`."""

import jax.numpy as jnp

from decoder.ops.kernels.matmul import matmul
from decoder.types import Array, QTensor


def linear(x: Array, weight_FD: Array | QTensor, bias_F: Array | None = None) -> Array:
  """x [..., D] times weight_FD transposed, plus bias: [..., F], in x's type."""
  out = matmul(x, weight_FD)
  if bias_F is None:
    return out
  return out + jnp.broadcast_to(bias_F.astype(x.dtype), out.shape)
