"""Does a model fit on devices that are not at hand, and how fast could it decode there?

python scripts/plan.py --model llama-3-8b --topology v5e-8 --context 8192 --batch 8

llama-3-8b on v5e-8: 8 devices, each 16.91 GB at 819 GB/s, 197 TFLOP/s
...
fits: 3.19 GB of a device's 16.91 GB, with tensor=8

Then what a device holds, the meshes in the order of their speed, and what would fit where this does not. Nothing is
loaded or fetched. --compile asks the TPU's compiler too (it needs libtpu, no TPU; it takes minutes). Exit code 1: it
does not fit.
"""

import json
import sys
from pathlib import Path
from typing import Any

import entry
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "llama-3-8b and the like, a registered name, a config.json, or a checkpoint's path.")
flags.DEFINE_string("topology", None, "v5e-8, v6e-4, v5p-8, v4-8, tpu7x-8, h200, h100-8, cpu, …, or JAX's v5e:2x4.")
flags.DEFINE_integer("context", 8192, "Tokens that each row may reach, prompt and answer.")
flags.DEFINE_integer("batch", 1, "Rows decoded together.")
flags.DEFINE_string("weights", None, "bf16, float32, int8, q8_0, q4_0, q4_1; default bf16, on CPU float32.")
flags.DEFINE_string("cache", None, "bf16, float32 or float16; default bf16, on CPU float32.")
flags.DEFINE_string("mesh", None, "tensor=4,data=2, as in scripts/generate.py; default: the fastest that fits.")
flags.DEFINE_bool("compile", False, "Compile the decode loop for the topology, and compare.")
flags.DEFINE_bool("json", False, "Print one JSON object instead.")
flags.DEFINE_string("plot", None, "Draw memory against context to this PNG file.")
flags.mark_flags_as_required(["model", "topology"])


def main() -> None:
  check()
  from decoder.measure import advice, known, planning, plots, shapes, topologies
  from decoder.measure.plan import Planner

  if FLAGS.plot:
    plots.check()
  planner = Planner(known.config(FLAGS.model), topologies.find(FLAGS.topology))
  floats = "float32" if planner.topology.device.name == "cpu" else "bfloat16"
  weights = shapes.named(FLAGS.weights or floats, shapes.FORMATS, "weights")
  cache = shapes.named(FLAGS.cache or floats, list(shapes.CACHES), "cache")
  wish = advice.Wish(weights, cache, FLAGS.batch, FLAGS.context)
  plans = chosen(planner, wish)
  told = (advice.room if plans[0].fits else advice.advise)(planner, wish)
  compiled = confirm(planner, plans[0]) if FLAGS.compile else None
  if FLAGS.json:
    print(
      json.dumps({**planning.data(FLAGS.model, planner, plans, told), **({"compiled": compiled} if compiled else {})})
    )
  else:
    print(planning.report(FLAGS.model, planner, plans, told))
    if compiled:
      print(planning.comparison(plans[0].need, compiled))
  if FLAGS.plot:
    plots.draw_memory(FLAGS.model, planner, plans[0], Path(FLAGS.plot).expanduser())
  sys.stdout.flush()
  if not plans[0].fits:
    sys.exit(1)


def check() -> None:
  """Refuses what makes no sense before anything is imported."""
  for name in ("context", "batch"):
    if FLAGS[name].value < 1:
      raise ValueError(f"--{name} wants a whole number ≥ 1, got {FLAGS[name].value}")
  entry.check_folder("plot")


def chosen(planner: Any, wish: Any) -> list[Any]:
  """Plans, that of --mesh alone or the best first. ValueError where there is no mesh."""
  from decoder import sharding

  if FLAGS.mesh is not None:
    sizes = sharding.parse(FLAGS.mesh, planner.topology.devices)
    return [planner.plan(planner.case(*wish, sizes))]
  plans = planner.candidates(*wish)
  if not plans:
    raise ValueError(f"no mesh of {planner.topology.devices} devices divides this model and a batch of {wish.batch}")
  return plans


def confirm(planner: Any, plan: Any) -> dict[str, Any]:
  """What the compiler plans, in bytes, or why it refuses."""
  from decoder.measure import compiling

  if planner.topology.jax is None or not compiling.available():
    compiling.devices(planner.topology)  # says what is missing
  print("compiling for the topology, which takes minutes …", file=sys.stderr, flush=True)
  with compiling.process() as call:
    try:
      found = call(compiling.decode_loop, planner.config, plan.case, planner.topology)
    except ValueError as error:
      return {"refused": str(error)}
  return {name: value for name, value in found._asdict().items() if name != "text"} | {"total": found.needed}


if __name__ == "__main__":
  entry.run(main)
