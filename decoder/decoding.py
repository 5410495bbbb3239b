"""A batch of requests on its way: owns the State, calls the compiled programs, reads what they emit."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decoder.constrained import driver
from decoder.guided import negative_fields
from decoder.programs import LOOP, Programs, bucket
from decoder.reader import Reader, Request
from decoder.settings import Result, Timings
from decoder.strategies import Finish, State
from decoder.types import NONE

_MOMENT = 0.05  # seconds that a stream may gather tokens for: nobody sees it, and each call costs one token's host work
_STEPS_WITH_STOPS = 8  # steps a call where text may end a row: at most this many are wasted


class Decoding:
  """Requests decoded together, in ragged rows of one batch.

  capacity: of a new cache, in tokens. compiled_s: () -> seconds spent compiling so far, which the timings leave out.
  cache, held: a cache to go on from and how many of the prompt's tokens to keep of it; only for a single request.
  """

  def __init__(
    self,
    programs: Programs,
    readers: Sequence[Reader],
    *,
    capacity: int,
    compiled_s: Callable[[], float],
    cache: Any = None,
    held: int = 0,
  ):
    self.readers = list(readers)
    self.requests = [reader.request for reader in readers]
    self._drive, self._compiled_s, self._held = driver(programs, readers), compiled_s, held
    self._start, self._compiled_before = time.perf_counter(), compiled_s()
    self._times: list[list[float]] = [[] for _ in readers]  # when each token came, milliseconds from the start
    self._now = 0.0
    self.sound = True  # no row has met logits that are not finite; its cache may hold NaN
    self._read = False
    capacity = capacity if cache is None else cache.capacity
    self.state: State = programs.begin(capacity, _fields(self.requests, programs, capacity, held), cache)
    self._lengths = [len(request.prompt_ids) for request in self.requests]
    ahead = max(request.limit - length for request, length in zip(self.requests, self._lengths))
    if ahead > 0:
      self._drive.prepare(self.state, self._lengths, held, loop=ahead > 1)
    for reader, length in zip(self.readers, self._lengths):
      if reader.request.limit <= length:
        reader.end("length")
      elif reader.constraint is not None and reader.constraint.done:  # by the empty text
        reader.end("stop")

  @property
  def done(self) -> bool:
    return all(reader.done for reader in self.readers)

  def advance(self, steps: int) -> list[str]:
    """Reads the prompts, at the first call; then up to `steps` further tokens a row. Returns new text by row.

    A Ctrl-C is raised when it is done: never between the giving away of a State and the keeping of the next.
    """
    with _interrupt_later():
      return self._advance(steps)

  def _advance(self, steps: int) -> list[str]:
    if not self._read:
      self.state, emission = self._drive.read(self.state, self._lengths, self._held)
      self._read = True
    else:
      if any(r.settings.stop for r in self.requests):
        steps = min(steps, _STEPS_WITH_STOPS)
      self.state, emission = self._drive.loop(self.state, min(steps, LOOP))
    tokens_BN, count_B, finish_B = jax.device_get((emission.tokens_BN, emission.count_B, emission.info.finish_B))
    self.sound &= not bool((finish_B == Finish.ERROR).any())
    before, self._now = self._now, (time.perf_counter() - self._start - self._compiled()) * 1e3
    each = (self._now - before) / max(int(count_B.max()), 1)  # steps of one call take equally long
    deltas = []
    for row, reader in enumerate(self.readers):
      if not reader.done:
        self._times[row] += [before + each * (step + 1) for step in range(int(count_B[row]))]
      deltas.append(reader.feed(tokens_BN[row, : count_B[row]], int(finish_B[row])))
    return deltas

  def cancel(self) -> list[str]:
    """Ends every row that still runs; returns the text each held back."""
    return [reader.end("cancelled") for reader in self.readers]

  def cached_ids(self) -> tuple[int, ...]:
    """The tokens of the first row that its cache holds: all but the one drawn last."""
    if not self._read:
      return self.requests[0].prompt_ids[: self._held]
    context_BL, length_B = jax.device_get((self.state.context_BL, self.state.length_B))
    return tuple(context_BL[0, : length_B[0] - 1].tolist())

  def results(self, load_s: float) -> list[Result]:
    """What became of each request."""
    return [self._result(row, load_s) for row in range(len(self.requests))]

  def _compiled(self) -> float:
    return self._compiled_s() - self._compiled_before

  def _result(self, row: int, load_s: float) -> Result:
    request, reader, times = self.requests[row], self.readers[row], self._times[row]
    first, further = (times[0] if times else None), len(times) - 1
    tpot = (times[-1] - times[0]) / further if further > 0 else None
    timings = Timings(
      load_s=round(load_s, 3),
      compile_s=round(self._compiled(), 3),
      ttft_ms=first,
      tpot_ms=tpot,
      tokens_per_s=1e3 / tpot if tpot else None,
      prompt_tokens_per_s=1e3 * (len(request.prompt_ids) - self._held) / first if first else None,
      prompt_tokens=len(request.prompt_ids),
      new_tokens=len(reader.token_ids),
    )
    truncated = request.at_limit if reader.finish_reason == "length" else request.truncated
    return Result(
      reader.text, request.prompt_ids, tuple(reader.token_ids), reader.finish_reason or "cancelled",
      reader.stop_reason, truncated, request.seed, request.settings, timings,
    )  # fmt: skip


class Stream:
  """An iterator of text deltas that concatenate to the whole text. `result` is the Result, once it has ended.

  `close()` ends it early; the result then says 'cancelled'. Deltas may be none for tokens that wait for the rest of a
  character or for a possible stop string.
  """

  def __init__(self, decoding: Decoding, load_s: float, finish: Callable[[Decoding], None] | None = None):
    self._decoding, self._load_s, self._finish = decoding, load_s, finish
    self._steps = 1  # tokens of the next call
    self._result: Result | None = None

  def __iter__(self) -> Iterator[str]:
    return self

  def __next__(self) -> str:
    while not self._decoding.done:
      start = time.perf_counter()
      (delta,) = self._decoding.advance(self._steps)
      each = (time.perf_counter() - start) / self._steps
      self._steps = min(max(int(_MOMENT / each), 1), _STEPS_WITH_STOPS)
      if delta:
        return delta
    self._end()
    raise StopIteration

  def close(self) -> None:
    """Ends the stream; text held back for a possible stop string is in the result."""
    self._decoding.cancel()
    self._end()

  @property
  def result(self) -> Result:
    if self._result is None:
      if not self._decoding.done:
        raise RuntimeError("the stream has not ended: read it to its end, or close() it, before asking for its result")
      self._end()
    return self._result

  def _end(self) -> None:
    if self._result is None:
      (self._result,) = self._decoding.results(self._load_s)
      if self._finish:
        self._finish(self._decoding)


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
  """Holds back KeyboardInterrupt until the block has ended."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  pressed: list[int] = []
  before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
  if pressed:
    raise KeyboardInterrupt


def _fields(requests: Sequence[Request], programs: Programs, capacity: int, held: int) -> dict[str, Any]:
  """The requests as numpy rows, padded to a power of two of them; a padding row has length 0."""
  rows = bucket(len(requests))
  ends = bucket(max((len(r.ends) for r in requests), default=1), 8)
  fields = {
    "context_BL": np.zeros((rows, capacity), np.int32),
    "length_B": np.zeros(rows, np.int32),
    "held_B": np.full(rows, held, np.int32),
    "limit_B": np.zeros(rows, np.int32),
    "ends_BE": np.full((rows, ends), NONE, np.int32),
    "seed_B": np.zeros(rows, np.uint32),
    "sample_B": np.zeros(rows, np.int32),
  }
  for row, request in enumerate(requests):
    fields["context_BL"][row, : len(request.prompt_ids)] = request.prompt_ids
    fields["length_B"][row] = len(request.prompt_ids)
    fields["limit_B"][row] = request.limit
    fields["ends_BE"][row, : len(request.ends)] = request.ends
    fields["seed_B"][row], fields["sample_B"][row] = request.seed, request.sample
  fields |= negative_fields(requests, rows)
  settings = [programs.numbers(request.settings) for request in requests]
  settings += settings[:1] * (rows - len(requests))
  fields["settings"] = jax.tree.map(_stacked, *settings)
  return fields


def _stacked(*leaves: Any) -> np.ndarray:
  """One row a leaf; shorter lists are padded at their ends."""
  arrays = [np.asarray(leaf) for leaf in leaves]
  if len({array.shape for array in arrays}) == 1:
    return np.stack(arrays)
  rows = np.full((len(arrays), *np.max([array.shape for array in arrays], axis=0)), NONE, arrays[0].dtype)
  for row, array in zip(rows, arrays):
    row[tuple(slice(size) for size in array.shape)] = array
  return rows
