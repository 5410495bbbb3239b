"""Measures decoding on this machine: first token, further tokens, memory, and how near to what memory allows.

Usage:
  python scripts/benchmark.py                                   # a small grid of the default model
  python scripts/benchmark.py --batches 1,4,16 --formats float,q8_0 --json new.json --compare old.json --plots out
  python scripts/benchmark.py --capacities 256,8192             # does a step cost more in a larger cache?
  python scripts/benchmark.py --peer_line --model q8_0.gguf     # the line that shared/peers/race.py reads

Prints a table, one line a point of the grid; --help says what each axis is. TPOT is the median of a step in the fused
loop, p95 that of steps that are calls of their own; `of limit` is the weights and the filled cache read in that time,
over the measured speed of memory. --peer_line prints one JSON line instead: tpot_ms, stream_tpot_ms, ttft_ms, ...
"""

import json
import sys
from pathlib import Path
from typing import Any

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_list("batches", None, "Rows decoded together; default 1,8, for --peer_line 8,32.")
flags.DEFINE_list("prompts", ["128"], "Tokens of each row's prompt, for the first token's time.")
flags.DEFINE_list("positions", [], "Tokens each row holds when decoding is measured; default: its prompt.")
flags.DEFINE_list("capacities", [], "Tokens a row's cache has room for; default: the smallest that suffices.")
flags.DEFINE_list("formats", None, "Of weights, as in --weights; default: that one.")
flags.DEFINE_list("caches", None, "Formats of the cache, float32 or bfloat16; default: the type of compute.")
flags.DEFINE_integer("tokens", 64, "Decoded a row, run and point; half in the fused loop, half one a call.")
flags.DEFINE_integer("rounds", 3, "Runs of each point that count; one more warms up.")
flags.DEFINE_string("json", None, "Write the results to this file.")
flags.DEFINE_string("compare", None, "Print the ratio of every figure to an earlier --json.")
flags.DEFINE_string("plots", None, "Draw PNG files in this directory; also traces where a step's time goes.")
flags.DEFINE_bool("peer_line", False, "Do the work of shared/peers, with the file's own weights, as one JSON line.")
flags.adopt_module_key_flags(entry)

PROMPT = (
  "The history of the city begins with a small settlement near the river, where traders met and boats were built. "
)


def main() -> None:
  if FLAGS.peer_line:
    peer_line(numbers("batches", "8,32"))
  else:
    grid()


def peer_line(batches: list[int]) -> None:
  FLAGS.weights = FLAGS.weights if FLAGS["weights"].present else "keep"
  lm = entry.load({})
  from decoder.measure import latency

  print(json.dumps(latency.peer_line(lm, lm.encode(PROMPT), batches=batches)), flush=True)


def grid() -> None:
  from decoder.measure import plots, results
  from decoder.measure.grid import Axes

  axes = Axes(FLAGS.caches or (), *(numbers(name, "1,8") for name in ("batches", "prompts", "positions", "capacities")))
  formats = FLAGS.formats or [entry.weights() or "float"]
  check(formats, axes)
  old = results.read(Path(FLAGS.compare).expanduser()) if FLAGS.compare else None
  if FLAGS.plots:
    plots.check()
  measured = measure(formats, axes)
  print(results.table(measured["points"]), *results.capacity_ratios(measured["points"]), sep="\n", flush=True)
  if FLAGS.json:
    results.write(Path(FLAGS.json).expanduser(), measured)
  if old:
    print(f"\nratios to {FLAGS.compare}\n{results.comparison_table(results.compare(measured, old))}", flush=True)
  if FLAGS.plots:
    drawn, left_out = plots.draw(measured, Path(FLAGS.plots).expanduser())
    tell(*(f"drew {path}" for path in drawn), *(f"not drawn, {why}" for why in left_out))


def check(formats: list[str], axes: Any) -> None:
  """Refuses what makes no sense before anything is loaded."""
  for name in formats:
    if name not in ("float", *entry.WEIGHTS):
      raise ValueError(f"--formats knows float, {', '.join(entry.WEIGHTS)}, got {name!r}")
  for name, least in (("tokens", 2), ("rounds", 1)):
    if FLAGS[name].value < least:
      raise ValueError(f"--{name} wants a whole number ≥ {least}, got {FLAGS[name].value}")
  entry.check_folder("json")
  sensible(axes, formats[0], None)


def sensible(axes: Any, weights: str, network: Any) -> list[Any]:
  """The points of a format that can be measured; ValueError if there are none. Tells of the others, once the network
  is known."""
  from decoder.measure import grid

  faults = {p: grid.objection(p, FLAGS.tokens, network) for p in grid.points(weights, axes, FLAGS.tokens, network)}
  good = [point for point, fault in faults.items() if fault is None]
  if not good:
    raise ValueError(f"no point can be measured: {next(iter(faults.values()))}")
  if network is not None:
    tell(*(f"skipped {grid.say(point)}: {fault}" for point, fault in faults.items() if fault))
  return good


def measure(formats: list[str], axes: Any) -> dict[str, Any]:
  """Everything that was measured, as plain data."""
  from decoder.measure import grid, machine, roofline

  speeds, points, breakdown = [roofline.read_speed()], [], []
  for name in formats:
    model = measure_format(name, axes, points, breakdown)
    speeds.append(roofline.read_speed())  # neighbours may take memory's time from one of these: the best is the limit
  facts = {"model": model, "read_gb_per_s": max(speeds) / 1e9, "tokens": FLAGS.tokens, "rounds": FLAGS.rounds}
  return {**machine.describe(), **facts, "points": grid.against(points, max(speeds)), "breakdown": breakdown}


def measure_format(name: str, axes: Any, points: list, breakdown: list) -> str:
  """Appends the points of one format of weights, and where the first one's time goes. Returns the model's name."""
  from tqdm import tqdm

  from decoder.measure import breakdown as parts
  from decoder.measure import grid

  FLAGS.weights = name
  lm = entry.load({})
  good = sensible(axes, name, lm.network)
  with tqdm(total=len(good) * (FLAGS.rounds + 1), desc=name, leave=False, delay=2.0) as bar:
    points += grid.measure(lm, good, tokens=FLAGS.tokens, rounds=FLAGS.rounds, on_run=bar.update)
  if FLAGS.plots:
    breakdown.append(parts.measure(lm, good[0]))
  return lm.name


def numbers(flag: str, default: str = "") -> list[int]:
  """The whole numbers of a list flag."""
  values = default.split(",") if FLAGS[flag].value is None else FLAGS[flag].value
  for value in values:
    if not value.strip().isdecimal() or int(value) < 1:
      raise ValueError(f"--{flag} wants whole numbers ≥ 1, joined by commas, got {value!r}")
  return list(dict.fromkeys(map(int, values)))


def tell(*lines: str) -> None:
  for line in lines:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
  entry.run(main)
