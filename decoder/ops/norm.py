"""Normalisations, computed in float32 whatever the type of their input."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from decoder.types import Array


def rms_norm(x: Array, weight_D: Array, epsilon: float) -> Array:
  """Root-mean-square norm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""
  wide = x.astype(jnp.float32)  # f32: squares of bf16 features lose the small ones
  scaled = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
  return (scaled * _along_last(weight_D, x)).astype(x.dtype)


class Normed(NamedTuple):
  """x as `rms_norm` would give it, left to whoever reads it: a product normalises on its way without another pass."""

  x: Array
  weight_D: Array
  epsilon: float

  @property
  def shape(self) -> tuple[int, ...]:
    return self.x.shape

  def array(self) -> Array:
    """The norm applied."""
    return rms_norm(*self)


def layer_norm(x: Array, weight_D: Array, bias_D: Array, epsilon: float) -> Array:
  """Layer norm over the last axis (Ba et al. 2016, arXiv:1607.06450)."""
  wide = x.astype(jnp.float32)  # f32: as above
  centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
  scaled = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
  return (scaled * _along_last(weight_D, x) + _along_last(bias_D, x)).astype(x.dtype)


def _along_last(vector_D: Array, x: Array) -> Array:
  return vector_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
