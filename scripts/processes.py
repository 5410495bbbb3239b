"""Several processes that run a script as one: only process 0 reads prompts and prints, and what ends one ends all."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import entry
from absl import flags

FLAGS = flags.FLAGS


def define_flags() -> None:
  flags.DEFINE_string("mesh", None, "Divide the model among all devices: tensor=4,data=2; also expert and sequence.")
  flags.DEFINE_string("coordinator", None, "host:port where process 0 listens; on a TPU pod it is found.")
  flags.DEFINE_integer("process_id", None, "Which of the processes this is, from 0 on; on a TPU pod it is found.")
  flags.DEFINE_integer("num_processes", None, "How many processes decode as one; on a TPU pod it is found.")


@contextlib.contextmanager
def joined() -> Iterator[Any]:
  """Within it, this process is one of several, if the flags or the cluster say so; gives `processes.lead()`. What
  others than process 0 print goes nowhere, except errors. ValueError where they do not come or are not the same."""
  from decoder import processes

  given = (FLAGS.coordinator, FLAGS.process_id, FLAGS.num_processes)
  alone = FLAGS.mesh is None and given == (None, None, None)
  lead = processes.lead() if alone else processes.join(*given)
  try:
    with lead, _quiet(lead):
      lead.same(lambda: {**_flags(), **processes.facts()})
      yield lead
  except processes.Lost as error:
    if FLAGS.verbosity > 0:
      raise
    print("error:", "; ".join(str(error).splitlines()), file=sys.stderr)
    sys.exit(1)


@contextlib.contextmanager
def _quiet(lead: Any) -> Iterator[None]:
  """Where there are several processes, keeps what others than the first print, and what libraries write to stdout."""
  if lead.count == 1:
    yield
    return
  with open(os.dup(1), "w", encoding="utf-8") as out, open(os.devnull, "w", encoding="utf-8") as nowhere:
    os.dup2(2, 1)  # Gloo, in C++, says there whom it has met
    texts, notes = (out, sys.stderr) if lead.first else (nowhere, nowhere)
    with contextlib.redirect_stdout(texts), contextlib.redirect_stderr(notes):
      yield


def _flags() -> dict[str, Any]:
  """The values of all flags that must be the same, by name."""
  ours = [
    flag for module, all_ in FLAGS.flags_by_module_dict().items() if not module.startswith("absl") for flag in all_
  ]
  values = {f"--{flag.name}": flag.value for flag in ours if flag.name != "process_id"}
  return {**values, "--weights": entry.weights()}  # auto depends on the machine
