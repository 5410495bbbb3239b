"""A part of stacked weights is the weight that was stacked, whoever reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops import quantised
from decoder.ops.kernels import build
from decoder.ops.linear import linear, swiglu
from decoder.ops.stacked import Part, split
from decoder.types import QTensor

PARTS, D = 3, 64
FORMATS = ["float32", "bfloat16", *((kind, striped) for kind in quantised.KINDS for striped in (False, True))]
X = np.random.default_rng(1).normal(size=(2, D)).astype(np.float32)


def held(weight_FD, form):
  if isinstance(form, tuple):
    return jax.tree.map(jnp.asarray, quantised.quantise(weight_FD, form[0], striped=form[1]))
  return jnp.asarray(weight_FD, form)


@pytest.fixture(params=FORMATS, ids=str)
def form(request):
  return request.param


@pytest.fixture(params=[32, 24], ids=["whole stripes", "half a stripe"])
def weights(request):
  """[E, F, D]"""
  return np.random.default_rng(0).normal(size=(PARTS, request.param, D)).astype(np.float32)


def test_a_part_multiplies_as_the_weight_itself(form, weights):
  stacked = held(weights.reshape(-1, D), form)
  product = jax.jit(lambda x, w, number, y: linear(x, Part(w, number, PARTS), None, y))
  residual = np.ones((2, weights.shape[1]), np.float32)
  for number, weight_FD in enumerate(weights):
    assert Part(stacked, jnp.int32(number), PARTS).shape == weight_FD.shape
    got = product(X, stacked, jnp.int32(number), residual)
    np.testing.assert_allclose(got, linear(X, held(weight_FD, form), None, residual), atol=5e-3)
    assert np.abs(got - linear(X, held(weights[number - 1], form), None, residual)).max() > 1  # negative control


def test_gate_and_up_may_be_different_parts(form, weights):
  stacked = held(weights.reshape(-1, D), form)
  gated = jax.jit(lambda x, w, i, j: swiglu(x, Part(w, i, PARTS), Part(w, j, PARTS)))
  want = swiglu(X, held(weights[2], form), held(weights[0], form))
  np.testing.assert_allclose(gated(X, stacked, jnp.int32(2), jnp.int32(0)), want, atol=5e-2, rtol=5e-3)
  assert np.abs(gated(X, stacked, jnp.int32(0), jnp.int32(2)) - want).max() > 1  # negative control


def test_split_holds_all_of_them(form, weights):
  stacked = held(weights.reshape(-1, D), form)
  apart = split(stacked, PARTS)
  if isinstance(stacked, QTensor):
    wanted, apart = quantised.dequantise(stacked), jax.vmap(quantised.dequantise)(apart)
  else:
    wanted = stacked
  np.testing.assert_array_equal(apart, wanted.reshape(weights.shape))


@pytest.mark.skipif(not build.ready(), reason="no C++ compiler built the CPU kernels here")
def test_the_kernel_refuses_a_part_that_is_not_there(weights):
  stacked = jnp.asarray(weights.reshape(-1, D))
  product = jax.jit(lambda number: linear(jnp.asarray(X), Part(stacked, number, PARTS)))
  product(jnp.int32(PARTS - 1)).block_until_ready()
  for number in (-1, PARTS):
    with pytest.raises(Exception, match="no part of that number"):
      product(jnp.int32(number)).block_until_ready()
