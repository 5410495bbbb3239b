"""The C++ products against float64 on the host: every format, shapes that fit no tile, one thread and several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops import quantised
from decoder.ops.kernels import build, products
from decoder.ops.linear import linear, linears, swiglu
from decoder.ops.norm import Normed

pytestmark = pytest.mark.skipif(not build.ready(), reason="no C++ compiler built the CPU kernels here")

FORMATS = ("float32", "bfloat16", *quantised.KINDS)
# 1-row strips, odd sizes, one chunk, many chunks (threads), more than 16 rows.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33)


def draw(shape, seed):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=shape) * np.exp(rng.normal(size=shape))).astype(np.float32)


def encode(w, kind):
  if kind in quantised.KINDS:
    return jax.tree.map(jnp.asarray, quantised.quantise(w, kind, striped=True))
  return jnp.asarray(w, kind)


def decode(weight):
  if isinstance(weight, jax.Array):
    return np.asarray(weight, np.float64)
  return np.asarray(quantised.dequantise(weight), np.float64)


def distance(out, expected):
  return np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max()


# int16 activations err by 1.5e-5 of a group's largest, which here may be far above the others
def bound(kind):
  return 3e-4 if kind in quantised.KINDS else 2e-6


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", FORMATS)
def test_product_is_the_product_of_the_meaning(kind, rows):
  for F, D in ((1, 32), (33, 64), (50, 96), (600, 576)):
    weight, x = encode(draw((F, D), 0), kind), draw((rows, D), rows)
    out = jax.jit(lambda x, w: linear(x, w))(x, weight)
    assert out.shape == (rows, F)
    assert distance(out, x.astype(np.float64) @ decode(weight).T) < bound(kind), (F, D)


@pytest.mark.parametrize("D", [1, 3, 15, 16, 17, 47, 100])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_floats_of_any_width(kind, D):
  weight, x = encode(draw((21, D), 0), kind), draw((2, 3, D), 1)
  out = jax.jit(linear)(x, weight)
  assert distance(out, x.astype(np.float64) @ decode(weight).T) < bound(kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_one_wrong_weight_is_seen(kind):
  """Negative control: the tolerance is finer than one weight of 576."""
  w, x = draw((32, 576), 0), np.abs(draw((2, 576), 1)) + 1
  broken = w.copy()
  broken[7, 300] += 2.0
  right, wrong = (decode(encode(one, kind)) for one in (w, broken))
  out = jax.jit(linear)(x, encode(w, kind))
  assert distance(out, x @ right.T) < bound(kind) < distance(out, x @ wrong.T)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 3, 8, 20])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_finite_stays_so_and_stays_in_its_row(kind, rows, bad):
  weight, x = encode(draw((40, 64), 0), kind), draw((rows, 64), 1)
  x[rows - 1, 5] = bad
  out = np.asarray(jax.jit(linear)(x, weight))
  assert not np.isfinite(out[-1]).any()
  assert np.isfinite(out[:-1]).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_many_calls_from_several_threads_agree(kind):
  weight, x = encode(draw((512, 256), 0), kind), draw((3, 256), 1)

  @jax.jit
  def many(x):
    branches = [linear(x * (i + 1), weight) / (i + 1) for i in range(8)]  # XLA may run these at once
    return jax.lax.fori_loop(0, 20, lambda i, total: total + sum(branches), jnp.zeros_like(branches[0]))

  assert distance(many(x) / 160, x.astype(np.float64) @ decode(weight).T) < bound(kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_inside_a_donated_loop(kind):
  weight = encode(draw((64, 64), 0) / 20, kind)

  def run(x):
    return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(linear(c[1], weight))), (0, x))[1]

  expected = draw((2, 64), 1)
  out = jax.jit(run, donate_argnums=0)(jnp.asarray(expected))
  for _ in range(5):
    expected = np.tanh(expected @ decode(weight).T)
  np.testing.assert_allclose(out, expected, atol=1e-3 if kind in quantised.KINDS else 1e-5)


def test_gradients_are_those_of_the_plain_product():
  x, w = jnp.asarray(draw((3, 20), 0)), jnp.asarray(draw((7, 20), 1))
  ours = jax.grad(lambda x, w: jnp.sum(linear(x, w) ** 2), (0, 1))(x, w)
  plain = jax.grad(lambda x, w: jnp.sum(products.dot(x, w) ** 2), (0, 1))(x, w)
  for one, other in zip(ours, plain):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_vmap_is_a_loop_over_rows():
  x, w = jnp.asarray(draw((5, 2, 20), 0)), jnp.asarray(draw((7, 20), 1))
  np.testing.assert_allclose(jax.vmap(lambda row: linear(row, w))(x), x @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FORMATS)
def test_bfloat16_activations_give_bfloat16(kind):
  weight, x = encode(draw((40, 64), 0), kind), jnp.asarray(draw((2, 64), 1), jnp.bfloat16)
  out = jax.jit(linear)(x, weight)
  assert out.dtype == jnp.bfloat16
  assert distance(out, np.asarray(x, np.float64) @ decode(weight).T) < 5e-3


@pytest.mark.parametrize("kind", FORMATS)
def test_programs_for_tpu_hold_no_call_into_the_cpu(kind):
  weight, x = encode(draw((40, 64), 0), kind), jnp.zeros((1, 64))
  traced = jax.jit(linear).trace(x, weight)
  assert "decoder_" in traced.lower(lowering_platforms=("cpu",)).as_text()
  assert "decoder_" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_prompts_in_floats_go_through_xla():
  x, w = jnp.zeros((products.FEW + 1, 64)), jnp.zeros((32, 64))
  assert "decoder_" not in jax.jit(linear).lower(x, w).as_text()


def silu(x):
  with np.errstate(over="ignore"):
    return x / (1 + np.exp(-x))


def normed(x, scale):
  wide = np.asarray(x, np.float64)
  return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 20])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_stands_around_products_is_part_of_the_call(kind, rows):
  x, scale, residual = draw((rows, 576), 1), np.abs(draw((576,), 2)), draw((rows, 200), 3)
  weights = [encode(draw((F, 576), 4 + F), kind) for F in (200, 33, 200)]
  meant = [decode(weight).T for weight in weights]

  @jax.jit
  def layer(x, residual):
    read = Normed(x, jnp.asarray(scale), 1e-5)
    each = linears(read, [(weight, None) for weight in weights])
    return each, swiglu(read, weights[0], weights[2]), linear(read, weights[0], None, residual)

  each, gated, added = layer(x, residual)
  wide = normed(x, scale)
  for got, weight in zip(each, meant):
    assert distance(got, wide @ weight) < bound(kind)
  assert distance(gated, silu(wide @ meant[0]) * (wide @ meant[2])) < 2 * bound(kind)
  assert distance(added, residual + wide @ meant[0]) < bound(kind)
  assert distance(added, wide @ meant[0]) > 10 * bound(kind)  # negative control: the residual matters


def test_weights_of_several_formats_share_a_call():
  x, weights = draw((3, 64), 0), [encode(draw((40, 64), i), kind) for i, kind in enumerate(FORMATS)]
  lowered = jax.jit(lambda x: linears(x, [(weight, None) for weight in weights])).lower(x)
  assert lowered.as_text().count("@decoder_products") == 1
  for kind, got, weight in zip(FORMATS, lowered.compile()(x), weights):
    assert distance(got, x @ decode(weight).T) < bound(kind), kind


def test_the_gate_is_exact_far_out():
  x = jnp.asarray([[-200.0, -80.0, -1.0, 0.0, 1.0, 80.0, 200.0, 3e38] + [0.0] * 23 + [1.0]])
  one = jnp.zeros((32, 32)).at[:, 31].set(1.0)
  np.testing.assert_allclose(swiglu(x, jnp.eye(32), one), silu(np.asarray(x, np.float64)), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("gate", [False, True])
def test_gradients_with_all_around_are_those_of_the_plain_form(gate):
  x, w, scale = jnp.asarray(draw((3, 20), 0)), jnp.asarray(draw((20, 20), 1)), jnp.asarray(draw((20,), 2))

  def ours(x, w, scale):
    read = Normed(x, scale, 1e-5)
    return jnp.sum((swiglu(read, w, w) if gate else linear(read, w, None, x)) ** 2)

  def plain(x, w, scale):
    out = Normed(x, scale, 1e-5).array() @ w.T
    return jnp.sum((jax.nn.silu(out) * out if gate else x + out) ** 2)

  for one, other in zip(jax.grad(ours, (0, 1, 2))(x, w, scale), jax.grad(plain, (0, 1, 2))(x, w, scale)):
    np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-3 * float(jnp.abs(other).max()))
