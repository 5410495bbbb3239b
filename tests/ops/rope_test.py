"""Rope frequencies against the published formulas, computed here in float64, pair by pair."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops.rope import rope, rotate

H, CONTEXT, THETA = 16, 128, 10000.0
PAIRS = range(H // 2)
POSITIONS = [*range(65), 4000]
plain = [THETA ** (-2 * i / H) for i in PAIRS]


def llama3(i):
  wave = 2 * math.pi / plain[i]
  if wave < 64 / 4:
    return plain[i]
  if wave > 64 / 1:
    return plain[i] / 8
  smooth = (64 / wave - 1) / (4 - 1)
  return (1 - smooth) * plain[i] / 8 + smooth * plain[i]


def yarn(i):
  """Sections 3.2: the pair that turns r times in the trained context is H·ln(L / 2πr) / 2·ln(θ)."""
  pair = lambda turns: H * math.log(64 / (2 * math.pi * turns)) / (2 * math.log(THETA))  # noqa: E731
  low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), H - 1)
  ramp = min(max((i - low) / (high - low), 0), 1)
  return plain[i] * (1 - ramp) + plain[i] / 4 * ramp


def dynamic(i, extent):
  ratio = max(extent, CONTEXT) / CONTEXT
  theta = THETA * (4 * ratio - 3) ** (H / (H - 2))
  return theta ** (-2 * i / H)


SHORT, LONG = [1 + i / 8 for i in PAIRS], [4 + i for i in PAIRS]
L3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LR = dict(short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64, factor=2.0)
KINDS = {
  # name: (parameters, inverse frequency of a pair for an extent, factor on the vectors)
  "default": ({}, lambda i, extent: plain[i], 1.0),
  "linear": ({"factor": 4.0}, lambda i, extent: plain[i] / 4, 1.0),
  "dynamic": ({"factor": 4.0}, dynamic, 1.0),
  "llama3": (L3, lambda i, extent: llama3(i), 1.0),
  "yarn": (
    {"factor": 4.0, "original_max_position_embeddings": 64}, lambda i, extent: yarn(i), 0.1 * math.log(4) + 1,
  ),
  "longrope": (
    LR, lambda i, extent: plain[i] / (LONG if extent > 64 else SHORT)[i], math.sqrt(1 + math.log(2) / math.log(64)),
  ),
}  # fmt: skip


def turned(x_TH, kind, extent):
  """By complex numbers: dimension i and i + H/2 are one."""
  _, inverse, scale = KINDS[kind]
  angle = np.outer(np.array(POSITIONS, np.float64), [inverse(i, extent) for i in PAIRS])
  z = (x_TH[:, : H // 2] + 1j * x_TH[:, H // 2 :]) * np.exp(1j * angle) * scale
  return np.concatenate([z.real, z.imag], axis=1)


def ours(x_TH, kind, extent):
  made = rope({"rope_type": kind, "rope_theta": THETA, **KINDS[kind][0]}, H, CONTEXT)
  positions = jnp.asarray([POSITIONS], jnp.int32)
  x_BTNH = jnp.asarray(x_TH, jnp.float32)[None, :, None]
  return np.asarray(rotate(x_BTNH, positions, made, jnp.array([extent])))[0, :, 0]


@pytest.fixture(scope="module")
def x_TH():
  return np.random.default_rng(0).normal(size=(len(POSITIONS), H)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extent", [50, 500])
def test_C118_every_type_follows_its_formula(kind, extent, x_TH):
  got, want = ours(x_TH, kind, extent), turned(x_TH, kind, extent)
  np.testing.assert_allclose(got[:65], want[:65], atol=3e-5)
  np.testing.assert_allclose(got[65], want[65], atol=3e-3)  # float32 angles of 4000 radians


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "default"])
def test_C118_ignoring_the_type_would_be_seen(kind, x_TH):
  """Negative control: plain rope passes at position 0 alone."""
  wrong, want = ours(x_TH, "default", 500), turned(x_TH, kind, 500)
  assert np.abs(wrong[1:] - want[1:]).max() > 0.1


def test_C118_an_unknown_type_is_an_error():
  with pytest.raises(ValueError, match="unknown rope_type 'su2'"):
    rope({"rope_type": "su2"}, H, CONTEXT)


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [None, "8", math.nan, True])
def test_a_missing_or_impossible_number_is_named(name, value):
  with pytest.raises(ValueError, match=name):
    rope({"rope_type": "llama3", **L3, name: value}, H, CONTEXT)


def test_scores_depend_on_distance_only():
  made = rope({}, H, CONTEXT)
  q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, H)).astype(np.float32)
  extent = jnp.array([1])

  def score(at, to):
    turn = lambda x, p: rotate(jnp.asarray(x), jnp.array([[p]]), made, extent)  # noqa: E731
    return float(jnp.sum(turn(q, at) * turn(k, to)))

  assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
  assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_dimensions_beyond_the_rotary_part_pass_through():
  made = rope({"partial_rotary_factor": 0.5}, H, CONTEXT)
  x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 2, H)), jnp.bfloat16)
  got = rotate(x, jnp.array([[7]]), made, jnp.array([9]))
  assert got.dtype == x.dtype
  np.testing.assert_array_equal(np.asarray(got[..., H // 2 :], np.float32), np.asarray(x[..., H // 2 :], np.float32))
  assert np.abs(np.asarray(got - x, np.float32)[..., : H // 2]).max() > 0.1


def test_rows_choose_their_own_stretch():
  made = rope({"rope_type": "dynamic", "factor": 4.0}, H, CONTEXT)
  x = jnp.ones((2, 1, 1, H))
  at = jnp.full((2, 1), 40)
  both = rotate(x, at, made, jnp.array([50, 500]))
  for row, extent in enumerate((50, 500)):
    alone = rotate(x[:1], at[:1], made, jnp.array([extent]))
    np.testing.assert_allclose(both[row], alone[0], atol=1e-6)
  assert np.abs(both[0] - both[1]).max() > 0.1


def test_layers_share_their_angles(monkeypatch):
  """Cosines cost more than all else that a rotation does. Without the shield XLA makes them in each layer."""
  turning = rope({"rope_type": "default", "rope_theta": 1e4}, 64, 512)

  def cosines():
    def layers(x, positions):
      for number in range(3):
        x = jnp.tanh(rotate(x, positions, turning, jnp.array([512])) @ jnp.full((64, 64), number / 64))
      return x

    arguments = jnp.ones((1, 1, 9, 64)), jnp.ones((1, 1), jnp.int32)
    return jax.jit(layers).lower(*arguments).compile().as_text().count(" cosine(")

  assert cosines() == 1
  monkeypatch.setattr("decoder.ops.rope.lax.reduce_precision", lambda x, *_: x)
  jax.clear_caches()
  assert cosines() >= 3
