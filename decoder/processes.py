"""Several processes that decode as one, over `jax.distributed`: they meet, are the same, and end together.

Each process runs the same program over its part of the mesh, and XLA's collectives wait until all have given out the
same call. So whatever depends on time or on chance (how many steps a call makes, whether time is up, seeds) is process
0's: `lead().agree(value)`. It goes through the coordinator's key-value store and not through the devices, where it
would wait for the call that they are at. What ends a process ends all, with the reason said.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jaxlib

_PATIENCE = 60.0  # seconds for all processes to meet
_HEARTBEAT = 45  # seconds without one until JAX's own service aborts all; it looks twice in this time
_BEAT = 1.0  # seconds between the signs of life that each process gives
_MISSED = 25  # of them that a process may miss: so its end is told in a line before JAX aborts all
_GOODBYE = 3.0  # seconds that a process which ends early gives the others to hear of it
_FAREWELL = 60  # seconds that processes which are done wait for each other
_SLICE = 1.0  # seconds between looks for a Ctrl-C
_AGES = 7 * 86400.0  # seconds: longer than anybody waits; who waits for a dead process is ended by `_watch`
_KEPT = 1000  # values agreed upon before those of the last time are dropped from the store
_ENDS = 2**20  # bytes at the start and end of a file
_ROOT = "decoder"  # of all keys
_ALIVE, _ENDED = f"{_ROOT}/alive", f"{_ROOT}/ended"
_SIGNS = ("Gloo ", "NCCL", "UNAVAILABLE", "Connection reset", "Connection closed")  # of it, in what JAX raises


class Lost(RuntimeError):
  """Another process has died, or cannot be reached."""


class Alone:
  """The only process. first: whether this process is the one that prints."""

  first, count = True, 1

  def agree(self, value: Any) -> Any:
    """Process 0's value, in all processes, in the order of their calls. Made of what JSON knows; tuples become lists
    where there are several processes."""
    return value

  def same(self, make: Callable[[], Mapping[str, Any]]) -> None:
    """ValueError in all processes, naming what differs, unless all make the same of it: texts, numbers and lists by
    name. Not made where this is the only process."""

  def __enter__(self) -> "Alone":
    return self

  def __exit__(self, *raised: Any) -> None:
    pass


class Together(Alone):
  """One of `count` processes; a context that all leave together. Leaving it by an exception ends them all: the others
  say why, and exit with the code that this one exits with (2 for ValueError and OSError, 130 for Ctrl-C, else 1).

  store: the coordinator's, with the verbs of JAX's distributed client. A store raises its own errors.
  """

  def __init__(self, store: Any, number: int, count: int):
    self.number, self.count, self.first = number, count, number == 0
    self._store, self._agreed, self._compared = store, 0, 0
    self._turn, self._left = threading.Lock(), threading.Event()

  def agree(self, value: Any) -> Any:
    with self._turn:
      call, self._agreed = self._agreed, self._agreed + 1
    key = f"{_ROOT}/agreed/{call // _KEPT}/{call % _KEPT}"
    if call and call % _KEPT == 0:  # all have read what came before
      self._store.wait_at_barrier(f"{_ROOT}/agreed/{call}", _milliseconds(_AGES))
      if self.first:
        self._store.key_value_delete(f"{_ROOT}/agreed/{call // _KEPT - 1}")
    if self.first:
      self._store.key_value_set(key, json.dumps(value))
      return json.loads(json.dumps(value))  # what the others get
    return json.loads(_wait(self._store, key, _AGES))

  def same(self, make: Callable[[], Mapping[str, Any]]) -> None:
    round_, self._compared = self._compared, self._compared + 1
    here = f"{_ROOT}/same/{round_}"
    self._store.key_value_set(f"{here}/{self.number}", json.dumps(dict(make())))
    told = [json.loads(_wait(self._store, f"{here}/{number}", _AGES)) for number in range(self.count)]
    if faults := differences(told):
      raise ValueError(
        f"the processes are not the same: {'; '.join(faults)}. Start all with the same flags, code, versions and "
        "checkpoint"
      )

  def __enter__(self) -> "Together":
    self._watcher = threading.Thread(target=self._watch, name="other processes", daemon=True)
    self._watcher.start()
    return self

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    with self._turn:
      self._left.set()
    self._watcher.join(_GOODBYE)  # Python would end it within a call of C++, which aborts
    lost = self._lost(error)
    if not (code := exit_code(lost or error)):
      return
    self._tell(f"process {self.number} has ended: {_words(lost or error)}", code)
    _exit_with(code)
    if lost:
      raise lost from error

  def _lost(self, error: BaseException | None) -> "Lost | None":
    """What JAX means, where it raises that a collective has failed."""
    if not isinstance(error, ValueError | RuntimeError) or not any(sign in str(error) for sign in _SIGNS):
      return None
    return Lost(f"another process has died, or cannot be reached from process {self.number} ({_words(error)})")

  def _tell(self, why: str, code: int) -> None:
    """Says that all is over, unless another has said so, and waits a little for the others to hear it."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._store.key_value_set(f"{_ENDED}/first", json.dumps([why, code]))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # some are dead already
      self._store.wait_at_barrier(f"{_ROOT}/parting", _milliseconds(_GOODBYE))

  def _watch(self) -> None:
    """Gives signs of life, and ends this process once another has ended early."""
    seen: dict[str, tuple[str, int]] = {}
    beat = 0
    while not self._left.wait(_BEAT):
      beat += 1
      try:
        self._store.key_value_set(f"{_ALIVE}/{self.number}", str(beat), allow_overwrite=True)
        told = [json.loads(text) for _, text in self._store.key_value_dir_get(_ENDED)]
        if self.first and not told:
          told = [[why, 1] for why in silent(self._store.key_value_dir_get(_ALIVE), seen)]
      except jax.errors.JaxRuntimeError as error:
        told = [[f"process 0, which coordinates, has ended or cannot be reached ({_words(error)})", 1]]
      with self._turn:
        if told and not self._left.is_set():
          self._end(*told[0])

  def _end(self, why: str, code: int) -> NoReturn:
    """Ends this process from whatever thread: the main one may wait for a collective that never comes."""
    print(f"error: {why}; so process {self.number} ends too", file=sys.__stderr__, flush=True)
    self._tell(why, code)
    os._exit(code)


ALONE = Alone()
_lead: Alone = ALONE


def lead() -> Alone:
  """What tells this process what to do where time or chance would: itself, unless it has joined others."""
  return _lead


def join(
  coordinator: str | None = None, process_id: int | None = None, num_processes: int | None = None,
  *, patience: float = _PATIENCE,
) -> Alone:  # fmt: skip
  """Meets the other processes, before anything else is done with JAX; a context to decode in, see `Together`.

  coordinator: host:port where process 0 listens. Without arguments they are found in a cluster that JAX knows (TPU
  pods, Slurm, Open MPI, Kubernetes), and elsewhere this process is alone. patience: seconds to wait for all. ValueError
  where an argument is wrong or the others do not come.
  """
  global _lead
  if _checked(coordinator, process_id, num_processes) == 1:
    return _lead
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which shall end the process
  host = coordinator.rsplit(":", 1)[0] if coordinator else None
  own = host in ("localhost", "127.0.0.1", "[::1]")  # then nobody on the network needs to be let in

  def meet() -> None:
    jax.distributed.initialize(
      coordinator, num_processes, process_id, initialization_timeout=int(_AGES), heartbeat_timeout_seconds=_HEARTBEAT,
      shutdown_timeout_seconds=_FAREWELL, coordinator_bind_address=coordinator if own else None,
    )  # fmt: skip

  try:
    _within(patience, meet)
  except TimeoutError:
    raise ValueError(_nobody(coordinator, process_id, num_processes, patience)) from None
  except ValueError:
    if coordinator is None:  # no cluster
      return _lead
    raise
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f"process {process_id} cannot listen at {coordinator} ({error}); give an address of this machine and a free port"
    ) from error
  if jax.process_count() > 1:
    _lead = Together(_client(), jax.process_index(), jax.process_count())
  return _lead


def facts() -> dict[str, str]:
  """What must be the same for processes to give out the same calls: versions, and a digest of this library's code."""
  versions = {"Python": platform.python_version(), "JAX": jax.__version__, "jaxlib": jaxlib.__version__}
  return {"the code of decoder": code()[:12], **versions}


@functools.cache
def code() -> str:
  """A digest of this package's sources: its version, also of a checkout that is being worked on."""
  root, whole = Path(__file__).parent, hashlib.sha256()
  for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".cc", ".h")):
    whole.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
  return whole.hexdigest()


def digest_of(path: Path) -> str:
  """Of a checkpoint's files: names, sizes, and first and last bytes, in which training leaves nothing the same."""
  digest = hashlib.sha256()
  files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
  for file in files:
    size = file.stat().st_size
    digest.update(f"{file.relative_to(path)} {size} ".encode())
    with open(file, "rb") as opened:
      digest.update(opened.read(_ENDS))
      opened.seek(max(0, size - _ENDS))
      digest.update(opened.read(_ENDS))
  return digest.hexdigest()[:12]


def differences(told: list[Mapping[str, Any]]) -> list[str]:
  """In words, what each process tells otherwise than process 0."""
  faults = []
  for number, theirs in enumerate(told[1:], 1):
    for name in sorted({*told[0], *theirs}):
      here, there = told[0].get(name), theirs.get(name)
      if here != there:
        there, here = (textwrap.shorten(repr(value), 80) for value in (there, here))
        faults.append(f"{name} is {there} in process {number}, {here} in process 0")
  return faults


def silent(signs: Iterable[tuple[str, str]], seen: dict[str, tuple[str, int]]) -> list[str]:
  """Who has given no sign of life for too long, in words. signs: the last of each, by a key that ends in its number.
  seen: what the last look saw, and for how many looks; changed. Looks are counted, since the clock goes on while a
  machine sleeps."""
  for key, sign in signs:
    last, looks = seen.get(key, ("", 0))
    seen[key] = (sign, looks + 1 if sign == last else 0)
  dead = [key.rsplit("/", 1)[1] for key, (_, looks) in seen.items() if looks > _MISSED]
  return [f"process {number} has died: no sign of life for {_MISSED * _BEAT:.0f} s" for number in dead]


def exit_code(error: BaseException | None) -> int:
  """What a script exits with that ends by this."""
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(error.code is not None)
  codes = ((type(None), 0), (BrokenPipeError, 0), (KeyboardInterrupt, 130), ((ValueError, OSError), 2))
  return next((code for kinds, code in codes if isinstance(error, kinds)), 1)


def _checked(coordinator: str | None, process_id: int | None, num_processes: int | None) -> int | None:
  """How many processes there will be; None if that is yet to be found."""
  given = {"coordinator": coordinator, "process_id": process_id, "num_processes": num_processes}
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == 3:
    return None
  if num_processes == 1 and process_id in (None, 0):
    return 1
  if missing:
    raise ValueError(f"to join other processes, give {' and '.join(missing)} too, or none of {', '.join(given)}")
  if num_processes < 1 or not 0 <= process_id < num_processes:
    raise ValueError(f"process_id must be one of 0 … num_processes − 1, got {process_id} of {num_processes}")
  if not re.fullmatch(r"[^\s:]+:\d+|\[[0-9a-fA-F:]+\]:\d+", coordinator) or int(coordinator.rsplit(":", 1)[1]) > 65535:
    raise ValueError(f"coordinator is written host:port, got {coordinator!r}")
  return num_processes


def _within(seconds: float, what: Callable[[], None]) -> None:
  """Does it in a thread of its own, which is left behind where it takes longer (TimeoutError): JAX would abort."""
  raised: list[BaseException] = []

  def work() -> None:
    try:
      what()
    except BaseException as error:
      raised.append(error)

  thread = threading.Thread(target=work, daemon=True)
  thread.start()
  end = time.monotonic() + seconds
  while thread.is_alive() and time.monotonic() < end:
    thread.join(min(_SLICE, seconds))
  if thread.is_alive():
    raise TimeoutError
  if raised:
    raise raised[0]


def _nobody(coordinator: str | None, process_id: int | None, num_processes: int | None, patience: float) -> str:
  """What to say of others that did not come."""
  if process_id == 0:
    return (
      f"not all of {num_processes} processes came to {coordinator} within {patience:.0f} s; check that each was "
      "started with the same --coordinator and --num_processes and a --process_id of its own, and can reach this "
      "machine there"
    )
  return (
    f"the coordinator at {coordinator or 'the address that the cluster names'} did not let this process in within "
    f"{patience:.0f} s; check that process 0 and all others are running, that it listens there, that no firewall is "
    "between, and that all were started with the same --num_processes"
  )


def _client() -> Any:
  from jax._src import distributed  # JAX gives no other way to its key-value store; Orbax takes the same

  return distributed.global_state.client


def _wait(store: Any, key: str, seconds: float) -> str:
  """The value of a key, once it is there. Looks up now and then, so that a Ctrl-C is noticed. TimeoutError."""
  end = time.monotonic() + seconds
  while (left := end - time.monotonic()) > 0:
    try:
      return store.blocking_key_value_get(key, _milliseconds(min(left, _SLICE)))
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
  raise TimeoutError(f"{key} was not told within {seconds:.0f} s")


def _milliseconds(seconds: float) -> int:
  return max(1, int(1e3 * seconds))


def _words(error: BaseException) -> str:
  if isinstance(error, KeyboardInterrupt):
    return "Ctrl-C"
  return "; ".join(str(error).splitlines()) or type(error).__name__


def _exit_with(code: int) -> None:
  """Once Python exits, ends this process at once: JAX would wait for the others, who are gone, and abort."""

  def leave() -> None:
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):  # a closed pipe
        stream.flush()
    os._exit(code)

  atexit.register(leave)
