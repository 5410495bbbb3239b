"""Prefill and decode in two processes on this machine, against one that does both: what a burst of prompts does.

Usage:
  python scripts/serve_apart.py --model smollm2-135m-instruct --json out.json

Each process has a core of its own: prefill the first, decode the second. The one that does both has --together_cores of
them, both by default, and reads --chunk tokens between two steps. Each line printed has p50 and p99 of the gaps between
a row's tokens, quiet and under the burst, and their ratio. Takes three minutes a line, and wants a quiet machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
_PATIENCE = 120.0  # seconds; longer than a program takes to compile on a busy core
entry.define_model_flags()
flags.DEFINE_multi_integer(
  "chunk", [512, 64], "Tokens that the process doing both reads between two steps; repeatable."
)
flags.DEFINE_integer("together_cores", 2, "Cores of the process that does both.")
flags.DEFINE_integer("rows", 4, "Rows in the background.")
flags.DEFINE_integer("prompt", 256, "Tokens of their prompts.")
flags.DEFINE_integer("tokens", 600, "Tokens that each writes.")
flags.DEFINE_integer("after", 100, "Tokens after which the burst comes.")
flags.DEFINE_integer("burst", 4, "Prompts that come at once.")
flags.DEFINE_integer("long", 1024, "Tokens of each.")
flags.DEFINE_integer("answer", 4, "Tokens that each is answered with.")
flags.DEFINE_integer("capacity", 2048, "Tokens that a slot has room for.")
flags.DEFINE_integer("budget", 1 << 20, "Bytes that the decoding process takes from the stream between two steps.")
flags.DEFINE_integer("rounds", 3, "Times that quiet and burst are measured, in turn.")
flags.DEFINE_string("json", None, "Write the figures to this file.")
flags.DEFINE_enum("role", None, ["prefill", "decode", "together"], "Set for the processes that this script starts.")
flags.DEFINE_list("cores", [], "Likewise: where it runs.")
flags.DEFINE_integer("port", 0, "Likewise: where prefill listens.")
flags.adopt_module_key_flags(entry)


def main() -> None:
  if FLAGS.role is not None:
    os.sched_setaffinity(0, {int(core) for core in FLAGS.cores})  # before JAX counts them to size its pool of threads
    {"prefill": prefill, "decode": decode, "together": together}[FLAGS.role]()
    return
  entry.check_folder("json")
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    raise ValueError(f"two processes want a core each, got {len(cores)}")
  from decoder.checkpoint.atomic import write_file
  from decoder.measure.apart import line

  results = {"work": _work()._asdict()}
  for name, told in _measured(cores):
    print(line(name, told), flush=True)
    results[name] = told
    if FLAGS.json is not None:
      write_file(Path(FLAGS.json).expanduser(), (json.dumps(results, indent=1) + "\n").encode())


def _measured(cores: Sequence[int]) -> Iterator[tuple[str, dict]]:
  """Each way to serve, as soon as it is known."""
  yield "apart", _apart(cores)
  for size in FLAGS.chunk:
    with _start("together", cores[-FLAGS.together_cores :], f"--chunk={size}") as process:
      yield f"together, chunks of {size}", json.loads(_line(process))


def _apart(cores: Sequence[int]) -> dict:
  with _start("prefill", cores[:1]) as reader:
    try:
      port = int(_line(reader))
      with _start("decode", cores[1:2], f"--port={port}") as process:
        return json.loads(_line(process))
    finally:
      reader.terminate()


def _start(role: str, cores: Sequence[int], *more: str) -> subprocess.Popen:
  given = [FLAGS[name].serialize() for name in FLAGS if FLAGS[name].present and name not in ("chunk", "json")]
  places = f"--cores={','.join(map(str, cores))}"
  command = [sys.executable, __file__, *given, f"--role={role}", places, *more]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen) -> str:
  line = process.stdout.readline()
  if not line:
    raise ValueError(f"a process that was started has ended with code {process.wait()}; see what it said above")
  return line


def _work():
  from decoder.measure.apart import Work

  return Work(*(FLAGS[name].value for name in Work._fields))


def _load():
  """The model, its programs for greedy texts, and a batch for them."""
  from decoder.serving.engine import Slots

  lm = entry.load({})
  request = lm.request([0], max_new_tokens=1)
  programs = lm.programs([request.settings])
  if FLAGS.role == "prefill":
    return lm, programs, request
  rows = 1 << (FLAGS.rows + FLAGS.burst - 1).bit_length()
  slots = Slots(programs, rows, FLAGS.capacity, request.settings)
  slots.prepare((FLAGS.prompt, FLAGS.long))
  return lm, programs, slots


def _identity(lm, programs):
  from decoder.serving.transfer import identity

  return identity(lm.params, (lm.network.cache_spec, lm.network.dtype, programs.links))


def prefill() -> None:
  from decoder.serving import apart, engine, transfer

  lm, programs, request = _load()
  listener = transfer.listen()
  print(listener.getsockname()[1], flush=True)
  while True:
    try:
      with transfer.accept(listener, patience=_PATIENCE) as connection:
        transfer.greet(connection, _identity(lm, programs))
        apart.serve(connection, engine.Prefill(programs), engine.fields_for(request, programs))
    except transfer.TransferError as error:  # the next one may be better
      print(f"prefill: {error}", file=sys.stderr, flush=True)


def decode() -> None:
  from decoder.measure.apart import compare
  from decoder.serving import apart, transfer

  lm, programs, slots = _load()
  with transfer.connect(transfer.HOST, FLAGS.port, patience=_PATIENCE) as connection:
    transfer.greet(connection, _identity(lm, programs))
    desk = apart.Desk(apart.There(connection, slots, FLAGS.budget), slots)
    print(json.dumps(compare(desk, lm, _work(), FLAGS.rounds)), flush=True)


def together() -> None:
  from decoder.measure.apart import colocated, compare

  lm, programs, slots = _load()
  print(json.dumps(compare(colocated(programs, slots, FLAGS.chunk[0]), lm, _work(), FLAGS.rounds)), flush=True)


if __name__ == "__main__":
  entry.run(main)
