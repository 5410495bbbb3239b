"""Goodput of colocated and disaggregated fleets, simulated from times that were measured on this machine.

Usage:
  python scripts/goodput.py --measure docs/plots/serving_times.json
  python scripts/goodput.py --times docs/plots/serving_times.json --out docs/plots/goodput.png

The first measures one core: prompts by length, steps by rows, and rows moved over a stream. The second sweeps rates and
promises (time to the first token, time of a further one) and prints, for each fleet, the highest rate a device at which
90 % of the requests keep theirs.
"""

import json
import os
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_string("measure", None, "Measure, and write the times to this file.")
flags.DEFINE_string("times", None, "Simulate with the times of this file.")
flags.DEFINE_string("out", None, "Draw to this PNG file.")
flags.DEFINE_multi_integer("length", [16, 64, 128, 256, 512, 1024], "Prompts to measure, in tokens; repeatable.")
flags.DEFINE_multi_integer("batch", [1, 2, 4, 8, 16], "Rows to measure; repeatable, powers of two.")
flags.DEFINE_integer("held", 256, "Tokens that each row holds while steps are measured.")
flags.DEFINE_integer("chunk", 64, "Tokens that a colocated device reads between two steps.")
flags.DEFINE_integer("devices", 4, "Devices of each fleet.")
flags.DEFINE_integer("slots", 16, "Rows that a decoding device holds.")
flags.DEFINE_integer("requests", 1000, "Requests of a simulation.")
flags.DEFINE_integer("seed", 0, "Of their times and lengths.")
flags.DEFINE_multi_float("prompt", [256, 0.8], "Median and spread of the prompts' lengths (log-normal).")
flags.DEFINE_multi_float("new", [64, 0.6], "Likewise of what is written.")
flags.DEFINE_float("ttft", None, "Promised seconds to the first token; default 5 times that of the median prompt.")
flags.DEFINE_float("tpot", None, "Promised seconds of a further one; default 1.5 times a step of half the slots.")
flags.adopt_module_key_flags(entry)


def main() -> None:
  for name in ("measure", "out"):
    entry.check_folder(name)
  if FLAGS.measure is not None:
    measure(Path(FLAGS.measure).expanduser())
  elif FLAGS.times is not None:
    simulate(Path(FLAGS.times).expanduser())
  else:
    raise ValueError("give --measure FILE to measure, or --times FILE to simulate")


def measure(file: Path) -> None:
  os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core is one device; before JAX counts them
  import socket

  from decoder.checkpoint.atomic import write_file
  from decoder.measure import apart, machine
  from decoder.serving.engine import Slots
  from decoder.serving.transfer import Connection

  lm = entry.load({})
  settings = lm.request([0], max_new_tokens=1).settings
  programs = lm.programs([settings]).in_chunks(FLAGS.chunk)
  capacity = 1 << (2 * max(*FLAGS.length, FLAGS.held) - 1).bit_length()
  pair = tuple(Connection(end) for end in socket.socketpair())
  times = {
    "prefill": apart.prefill_times(lm, programs, sorted(FLAGS.length)),
    "step": apart.step_times(lm, programs, sorted(FLAGS.batch), FLAGS.held, capacity),
    "move": apart.move_times(lm, programs, sorted(FLAGS.length), pair, Slots(programs, 1, capacity, settings)),
  }
  facts = {"model": FLAGS.model, "chunk": FLAGS.chunk, "held": FLAGS.held, **machine.describe()}
  write_file(file, (json.dumps({**times, **facts}, indent=1) + "\n").encode())
  for name, points in times.items():
    print(name, "  ".join(f"{size}: {1e3 * seconds:.1f} ms" for size, seconds in points))


def simulate(file: Path) -> None:
  from decoder.measure import goodput, goodput_plots

  times, facts = goodput.read_times(file), json.loads(file.read_text(encoding="utf-8"))
  sweep = goodput.sweep(
    times,
    goodput.fleets(FLAGS.devices, FLAGS.slots, facts["chunk"]),
    lambda rate: goodput.load(
      rate, FLAGS.requests, FLAGS.seed, tuple(FLAGS.prompt), tuple(FLAGS.new), (times.prefill[-1][0], 4 * FLAGS.held)
    ),
    goodput.promise(times, FLAGS.prompt[0], FLAGS.slots, FLAGS.ttft, FLAGS.tpot),
  )
  for line in sweep.lines:
    print(f"{line.fleet.name:34s} {line.highest:.4f} requests a second and device")
  if FLAGS.out is not None:
    goodput_plots.draw(sweep, facts, Path(FLAGS.out).expanduser())


if __name__ == "__main__":
  entry.run(main)
