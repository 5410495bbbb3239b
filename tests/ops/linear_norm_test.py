"""Products and norms against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops.linear import linear
from decoder.ops.norm import layer_norm, rms_norm

rng = np.random.default_rng(0)
x = rng.normal(size=(2, 3, 16)).astype(np.float32)
weight_D, bias_D = rng.normal(size=(2, 16)).astype(np.float32)
WIDE = x.astype(np.float64)


def test_linear_is_a_product_with_the_published_matrix():
  weight, bias = rng.normal(size=(5, 16)).astype(np.float32), rng.normal(size=5).astype(np.float32)
  np.testing.assert_allclose(linear(x, jnp.asarray(weight)), WIDE @ weight.T.astype(np.float64), atol=1e-5)
  with_bias = linear(x, jnp.asarray(weight), jnp.asarray(bias))
  np.testing.assert_allclose(with_bias, WIDE @ weight.T.astype(np.float64) + bias, atol=1e-5)
  assert linear(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight), jnp.asarray(bias)).dtype == jnp.bfloat16


def test_rms_norm():
  want = WIDE / np.sqrt((WIDE**2).mean(-1, keepdims=True) + 1e-5) * weight_D
  np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight_D), 1e-5), want, atol=1e-5)


def test_layer_norm():
  centred = WIDE - WIDE.mean(-1, keepdims=True)
  want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight_D + bias_D
  got = layer_norm(jnp.asarray(x), jnp.asarray(weight_D), jnp.asarray(bias_D), 1e-5)
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert np.abs(rms_norm(jnp.asarray(x), jnp.asarray(weight_D), 1e-5) - want).max() > 0.1  # negative control


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_norms_of_bfloat16_are_computed_in_float32(scale):
  narrow = jnp.asarray(x * scale, jnp.bfloat16)
  wide = np.asarray(narrow, np.float64)
  want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-9) * weight_D
  got = rms_norm(narrow, jnp.asarray(weight_D), 1e-9)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8)
