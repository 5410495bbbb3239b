"""Products with a weight, and its rows. Weights keep the published [out, in] order: XLA's CPU backend streams it as
fast or faster for few rows than [in, out], checkpoints need no transposing, and quantised blocks run along `in`.

x may come as `Normed`, not yet normalised; what reads it applies the norm. A weight may come as `Part` of several.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from decoder.ops import quantised
from decoder.ops.kernels import products
from decoder.ops.norm import Normed
from decoder.ops.stacked import Part
from decoder.types import Array, QTensor


def linear(
  x: Array | Normed, weight_FD: Array | QTensor | Part, bias_F: Array | None = None, residual: Array | None = None
) -> Array:
  """x [..., D] times weight_FD transposed, plus bias and residual [..., F]: [..., F], in x's type."""
  (out,) = products.products(x, (weight_FD,), residual)
  return _biased(out, bias_F)


def linears(x: Array | Normed, weights: Sequence[tuple[Array | QTensor, Array | None]]) -> list[Array]:
  """x times each of several weights, given with their biases, read in one pass."""
  outs = products.products(x, tuple(weight for weight, _ in weights))
  return [_biased(out, bias) for out, (_, bias) in zip(outs, weights)]


def swiglu(x: Array | Normed, gate_FD: Array | QTensor | Part, up_FD: Array | QTensor | Part) -> Array:
  """silu(x·gateᵀ) · (x·upᵀ): [..., F] (Shazeer 2020, arXiv:2002.05202)."""
  return products.gated(x, gate_FD, up_FD)


def look_up(weight_FD: Array | QTensor, rows: Array) -> Array:
  """Rows of a weight: [..., D], float32 for a QTensor. Indices are clipped."""
  if isinstance(weight_FD, QTensor):
    return quantised.take_rows(weight_FD, rows)
  return jnp.take(weight_FD, rows, axis=0, mode="clip")


def _biased(out: Array, bias_F: Array | None) -> Array:
  return out if bias_F is None else out + jnp.broadcast_to(bias_F.astype(out.dtype), out.shape)
