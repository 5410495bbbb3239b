"""What came of a measurement, to read, to keep and to compare: a table, a JSON file, ratios to an earlier one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decoder.checkpoint.atomic import write_file

AXES = ("weights", "cache", "batch", "prompt", "position", "capacity")  # what tells points apart
FIGURES = {  # heading and format of a column
  "ttft_ms": ("TTFT ms", ".1f"),
  "prefill_tokens_per_s": ("prefill/s", ".0f"),
  "tpot_ms": ("TPOT ms", ".2f"),
  "stream_tpot_ms": ("stream ms", ".2f"),
  "tpot_p95_ms": ("p95 ms", ".2f"),
  "tokens_per_s": ("tokens/s", ".1f"),
  "gb_per_s": ("GB/s", ".1f"),
  "of_limit": ("of limit", ".0%"),
  "peak_mb": ("peak MB", ".0f"),
  "compile_s": ("compile s", ".1f"),
}


class Comparison(NamedTuple):
  """ratios: for each point of both, its axes and new / old by figure (None where either is missing or 0). added,
  missing: points of the new and of the old results alone."""

  ratios: list[tuple[dict[str, Any], dict[str, float | None]]]
  added: list[dict[str, Any]]
  missing: list[dict[str, Any]]


def table(points: Sequence[dict[str, Any]]) -> str:
  """Points as aligned columns."""
  rows = [[*(str(p[a]) for a in AXES), *(_number(p.get(f), form) for f, (_, form) in FIGURES.items())] for p in points]
  return _align([[*AXES, *(heading for heading, _ in FIGURES.values())], *rows])


def write(path: Path, results: dict[str, Any]) -> None:
  """Writes results as JSON, whole or not at all."""
  write_file(path, (json.dumps(results, indent=2, allow_nan=False) + "\n").encode())


def read(path: Path) -> dict[str, Any]:
  """Results that `write` wrote. ValueError for anything else, OSError where there is nothing."""
  try:
    results = json.loads(path.read_text(encoding="utf-8"))
    points = results["points"]
    sound = all(axis in point for point in points for axis in AXES)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} holds no results; name a file that --json wrote") from error
  if not sound:
    raise ValueError(f"{path} has points without one of {', '.join(AXES)}; measure anew with --json")
  return results


def compare(new: dict[str, Any], old: dict[str, Any]) -> Comparison:
  """Every figure of `new` over the same of `old`, at the points of both."""
  before = {_axes(point): point for point in old["points"]}
  after = {_axes(point): point for point in new["points"]}
  ratios = [
    (_named(axes), {figure: _ratio(point.get(figure), before[axes].get(figure)) for figure in FIGURES})
    for axes, point in after.items()
    if axes in before
  ]
  added, missing = (
    [_named(axes) for axes in one if axes not in other] for one, other in ((after, before), (before, after))
  )
  return Comparison(ratios, added, missing)


def comparison_table(comparison: Comparison) -> str:
  """A comparison as aligned columns, and a line for each point without a partner."""
  lines = []
  if comparison.ratios:
    heads = [*AXES, *(heading.removesuffix(" ms").removesuffix(" s") for heading, _ in FIGURES.values())]
    rows = [[*map(str, axes.values()), *(_number(r, ".3f") for r in each.values())] for axes, each in comparison.ratios]
    lines.append(_align([heads, *rows]))
  for what, points in (("only in this run", comparison.added), ("only in the earlier run", comparison.missing)):
    lines += [f"{what}: {describe(point)}" for point in points]
  return "\n".join(lines) or "nothing to compare: neither run has a point"


def describe(point: dict[str, Any]) -> str:
  """A point's axes in words."""
  return ", ".join(f"{axis} {point[axis]}" for axis in AXES)


def capacity_ratios(points: Sequence[dict[str, Any]]) -> list[str]:
  """For points that differ in capacity alone: what a step costs against the smallest, as the median over rounds."""
  groups: dict[tuple, list[dict[str, Any]]] = {}
  for point in points:
    groups.setdefault(_axes(point)[:-1], []).append(point)
  lines = []
  for group in groups.values():
    first, *others = sorted(group, key=lambda point: point["capacity"])
    for point in others:
      pairs = sorted(a / b for a, b in zip(point["rounds_tpot_ms"], first["rounds_tpot_ms"]))
      ratio = pairs[len(pairs) // 2]
      lines.append(f"{describe(point)}: a step takes {ratio:.3f} × that at capacity {first['capacity']}")
  return lines


def _axes(point: dict[str, Any]) -> tuple:
  return tuple(point[axis] for axis in AXES)


def _named(axes: tuple) -> dict[str, Any]:
  return dict(zip(AXES, axes))


def _ratio(new: float | None, old: float | None) -> float | None:
  return new / old if new is not None and old else None


def _number(value: float | None, form: str) -> str:
  return "–" if value is None else format(value, form)


def _align(rows: list[list[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows)]
  return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
