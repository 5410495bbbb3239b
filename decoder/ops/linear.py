"""Products with a weight. Weights keep the published [out, in] order: XLA's CPU backend streams it as fast or
faster for few rows than [in, out], checkpoints need no transposing, and quantised blocks run along `in`."""

import jax.numpy as jnp
from jax import lax

from decoder.types import Array


def linear(x: Array, weight_FD: Array, bias_F: Array | None = None) -> Array:
  """x [..., D] times weight_FD transposed, plus bias: [..., F], in x's type."""
  contracted = ((x.ndim - 1,), (1,))
  out = lax.dot_general(x, weight_FD.astype(x.dtype), (contracted, ((), ())))
  if bias_F is None:
    return out
  return out + jnp.broadcast_to(bias_F.astype(x.dtype), out.shape)
