import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops import quantised
from decoder.ops.kernels import products
from decoder.ops.linear import linear

GGUF_KINDS = [kind for kind, of in quantised.KINDS.items() if of.block]
SHAPES = [(33, 64), (48, 96), (16, 32)]


def weight(shape, seed=0):
  rng = np.random.default_rng(seed)
  drawn = rng.normal(size=shape) * rng.uniform(0.1, 3, (shape[0], 1))
  drawn[3] = 0  # a row of zeros has scale 0
  return drawn.astype(np.float32)


def meaning(q):
  return np.asarray(quantised.dequantise(jax.tree.map(jnp.asarray, q)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_gguf_blocks_keep_their_meaning_bit_for_bit(kind, striped, shape):
  w = weight(shape)
  as_gguf = gguf.GGMLQuantizationType[kind.upper()]
  raw = gguf.quantize(w, as_gguf)
  loaded = quantised.from_gguf_blocks(raw, kind, shape, striped=striped)
  np.testing.assert_array_equal(meaning(loaded), gguf.dequantize(raw, as_gguf))
  ours = quantised.quantise(w, kind, striped=striped)
  jax.tree.map(np.testing.assert_array_equal, ours, loaded)


@pytest.mark.parametrize("kind", quantised.KINDS)
def test_both_orders_mean_the_same(kind):
  w = weight((33, 64))
  rows, striped = (quantised.quantise(w, kind, striped=order) for order in (False, True))
  np.testing.assert_array_equal(meaning(rows), meaning(striped))


def test_a_swapped_nibble_changes_the_meaning():
  """Negative control of the two tests above."""
  q = quantised.quantise(weight((16, 32)), "q4_0", striped=True)
  swapped = q.replace(values=q.values << 4 | q.values >> 4)
  assert (meaning(swapped) != meaning(q)).any()


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("q8_0", 127), ("q4_0", 8), ("q4_1", 15)])
def test_rounding_is_within_a_step(kind, steps):
  w = weight((48, 96))
  groups = np.abs(w).reshape(48, -1, 32 if quantised.KINDS[kind].grouped else 96).max(-1, keepdims=True)
  span = 2 * groups if kind == "q4_1" else groups
  wrong = np.abs(meaning(quantised.quantise(w, kind, striped=True)) - w).reshape(groups.shape[0], groups.shape[1], -1)
  assert (wrong <= span / steps * 1.01 + 1e-7).all()


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("kind", quantised.KINDS)
def test_take_rows_is_indexing_of_the_meaning(kind, striped):
  q = jax.tree.map(jnp.asarray, quantised.quantise(weight((33, 64)), kind, striped=striped))
  rows = jnp.array([[0, 5, 32], [17, 3, 99]])
  np.testing.assert_array_equal(jax.jit(quantised.take_rows)(q, rows), meaning(q)[np.minimum(rows, 32)])


@pytest.mark.parametrize("kind", quantised.KINDS)
def test_linear_by_rows_needs_no_kernel(kind):
  w, x = weight((33, 64)), np.random.default_rng(1).normal(size=(2, 3, 64)).astype(np.float32)
  q = jax.tree.map(jnp.asarray, quantised.quantise(w, kind, striped=False))
  np.testing.assert_allclose(jax.jit(linear)(x, q), x @ meaning(q).T, atol=2e-4)


def test_errors_say_what_is_wanted():
  with pytest.raises(ValueError, match="multiple of 32"):
    quantised.quantise(np.zeros((4, 33)), "q8_0", striped=True)
  with pytest.raises(ValueError, match="known are int8, q8_0"):
    quantised.quantise(np.zeros((4, 32)), "q9", striped=True)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_the_product_for_tpu_is_the_product(kind):
  """Scales spread over more than one pass of inputs; the control is a scale in its neighbour's place."""
  rng = np.random.default_rng(0)
  weight = jax.tree.map(jnp.asarray, quantised.quantise(rng.normal(size=(24, 4096 + 96)), kind, striped=False))
  x = jnp.asarray(rng.normal(size=(2, 3, 4096 + 96)), jnp.float32)
  expected = np.asarray(x, np.float64) @ np.asarray(quantised.dequantise(weight), np.float64).T
  np.testing.assert_allclose(products._spread(x, weight), expected, atol=1e-3)
  shifted = weight.replace(scales=jnp.roll(weight.scales, 1, axis=1))
  assert np.abs(products._spread(x, shifted) - expected).max() > 0.1
