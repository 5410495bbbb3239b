"""Few rows times weights, on CPU through C++: decoding reads every weight once a token, and XLA's dots for few rows
read floats more slowly than memory allows, and quantised weights not at all without writing them out first.

One call does what stands around a layer's products too, since memory idles between two calls: the norm before them,
and after them the gate or the residual sum. Of stacked weights it reads the `Part` that is asked for where it lies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.ops import quantised
from decoder.ops.kernels import build
from decoder.ops.kernels.dispatch import native_or_plain, traced_once
from decoder.ops.norm import Normed
from decoder.ops.stacked import Part, whole_stripes
from decoder.types import Array, QTensor

FEW = 16  # rows; above, float weights are no longer what a product waits for, and XLA's blocked dot is better
_TYPES = (jnp.float32, jnp.bfloat16)
_SPREAD = 128 * quantised.GROUP  # inputs whose scales a TPU's matrix unit takes in one pass
_KINDS = (*quantised.KINDS, "float32", "bfloat16")  # as the C++ numbers them


class _Task(NamedTuple):
  """What to do besides multiplying: epsilon of the norm before, None for none; whether the two results are a gate."""

  epsilon: float | None
  gated: bool


def products(x: Array | Normed, weights: tuple, residual: Array | None = None) -> tuple[Array, ...]:
  """x [..., D] times each weight [F, D] transposed: [..., F] each, in x's type, accumulated in float32.

  residual: what to add to the only result.
  """
  return _run(x, weights, residual, False)


def gated(x: Array | Normed, gate_FD: Array | QTensor | Part, up_FD: Array | QTensor | Part) -> Array:
  """silu(x·gateᵀ) · (x·upᵀ): [..., F]."""
  return _run(x, (gate_FD, up_FD), None, True)[0]


def dot(x: Array, weight_FD: Array | QTensor | Part) -> Array:
  """One product through XLA."""
  if isinstance(weight_FD, Part):
    weight_FD = weight_FD.weight()
  contracted = (((x.ndim - 1,), (1,)), ((), ()))
  if not isinstance(weight_FD, QTensor):
    return lax.dot_general(x, weight_FD.astype(x.dtype), contracted)
  if quantised.KINDS[weight_FD.kind].grouped:
    return lax.platform_dependent(x, weight_FD, tpu=_spread, default=_grouped)
  values_FD, scales_F, _ = quantised.by_rows(weight_FD)
  out = lax.dot_general(x, values_FD.astype(x.dtype), contracted, preferred_element_type=jnp.float32)
  return (out * jnp.broadcast_to(scales_F, out.shape)).astype(x.dtype)


def _grouped(x: Array, weight_FD: QTensor) -> Array:
  return lax.dot_general(x, quantised.dequantise(weight_FD, x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _spread(x: Array, weight_FD: QTensor) -> Array:
  """The same for TPU, where a weight reshaped into groups would be written out, twice: here scales reach their inputs
  by a product with zeros and ones, and the compiler fuses both products and what lies between them."""
  contracted = (((x.ndim - 1,), (1,)), ((), ()))
  values_FD, *floats_FG = quantised.by_rows(weight_FD)
  offset = quantised.KINDS[weight_FD.kind].offset
  total = jnp.zeros((*x.shape[:-1], weight_FD.shape[0]), jnp.float32)
  for start in range(0, x.shape[-1], _SPREAD):
    inputs = slice(start, min(start + _SPREAD, x.shape[-1]))
    groups = slice(inputs.start // quantised.GROUP, inputs.stop // quantised.GROUP)
    owner_D = jnp.arange(inputs.stop - inputs.start)[None] // quantised.GROUP
    owned_GD = (owner_D == jnp.arange(groups.stop - groups.start)[:, None]).astype(x.dtype)

    def spread(floats_FG: Array, groups: slice = groups, owned_GD: Array = owned_GD) -> Array:
      return jnp.matmul(floats_FG[:, groups].astype(x.dtype), owned_GD, precision=lax.Precision.HIGHEST)

    scales_FD, *minimums_FD = (spread(part) for part in floats_FG if part is not None)
    part_FD = (values_FD[:, inputs].astype(x.dtype) - jnp.asarray(offset, x.dtype)) * scales_FD
    part_FD = sum(minimums_FD, start=part_FD)
    total = total + lax.dot_general(x[..., inputs], part_FD, contracted, preferred_element_type=jnp.float32)
  return total.astype(x.dtype)


def _run(x: Array | Normed, weights: tuple, residual: Array | None, gate: bool) -> tuple[Array, ...]:
  scale_D, epsilon = (x.weight_D, x.epsilon) if isinstance(x, Normed) else (None, None)
  operands = (x.x if isinstance(x, Normed) else x, scale_D, residual, weights)
  task = _Task(epsilon, gate)
  native = all(_fits(operands[0], weight) for weight in weights) and build.ready()
  return _native_or_plain(task, *operands) if native else _plain(task, *operands)


def _fits(x: Array, weight: Array | QTensor | Part) -> bool:
  if isinstance(weight, Part):
    return _fits(x, weight.stacked) and (whole_stripes(weight) or not isinstance(weight.stacked, QTensor))
  if x.dtype not in _TYPES or not x.size:
    return False
  if isinstance(weight, QTensor):
    return weight.striped
  return weight.dtype in _TYPES and weight.size > 0 and x.size <= FEW * x.shape[-1]


def _plain(
  task: _Task, x: Array, scale_D: Array | None, residual: Array | None, weights: tuple[Array | QTensor | Part, ...]
) -> tuple[Array, ...]:
  """The same through XLA."""
  read = x if scale_D is None else Normed(x, scale_D, task.epsilon).array()
  results = [dot(read, weight) for weight in weights]
  if task.gated:
    return (jax.nn.silu(results[0]) * results[1],)
  return tuple(results) if residual is None else (residual + results[0],)


def _native(
  task: _Task, x: Array, scale_D: Array | None, residual: Array | None, weights: tuple[Array | QTensor | Part, ...]
) -> tuple[Array, ...]:
  def wide(part: Array | None) -> Array:  # f32: as the sums are
    return jnp.zeros((0,), jnp.float32) if part is None else part.astype(jnp.float32)

  parts = [weight if isinstance(weight, Part) else Part(weight, jnp.int32(0), 1) for weight in weights]
  buffers, kinds = [], []
  for weight in (part.stacked for part in parts):
    quantised_one = isinstance(weight, QTensor)
    kinds.append(_KINDS.index(weight.kind if quantised_one else str(weight.dtype)))
    # An operand must be there, if only to be ignored.
    minimums = weight.scales if quantised_one and weight.minimums is None else getattr(weight, "minimums", None)
    buffers += [weight.values, weight.scales, minimums] if quantised_one else [weight]
  kept = parts[:1] if task.gated else parts
  shapes = [jax.ShapeDtypeStruct((*x.shape[:-1], part.shape[0]), jnp.float32) for part in kept]
  call = jax.ffi.ffi_call("decoder_products", shapes, vmap_method="sequential")
  results = call(
    wide(x), wide(scale_D), wide(residual), jnp.stack([part.number for part in parts]), *buffers,
    kinds=np.array(kinds, np.int64), parts=np.array([part.parts for part in parts], np.int64),
    epsilon=np.float32(task.epsilon or 0.0), gated=task.gated,
  )  # fmt: skip
  return tuple(result.astype(x.dtype) for result in results)


_native_or_plain = traced_once(native_or_plain(_native, _plain))
