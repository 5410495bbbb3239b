"""Pictures of results: plain data in (as `results.read` gives it), PNG files out.

matplotlib is an extra, `pip install 'decoder[bench]'`, and imported only here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decoder.measure import breakdown, machine
from decoder.measure.plan import Plan, Planner

COLOURS = (
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#000000",
)  # Okabe and Ito's, told apart by all
_SIZE, _DPI = (7.2, 4.4), 110

Point = dict[str, Any]


def draw(results: dict[str, Any], directory: Path) -> tuple[list[Path], list[str]]:
  """Draws what the results have enough points for. Returns the files, and in words what was left out.

  Raises ValueError where matplotlib is missing, OSError where the directory cannot be written.
  """
  check()
  directory.mkdir(parents=True, exist_ok=True)
  drawn, left_out = [], []
  for name, picture in _PICTURES.items():
    figure = picture(results)
    if isinstance(figure, str):
      left_out.append(f"{name}: {figure}")
      continue
    path = directory / f"{name}.png"
    figure.savefig(path, dpi=_DPI)
    drawn.append(path)
  return drawn, left_out


def check() -> None:
  """Raises ValueError where matplotlib is missing."""
  try:
    import matplotlib  # noqa: F401
  except ImportError as error:
    raise ValueError("plots need matplotlib: pip install 'decoder[bench]', or pip install matplotlib") from error


def draw_training(log: Sequence[Point], file: Path) -> None:
  """Loss of a training run against its steps, from the lines of its log; beside it the shares of guesses kept, where a
  head was trained to guess."""
  check()
  from matplotlib.figure import Figure

  kept = sorted(name for name in log[-1] if name.startswith("kept_"))
  wide, high = _SIZE
  figure = Figure((wide * 1.5, high) if kept else _SIZE, layout="constrained")
  axes, *others = figure.subplots(1, 2 if kept else 1, squeeze=False)[0]
  steps = [line["step"] for line in log]
  for name, label, colour in (("loss", "training", COLOURS[5]), ("held_out", "held out", COLOURS[0])):
    axes.plot(steps, [line[name] for line in log], "o-", label=label, color=colour, markersize=3)
  axes.set(xlabel="step", ylabel="nats a token", title="Training")
  for other in others:
    for number, name in enumerate(kept):
      label = f"guess {name.removeprefix('kept_')}"
      other.plot(steps, [line[name] for line in log], "o-", label=label, color=COLOURS[number], markersize=3)
    other.set(xlabel="step", ylabel="share kept at temperature 1", title="Guesses, held out", ylim=(0, 1))
  for one in (axes, *others):
    one.legend(frameon=False)
    one.grid(alpha=0.3)
  figure.savefig(file, dpi=_DPI)


def draw_memory(name: str, planner: Planner, plan: Plan, file: Path) -> None:
  """What a device holds against the tokens of each row, for the mesh and batch of a plan, beside what it has."""
  check()
  from matplotlib.figure import Figure

  longest = max(planner.network.context, plan.case.context)
  contexts = sorted({*(longest * share // 16 for share in range(1, 17)), plan.case.context})
  needs = [planner.need(plan.case._replace(context=max(context, 1))) for context in contexts]
  figure = Figure(_SIZE, layout="constrained")
  axes = figure.subplots()
  parts = {
    "weights": [need.weights / 1e9 for need in needs],
    "cache": [need.cache / 1e9 for need in needs],
    "all else": [(need.total - need.weights - need.cache) / 1e9 for need in needs],
  }
  axes.stackplot(contexts, *parts.values(), labels=parts, colors=[COLOURS[5], COLOURS[4], COLOURS[3]], alpha=0.8)
  axes.axhline(planner.topology.device.memory / 1e9, color="black", linestyle="--", label="a device's memory")
  axes.axvline(plan.case.context, color="dimgrey", linestyle=":", label="asked for")
  axes.set(xlabel="tokens of each row", ylabel="GB a device", xlim=(contexts[0], contexts[-1]), ylim=(0, None))
  axes.set_title(
    f"{name} on {planner.topology.name}, {plan.mesh}: {_rows(plan.case.batch)}, weights {plan.case.weights}, cache "
    f"{plan.case.cache}", fontsize=10, fontweight="bold",
  )  # fmt: skip
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False, fontsize=8, loc="lower right")
  figure.savefig(file, dpi=_DPI)


def by_batch(results: dict[str, Any]) -> Any:
  """Tokens a second and time a token against rows, under what memory allows."""
  lines = _lines(results["points"], "batch", ("stored", "cache", "position"))
  if not lines:
    return "wants two batches"
  figure, (left, right) = _figure(results, "Rows decoded together", 2)
  for (label, points), colour in zip(lines, _cycle(lines)):
    _plot(left, points, "batch", lambda p: p["tokens_per_s"], label, colour, lambda p: 1e3 * p["batch"] / p["limit_ms"])
    _plot(right, points, "batch", lambda p: p["tpot_ms"], label, colour, lambda p: p["limit_ms"])
  left.set_yscale("log", base=2)  # the limit is a factor of the rows away
  left.yaxis.set_major_formatter(_plain())
  for axes, title in ((left, "tokens a second, all rows"), (right, "ms a step (a token of each row)")):
    _finish(axes, "rows", title, [p["batch"] for _, points in lines for p in points])
  return figure


def by_position(results: dict[str, Any]) -> Any:
  """Time a token against the tokens held."""
  lines = _lines(results["points"], "position", ("stored", "cache", "batch"))
  if not lines:
    return "wants two positions"
  figure, (axes,) = _figure(results, "Time a token, by the tokens already held", 1)
  for (label, points), colour in zip(lines, _cycle(lines)):
    _plot(axes, points, "position", lambda p: p["tpot_ms"], label, colour, lambda p: p["limit_ms"])
  _finish(axes, "tokens held in each row's cache", "ms a step", [p["position"] for _, ps in lines for p in ps])
  return figure


def by_prompt(results: dict[str, Any]) -> Any:
  """Time to the first token against the prompt's length."""
  lines = _lines(results["points"], "prompt", ("stored", "cache", "batch"))
  if not lines:
    return "wants two prompt lengths"
  figure, (axes,) = _figure(results, "Time to the first token", 1)
  for (label, points), colour in zip(lines, _cycle(lines)):
    _plot(axes, points, "prompt", lambda p: p["ttft_ms"], label, colour)
  _finish(axes, "tokens of each row's prompt", "ms", [p["prompt"] for _, points in lines for p in points])
  return figure


def parts(results: dict[str, Any]) -> Any:
  """Where a step's time goes."""
  broken = results.get("breakdown") or []
  if not broken:
    return "wants a breakdown"
  figure, (axes,) = _figure(results, "Where a step's time goes", 1)
  figure.set_figheight(2.2 + 0.7 * len(broken))
  names = [f"{_stored(one)}, {one['cache']} cache,\n{_rows(one['batch'])} at {one['position']}" for one in broken]
  left = [0.0] * len(broken)
  for part, colour in zip(breakdown.PARTS, _cycle(breakdown.PARTS)):
    widths = [one["parts_ms"][part] for one in broken]
    bars = axes.barh(names, widths, left=left, label=part, color=colour, height=0.55)
    large = [f"{w:.1f}" if w > 0.05 * max(o["whole_ms"] for o in broken) else "" for w in widths]
    axes.bar_label(bars, large, label_type="center", color="white", fontsize=8)
    left = [a + b for a, b in zip(left, widths)]
  for row, one in enumerate(broken):
    axes.plot([one["untraced_ms"]] * 2, [row - 0.38, row + 0.38], "k:", label=None if row else "the same, untraced")
  axes.set_xlabel("ms a step, as traced by JAX's profiler")
  axes.set_ylim(len(broken) - 0.4, -0.6)
  handles, labels = axes.get_legend_handles_labels()
  order = sorted(range(len(labels)), key=lambda i: labels[i] not in breakdown.PARTS)
  axes.legend([handles[i] for i in order], [labels[i] for i in order], ncols=7, fontsize=8, loc="lower center",
              bbox_to_anchor=(0.45, 1.0), frameon=False, columnspacing=1.0, handlelength=1.2)  # fmt: skip
  axes.spines[["top", "right"]].set_visible(False)
  return figure


_PICTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
  "tokens_by_batch": by_batch, "tpot_by_position": by_position, "ttft_by_prompt": by_prompt, "step_parts": parts
}  # fmt: skip


def _lines(points: Sequence[Point], x: str, names: Sequence[str]) -> list[tuple[str, list[Point]]]:
  """Labelled lines along `x`, one for each combination of the axes `names`; of several points at one place, the one
  that was first. Lines of one place are left out."""
  groups: dict[tuple, dict[Any, Point]] = {}
  for point in points:
    groups.setdefault(tuple(_stored(point) if name == "stored" else point[name] for name in names), {}).setdefault(
      point[x], point
    )
  kept = {key: [line[place] for place in sorted(line)] for key, line in groups.items() if len(line) > 1}
  differing = [i for i in range(len(names)) if len({key[i] for key in kept}) > 1] or [0]
  return [(", ".join(_say(names[i], key[i]) for i in differing), line) for key, line in kept.items()]


def _stored(point: Point) -> str:
  """The format that most bytes of the weights have."""
  return point["stored"].split(",")[0]


def _say(axis: str, value: Any) -> str:
  return {"batch": _rows, "position": "at {}".format, "cache": "{} cache".format}.get(axis, str)(value)


def _rows(batch: int) -> str:
  return f"{batch} row" + "s" * (batch > 1)


def _plot(
  axes: Any, points: list[Point], x: str, y: Callable, label: str, colour: str, limit: Callable | None = None
) -> None:
  places = [point[x] for point in points]
  axes.plot(places, [y(point) for point in points], "o-", label=label, color=colour, markersize=4)
  if limit is not None:
    axes.plot(places, [limit(point) for point in points], "--", color=colour, linewidth=1, alpha=0.8)


def _finish(axes: Any, x: str, y: str, places: Sequence[int]) -> None:
  axes.set_xscale("log", base=2)
  axes.set_xticks(sorted(set(places)), [str(place) for place in sorted(set(places))])
  axes.minorticks_off()
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  if axes.get_yscale() == "linear":
    axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  handles, labels = axes.get_legend_handles_labels()
  if any(line.get_linestyle() == "--" for line in axes.lines):
    from matplotlib.lines import Line2D

    handles, labels = [*handles, Line2D([], [], linestyle="--", color="grey")], [*labels, "memory's limit"]
  axes.legend(handles, labels, fontsize=8, frameon=False)


def _figure(results: dict[str, Any], title: str, columns: int) -> tuple[Any, Sequence[Any]]:
  """A figure with a title, what was measured and on what; without pyplot, so no display and no global state."""
  from matplotlib.figure import Figure

  figure = Figure((_SIZE[0] * (1.5 if columns > 1 else 1), _SIZE[1]), layout="constrained")
  figure.suptitle(f"{title}: {results['model']}", fontsize=11, fontweight="bold")
  speed = f"; memory reads {results['read_gb_per_s']:.1f} GB/s" if results.get("read_gb_per_s") else ""
  figure.supxlabel(machine.line(results) + speed, fontsize=7, color="dimgrey")
  grid = figure.subplots(1, columns, squeeze=False)
  return figure, grid[0]


def _plain() -> Any:
  from matplotlib.ticker import FuncFormatter

  return FuncFormatter(lambda value, _: f"{value:g}")


def _cycle(things: Sequence[Any]) -> list[str]:
  return [COLOURS[i % len(COLOURS)] for i in range(len(things))]
