"""A mixture of experts is a loop over tokens and their experts, whichever way it is computed."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops import moe, quantised
from decoder.ops.kernels import build, products
from decoder.types import QTensor

E, F, D, K = 5, 48, 32, 2
rng = np.random.default_rng(0)
ROUTER = rng.normal(size=(E, D)).astype(np.float32) * 0.5
FLOATS = moe.Experts(*(rng.normal(size=s).astype(np.float32) * 0.3 for s in ((E * F, D), (E * F, D), (E * D, F))))
FORMS = ["float32", *((kind, striped) for kind in ("int8", "q4_1") for striped in (False, True))]
F32 = "float32"


def held(experts, form):
  """Inner sizes that are no multiple of 32 stay floats."""

  def one(weight):
    if isinstance(form, tuple) and quantised.fits(weight.shape):
      return jax.tree.map(jnp.asarray, quantised.quantise(weight, form[0], striped=form[1]))
    return jnp.asarray(weight, F32 if isinstance(form, tuple) else form)

  return moe.Experts(*map(one, experts))


def meant(experts):
  floats = (quantised.dequantise(w) if isinstance(w, QTensor) else w for w in experts)
  return moe.Experts(*(np.asarray(w, np.float64) for w in floats))


def tokens(*shape, seed=1):
  return np.random.default_rng(seed).normal(size=(*shape, D)).astype(np.float32)


def mixtral(p, k):
  """Shares of one token's experts from their probabilities."""
  best = sorted(range(len(p)), key=lambda e: (-p[e], e))[:k]
  return {e: p[e] / sum(p[i] for i in best) for e in best}


def not_renormalised(p, k):
  return {e: p[e] for e in mixtral(p, k)}


def renormalised_before(p, k):
  """Among one more than are then taken."""
  wider = mixtral(p, k + 1)
  return {e: wider[e] for e in mixtral(p, k)}


def evenly(p, k):
  return dict.fromkeys(mixtral(p, k), 1 / k)


def loop(x, experts, rule=mixtral, k=K):
  """float64, token by token and expert by expert, from scratch."""
  gate, up, down = (w.reshape(E, -1, w.shape[-1]) for w in meant(experts))
  out = np.zeros(x.shape)
  for at in np.ndindex(x.shape[:-1]):
    v = x[at].astype(np.float64)
    p = np.exp(ROUTER.astype(np.float64) @ v)
    for e, share in rule(p / p.sum(), k).items():
      g = gate[e] @ v
      out[at] += share * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ v)))
  return out


WAYS = {
  "as it chooses": moe.mixture,
  "every": lambda x, router, experts, k, y: moe._every(x, moe.route(x, router, k), experts, y),
  "chosen": lambda x, router, experts, k, y: moe._chosen(x, moe.route(x, router, k), experts, y, None),
}


def run(way, x, experts, k=K, residual=0.0):
  residual = jnp.full(x.shape, residual, x.dtype)
  return jax.jit(WAYS[way], static_argnums=3)(jnp.asarray(x), jnp.asarray(ROUTER), experts, k, residual)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, products.FEW // 2 + 1)], ids=str)
def test_it_is_the_loop_over_tokens_and_experts(way, shape, form):
  x, experts = tokens(*shape), held(FLOATS, form)
  got = run(way, x, experts, residual=1.5)
  want = 1.5 + loop(x, experts)
  scale = np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=scale * (3e-4 if isinstance(form, tuple) else 2e-6))


@pytest.mark.parametrize("rule", [not_renormalised, renormalised_before, evenly])
def test_other_rules_are_noticed(rule):
  """Negative control."""
  x, experts = tokens(2, 3), held(FLOATS, F32)
  assert np.abs(loop(x, experts, rule) - loop(x, experts)).max() > 0.05
  assert np.abs(run("as it chooses", x, experts) - loop(x, experts, rule)).max() > 0.05


@pytest.mark.parametrize("shape", [(1, 1), (2, 20)], ids=str)
def test_all_experts_chosen_are_the_dense_mixture(shape):
  """As one wide MLP whose parts are weighed by the softmax."""
  x, experts = tokens(*shape), held(FLOATS, F32)
  hidden = jax.nn.silu(x @ experts.gate.T) * (x @ experts.up.T)
  share = jax.nn.softmax(x @ ROUTER.T, axis=-1)
  weighed = hidden.reshape(*shape, E, F) * share[..., None]
  want = np.einsum("...ef,edf->...d", weighed, experts.down.reshape(E, D, F))
  np.testing.assert_allclose(run("as it chooses", x, experts, k=E), want, atol=1e-5)
  assert np.abs(run("as it chooses", x, experts, k=E - 1) - want).max() > 1e-3  # negative control


def test_of_equals_the_lowest_ids_are_chosen():
  router = jnp.asarray(ROUTER[np.array([0, 1, 1, 1, 0])])
  x = jnp.asarray(ROUTER[1][None])  # likes 1, 2 and 3 the same, and more than 0 and 4
  np.testing.assert_allclose(moe.route(x, router, 2)[0], [0, 0.5, 0.5, 0, 0], atol=1e-6)
  np.testing.assert_allclose(moe.route(0 * x, router, 3)[0], np.array([1, 1, 1, 0, 0]) / 3, atol=1e-6)


def test_which_expert_it_is_is_decided_in_float32():
  x, router = jnp.asarray([[256.0, 0.5]], jnp.bfloat16), jnp.asarray([[1.0, 0.0], [1.0, 1.0]], jnp.bfloat16)
  np.testing.assert_allclose(moe.route(x, router, 1), [[0.0, 1.0]], atol=1e-6)
  narrow = x @ router.T
  assert narrow[0, 0] == narrow[0, 1]  # negative control: bfloat16 cannot tell


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_stays_near_and_keeps_its_type(way):
  x = jnp.asarray(tokens(2, 3), jnp.bfloat16)
  got, want = run(way, x, held(FLOATS, jnp.bfloat16)), loop(np.asarray(x, np.float32), FLOATS)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03 * np.abs(want).max())


def poisoned(x, value, which=("gate", "up", "down")):
  """Weights in which those experts that no token of x chose hold `value`."""
  used = np.asarray(moe.route(jnp.asarray(x), jnp.asarray(ROUTER), K)).reshape(-1, E).any(axis=0)
  assert not used.all()
  spoil = {name: np.where(np.repeat(used, len(w) // E)[:, None], w, value) for name, w in FLOATS._asdict().items()}
  return held(FLOATS._replace(**{name: spoil[name].astype(np.float32) for name in which}), F32)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=str)
def test_a_decode_step_reads_only_the_chosen(shape):
  """What is not read may hold anything."""
  x = tokens(*shape)
  np.testing.assert_allclose(run("as it chooses", x, poisoned(x, np.nan)), loop(x, FLOATS), atol=1e-5)
  assert np.isnan(run("every", x, poisoned(x, np.nan))).all()  # negative control


@pytest.mark.parametrize("way", WAYS)
def test_what_an_expert_that_was_not_chosen_would_answer_leaves_no_trace(way):
  """Here infinity, of which 0 times would be NaN."""
  x = tokens(1, 1)
  x = x * np.sign(x.sum())  # so that the gate is open
  experts = poisoned(x, 1e38, ("gate", "up"))
  assert np.isinf(jax.nn.silu(x @ experts.gate.T) * (x @ experts.up.T)).any()
  np.testing.assert_allclose(run(way, x, experts), loop(x, FLOATS), atol=1e-5)


def step_memory(form, rows):
  """Bytes of temporaries of a step of so many rows, and of one matrix of one expert."""
  inner, width = 512, 256
  shapes = ((E * inner, width), (E * inner, width), (E * width, inner))
  experts = held([np.zeros(shape, np.float32) for shape in shapes], form)
  x, router = jnp.zeros((rows, 1, width)), jnp.zeros((E, width))
  program = jax.jit(lambda *arguments: moe.mixture(*arguments[:3], K, arguments[3]))  # traced anew
  compiled = program.lower(x, router, experts, x).compile()
  return compiled.memory_analysis().temp_size_in_bytes, sum(leaf.nbytes for leaf in jax.tree.leaves(experts.up)) // E


@pytest.mark.skipif(not build.ready(), reason="no C++ compiler built the CPU kernels here")
@pytest.mark.parametrize("form", ["float32", "bfloat16", ("int8", True), ("q4_1", True)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_no_expert_is_copied_to_be_read(form, rows, monkeypatch):
  temporaries, matrix = step_memory(form, rows)
  assert temporaries < matrix / 4
  monkeypatch.setattr(build, "ready", lambda: False)  # negative control: XLA's own products
  temporaries, matrix = step_memory(form, rows)
  assert temporaries > matrix


_PARTITIONED = """
import re, jax, numpy as np, jax.numpy as jnp, moe_test as t
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from decoder.ops import moe
t.E = 8
rng = np.random.default_rng(0)
shapes = ((8 * t.F, t.D), (8 * t.F, t.D), (8 * t.D, t.F))
floats = moe.Experts(*(rng.normal(size=s).astype(np.float32) * .3 for s in shapes))
t.ROUTER = rng.normal(size=(8, t.D)).astype(np.float32)
mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
spread, same = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P())
x = t.tokens(2, 1)
with jax.set_mesh(mesh):
  arguments = jax.device_put((x, t.ROUTER), same), jax.device_put(floats, spread), jax.device_put(x, same)
  (x_, router), experts, y = arguments
  program = jax.jit(moe.mixture, static_argnums=3, out_shardings=same).lower(x_, router, experts, 2, y).compile()
found = re.findall(r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)[a-z-]*\\(", program.as_text())
assert found == ["all-reduce"], found
got = program(x_, router, experts, y)
np.testing.assert_allclose(got, x + t.loop(x, floats), atol=1e-5)
"""


def test_experts_spread_over_devices_need_one_sum():
  tests = Path(__file__).parent
  environment = {
    **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), str(tests.parents[1])]),
  }  # fmt: skip
  ended = subprocess.run([sys.executable, "-c", _PARTITIONED], env=environment, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stderr[-2000:]
