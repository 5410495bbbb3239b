"""A plan as a person reads it, and as plain data."""

from collections.abc import Sequence
from typing import Any

from decoder.measure.plan import Need, Plan, Planner
from decoder.measure.topologies import Topology

_PARTS = {
  "weights": "weights",
  "cache": "cache",
  "rest": "tokens, positions, settings",
  "temporaries": "temporaries",
  "code": "program",
}
_MESHES = 8  # shown at most


def report(name: str, planner: Planner, plans: Sequence[Plan], told: Sequence[str]) -> str:
  """The whole answer. plans: the best first; told: advice, or what room is left."""
  best, topology = plans[0], planner.topology
  case = best.case
  lines = [
    f"{name} on {_devices(topology)}",
    f"weights {case.weights}, cache {case.cache}, {_rows(case.batch)} of {case.context:,} tokens",
    "",
    verdict(best, topology),
    "",
    *_table(
      ("a device", "all devices"), [_part(best.need, part, topology) for part in _PARTS] + [_sum(best, topology)]
    ),
    "",
    *_table(("GB a device", "fits", "ms a step", "tokens/s", "bound by"), [_mesh(p) for p in plans[:_MESHES]]),
    f"  and {len(plans) - _MESHES} more meshes" if len(plans) > _MESHES else "",
    "A step is the least that the devices allow, with every row's context full; what is measured is longer.",
  ]
  lines += [f"note: {note}" for note in notes(planner, best)]
  return "\n".join([*lines, *(f"{'could' if best.fits else 'try'}: {one}" for one in told)])


def verdict(plan: Plan, topology: Topology) -> str:
  """One line: whether it fits, and why not."""
  memory, need = topology.device.memory, plan.need
  held = f"{_gb(need.total)} of a device's {_gb(memory)}, with {plan.mesh}"
  if plan.fits:
    return f"fits: {held}"
  largest = max(_PARTS, key=lambda part: getattr(need, part))
  alone = " alone" if getattr(need, largest) > memory else ""
  return f"does not fit: {held}; its {_PARTS[largest]}{alone} take {_gb(getattr(need, largest))}"


def notes(planner: Planner, plan: Plan) -> list[str]:
  """What one should know of a plan."""
  told, longest, device = planner.notes(plan.case), planner.network.context, planner.topology.device
  if plan.case.context > longest:
    told.append(f"the model was made for {longest:,} tokens")
  share = plan.need.total / device.memory
  if planner.topology.jax is None and device.name != "cpu" and 0.75 < share <= 1:
    told.append(f"JAX takes 75 % of a GPU's memory: set XLA_PYTHON_CLIENT_MEM_FRACTION={min(0.98, share + 0.02):.2f}")
  return told


def data(name: str, planner: Planner, plans: Sequence[Plan], told: Sequence[str]) -> dict[str, Any]:
  """The same for --json; bytes, seconds."""
  topology, best = planner.topology, plans[0]
  return {
    "model": name,
    "topology": topology.name,
    "jax_topology": topology.jax and topology.jax[0],
    "devices": topology.devices,
    "device": topology.device._asdict(),
    "fits": best.fits,
    "verdict": verdict(best, topology),
    "notes": notes(planner, best),
    "advice" if not best.fits else "room": list(told),
    "plans": [_plain(plan) for plan in plans],
  }


def comparison(need: Need, compiled: dict[str, Any]) -> str:
  """What the compiler says beside the plan, see `compiling.Compiled`; `refused` where it did not compile."""
  if "refused" in compiled:
    return compiled["refused"]
  pairs = {name: (getattr(need, name), compiled[name]) for name in ("arguments", "temporaries", "code", "total")}
  rows = [
    (f"  {name}", f"{a / 1e6:,.1f} MB", f"{b / 1e6:,.1f} MB", f"{a / b - 1:+.1%}") for name, (a, b) in pairs.items()
  ]
  return "\n".join(["", *_table(("planned", "compiled", "difference"), rows)])


def _plain(plan: Plan) -> dict[str, Any]:
  case = plan.case
  asked = {"weights": case.weights, "cache": case.cache, "batch": case.batch, "context": case.context}
  need = {**plan.need._asdict(), "arguments": plan.need.arguments, "total": plan.need.total}
  step = {**plan.speed._asdict(), "step": plan.speed.step, "bound": plan.speed.bound}
  return {
    "mesh": plan.mesh,
    **asked,
    "fits": plan.fits,
    "bytes": need,
    "seconds": step,
    "tokens_per_s": plan.tokens_per_s,
  }


def _table(heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
  """Lines of columns: the first on the left, numbers on the right."""
  lines = [("", *heads), *rows]
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  return [
    "  ".join(
      cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))
    ).rstrip()
    for line in lines
  ]


def _part(need: Need, part: str, topology: Topology) -> tuple[str, ...]:
  size = getattr(need, part)
  return f"  {_PARTS[part]}", _gb(size), _gb(size * topology.devices)


def _sum(plan: Plan, topology: Topology) -> tuple[str, ...]:
  return "  together", _gb(plan.need.total), _gb(plan.need.total * topology.devices)


def _mesh(plan: Plan) -> tuple[str, ...]:
  speed = f"{1e3 * plan.speed.step:.2f}", f"{plan.tokens_per_s:,.0f}", plan.speed.bound
  return f"  {plan.mesh}", f"{plan.need.total / 1e9:.2f}", "yes" if plan.fits else "no", *speed


def _devices(topology: Topology) -> str:
  device = topology.device
  count = f"{topology.devices} device" + "s" * (topology.devices > 1)
  chips = f" ({topology.chips} chips)" if topology.chips != topology.devices else ""
  facts = f"{_gb(device.memory)} at {device.bandwidth / 1e9:,.0f} GB/s, {device.flops / 1e12:,.4g} TFLOP/s"
  return f"{topology.name}: {count}{chips}, each {facts}"


def _rows(batch: int) -> str:
  return f"{batch:,} row" + "s" * (batch > 1)


def _gb(size: float) -> str:
  return f"{size / 1e9:,.2f} GB"
