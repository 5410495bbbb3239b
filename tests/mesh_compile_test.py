"""Decode over several TPU chips, compiled without one: two sums a layer, nothing else that is large, nothing copied.

Needs libtpu (`pip install -e .[tpu,test]`). `python -m pytest tests/mesh_compile_test.py --slow -n0 -s` prints the
figures. Models have two layers, since all are alike; whether the whole model fits is the planner's word at full depth,
which `measure/plan_compile_test.py` holds against the compiler's.
"""

import hlo
import pytest
import tpu

from decoder.measure import compiling, known, shapes, tiles, topologies
from decoder.measure.plan import Plan, Planner

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not compiling.available(), reason="needs libtpu: pip install -e .[tpu,test]"),
]

LAYERS, CONTEXT = 2, 2048
MOST = 64 << 20  # bytes of temporaries, with one row
LARGE = 1 << 20  # bytes that nothing but a layer's sums may send
MODELS, WEIGHTS = ("llama-3-8b", "llama-3-70b"), ("bfloat16", "int8")
TOPOLOGIES = ("v5e-8", "v5e-16", "v6e-8", "v5p-8", "v4-8")
TOO_LARGE = {("llama-3-70b", "bfloat16", "v5e-8"), ("llama-3-70b", "bfloat16", "v4-8")}


@pytest.fixture(scope="module")
def compile_loop():
  with compiling.process() as call:
    yield lambda *arguments: call(tpu.over_mesh, *arguments)


def planned(model: str, weights: str, topology: str, rows: int = 1, layers: int | None = LAYERS):
  """With all devices in `tensor`, which is what one row is fastest on."""
  config = known.config(model)
  config = {**config, "num_hidden_layers": layers or config["num_hidden_layers"]}
  planner = Planner(config, topologies.find(topology))
  mesh = {"tensor": planner.topology.devices}
  return planner, planner.plan(planner.case(weights, "bfloat16", rows, CONTEXT, mesh))


def share(planner: Planner, plan: Plan) -> float:
  """Bytes of weights and cache, divided by the devices, but for keys, values and their weights: those are held as often
  as the planner says."""
  sizes = dict(plan.case.sizes)
  whole = shapes.divided(shapes.parameters(planner.config, plan.case.weights), shapes.abstract({}), ())
  held = {False: 0, True: 0}
  for path, shape, dtype in whole:
    held["/k/" in path or "/v/" in path] += tiles.plain(shape, dtype)
  spec = planner.network.cache_spec
  held[True] += sum(2 * layer.kv_heads * layer.head_dim * 2 * CONTEXT * plan.case.batch for layer in spec)
  return (held[False] + held[True] * sizes["group"]) / planner.topology.devices


def faults(planner: Planner, plan: Plan, compiled: compiling.Compiled) -> set[str]:
  """What is wrong with a compiled decode loop."""
  hidden = plan.case.batch * planner.config["hidden_size"]
  sent = hlo.collectives(compiled.text)
  sums = [one for one in sent if one.operation == "all-reduce" and one.elements == hidden and "/layers_" in one.source]
  others = [one for one in sent if one not in sums]
  smallest = min(plan.need.cache // (2 * LAYERS), 2 << 20)
  written = hlo.written(compiled.text, smallest)
  wrong = {
    "sums": len(sums) != 2 * LAYERS or any("/layers_" in one.source for one in others),
    "others": any(one.bytes > LARGE for one in others),
    "arguments": compiled.arguments > 1.02 * share(planner, plan),
    "temporaries": compiled.temporaries > MOST,
    "aliased": compiled.aliased < plan.need.cache,
    "written": written,
  }
  figures = f"{len(sums)} sums, others up to {max((one.bytes for one in others), default=0) / 1e3:.0f} KB"
  memory = f"arguments {compiled.arguments / share(planner, plan):.3f} of a share"
  print(f"\n{planner.topology.name} {plan.mesh}, {plan.case.weights}: {figures}, {memory}, temporaries", end=" ")
  print(f"{compiled.temporaries / 1e6:.1f} MB, {len(written)} weights or caches written", end=" ")
  return {name for name, bad in wrong.items() if bad}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_sums_twice_and_copies_nothing(compile_loop, model, weights, topology):
  planner, plan = planned(model, weights, topology)
  assert faults(planner, plan, compile_loop("", planner.config, plan.case, planner.topology)) == set()
  _, whole = planned(model, weights, topology, layers=None)
  assert whole.fits == ((model, weights, topology) not in TOO_LARGE)


@pytest.mark.parametrize(("variant", "rows", "wrong"), [("turned", 1, "sums"), ("gathered", 8, "others")])
def test_broken_divisions_are_refused(compile_loop, variant, rows, wrong):
  """Negative controls; whole, 8 rows are divided as one is."""
  planner, plan = planned("llama-3-8b", "bfloat16", "v5e-8", rows)
  compiled = {which: compile_loop(which, planner.config, plan.case, planner.topology) for which in ("", variant)}
  assert wrong in faults(planner, plan, compiled[variant])
  assert wrong not in faults(planner, plan, compiled[""])


def test_what_the_planner_refuses_the_compiler_refuses(compile_loop):
  planner, plan = planned("llama-3-70b", "bfloat16", "v5e-8", layers=None)
  assert not plan.fits
  with pytest.raises(ValueError, match="does not fit"):
    compile_loop("", planner.config, plan.case, planner.topology)
