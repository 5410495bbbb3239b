"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the published ways to stretch it.

`rope(parameters, ...)` turns a checkpoint's `rope_parameters` into frequencies once, on the host; `rotate` applies
them. Halves are split (dimension i pairs with i + h), as Hugging Face checkpoints store them.

`dynamic` and `longrope` choose frequencies by a length. Here that is each row's own planned extent, fixed when the
row starts, so that a row does not depend on its neighbours.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.types import Array


class Rope(NamedTuple):
  """inverse_h: float32 radians per position, one for each pair of dimensions. scale: factor on the rotated vectors.

  stretch: extent_B (int32, tokens a row may reach) -> inverse_Bh, where frequencies depend on length; else None.
  """

  inverse_h: np.ndarray
  scale: float = 1.0
  stretch: Callable[[Array], Array] | None = None


def rope(parameters: Mapping[str, Any], head_dim: int, context: int) -> Rope:
  """Frequencies for `rope_parameters` as transformers 5 writes them (`rope_type`, `rope_theta`, ...).

  head_dim: size of a head. context: `max_position_embeddings`. Raises ValueError for an unknown `rope_type` or a
  missing number, never falls back to plain rope: that reads well at first and breaks on long context only.
  """
  kind = parameters.get("rope_type", parameters.get("type", "default"))
  if kind not in _KINDS:
    raise ValueError(f"unknown rope_type {kind!r}; this build knows {', '.join(sorted(_KINDS))}")
  size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
  plain_h = _inverse(_number(parameters, "rope_theta", 10000.0), size)
  return _KINDS[kind](parameters, plain_h, context)


def rotate(x_BTNH: Array, positions_BT: Array, rope: Rope, extent_B: Array) -> Array:
  """Turns each pair of dimensions by position × frequency. Dimensions beyond 2h pass through unchanged.

  Angles are float32: bfloat16 cannot tell position 256 from 257.
  """
  inverse_Bh = jnp.asarray(rope.inverse_h)[None] if rope.stretch is None else rope.stretch(extent_B)
  angle_BT1h = (positions_BT.astype(jnp.float32)[:, :, None] * inverse_Bh[:, None, :])[:, :, None, :]
  half = rope.inverse_h.shape[0]
  # As precise as before; but XLA does not look through it, and would compute both anew for each head of each layer.
  both_BT1H = lax.reduce_precision(jnp.concatenate([jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)], axis=-1), 8, 23)
  cos, sin = both_BT1H[..., :half] * rope.scale, both_BT1H[..., half:] * rope.scale
  first, second = x_BTNH[..., :half].astype(jnp.float32), x_BTNH[..., half : 2 * half].astype(jnp.float32)
  turned = [first * cos - second * sin, second * cos + first * sin]
  if 2 * half == x_BTNH.shape[-1]:
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)
  return jnp.concatenate([*(t.astype(x_BTNH.dtype) for t in turned), x_BTNH[..., 2 * half :]], axis=-1)


def _inverse(theta: float, size: int) -> np.ndarray:
  exponent_h = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
  return (1.0 / np.float32(theta) ** exponent_h).astype(np.float32)


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
  value = parameters.get(name, default)
  if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
    raise ValueError(f"rope parameter {name!r} must be a finite number, got {value!r} in {dict(parameters)}")
  return float(value)


def _default(parameters, plain_h, context) -> Rope:
  return Rope(plain_h)


def _linear(parameters, plain_h, context) -> Rope:
  """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
  return Rope((plain_h / np.float32(_number(parameters, "factor"))).astype(np.float32))


def _dynamic(parameters, plain_h, context) -> Rope:
  """NTK-aware scaling by length: theta grows once a row's extent passes the trained context."""
  factor, theta = _number(parameters, "factor"), _number(parameters, "rope_theta", 10000.0)
  trained = _number(parameters, "original_max_position_embeddings", context)
  size = 2 * len(plain_h)
  exponent_h = jnp.asarray(np.arange(0, size, 2, dtype=np.float32) / np.float32(size))

  def stretch(extent_B: Array) -> Array:
    ratio_B = jnp.maximum(extent_B.astype(jnp.float32), trained) / trained
    theta_B = theta * (factor * ratio_B - (factor - 1)) ** (size / (size - 2))
    return 1.0 / theta_B[:, None] ** exponent_h[None, :]

  return Rope(plain_h, 1.0, stretch)


def _llama3(parameters, plain_h, context) -> Rope:
  """Llama 3.1: long waves slowed by `factor`, short ones kept, those between blended."""
  factor, trained = _number(parameters, "factor"), _number(parameters, "original_max_position_embeddings")
  low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
  turns_h = trained * plain_h / (2 * math.pi)  # full turns within the trained context
  keep_h = np.clip((turns_h - low) / (high - low), 0.0, 1.0)
  return Rope(((1 - keep_h) * plain_h / factor + keep_h * plain_h).astype(np.float32))


def _yarn(parameters, plain_h, context) -> Rope:
  """YaRN (Peng et al. 2023, arXiv:2309.00071), sections 3.2 and 3.4."""
  factor = _number(parameters, "factor")
  trained = _number(parameters, "original_max_position_embeddings", context)
  theta, size = _number(parameters, "rope_theta", 10000.0), 2 * len(plain_h)

  def dimension(turns: float) -> float:  # the pair that makes `turns` full turns within the trained context
    return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

  low, high = dimension(_number(parameters, "beta_fast", 32)), dimension(_number(parameters, "beta_slow", 1))
  if parameters.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, size - 1)
  span = max(high - low, 0.001)  # a ramp of width 0 would divide by 0
  slow_h = np.clip((np.arange(len(plain_h)) - low) / span, 0.0, 1.0)
  return Rope((slow_h * plain_h / factor + (1 - slow_h) * plain_h).astype(np.float32), _yarn_scale(parameters, factor))


def _yarn_scale(parameters, factor: float) -> float:
  def magnitude(weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

  if parameters.get("attention_factor") is not None:
    return _number(parameters, "attention_factor")
  if parameters.get("mscale") and parameters.get("mscale_all_dim"):
    return magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))
  return magnitude(1.0)


def _longrope(parameters, plain_h, context) -> Rope:
  """LongRoPE (Ding et al. 2024, arXiv:2402.13753): one factor a pair, a short and a long list."""
  trained = _number(parameters, "original_max_position_embeddings", context)
  lists = {}
  for name in ("short_factor", "long_factor"):
    factor_h = np.asarray(parameters.get(name, ()), np.float32)
    if factor_h.shape != plain_h.shape:
      raise ValueError(f"rope parameter {name!r} must list {len(plain_h)} numbers, got {factor_h.shape}")
    lists[name] = (plain_h / factor_h).astype(np.float32)
  factor = parameters.get("factor") or context / trained
  scale = parameters.get("attention_factor")
  if scale is None:
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
  short_h, long_h = lists["short_factor"], lists["long_factor"]

  def stretch(extent_B: Array) -> Array:
    return jnp.where((extent_B > trained)[:, None], jnp.asarray(long_h)[None], jnp.asarray(short_h)[None])

  return Rope(short_h, float(scale), stretch)


_KINDS = {
  "default": _default,
  "linear": _linear,
  "dynamic": _dynamic,
  "llama3": _llama3,
  "yarn": _yarn,
  "longrope": _longrope,
}
