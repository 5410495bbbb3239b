"""A batch of requests on its way: owns the State, calls the compiled programs, reads what they emit."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from decoder.constrained import driver
from decoder.encoded import source_fields
from decoder.guided import negative_fields
from decoder.processes import ALONE, Alone
from decoder.programs import LOOP, Programs, bucket
from decoder.prompts import reading
from decoder.reader import Reader, Request
from decoder.report import Report
from decoder.result import Result, Timings
from decoder.strategies import Finish, State
from decoder.types import NONE, Emission

_MOMENT = 0.1  # seconds that a stream may gather tokens for: hardly seen, and each call costs 3 ms of a core
_SHORT = 8  # steps a call where something on the host may end a row: at most twice as many are wasted
_GATHERED = 16  # most tokens that a stream gathers: of a call's 2 to 3 ms of a core 0.2 fall to a token


class _Moment(NamedTuple):
  """What time and other threads say before a device call. Where several processes decode as one, process 0's.

  now: milliseconds from the start. each: of those, what a step of the last call took. steps: asked for at once.
  cancelled: whether another thread wants the end.
  """

  now: float = 0.0
  each: float = 0.0
  steps: int = 1
  cancelled: bool = False


class Decoding:
  """Requests decoded together, in ragged rows of one batch.

  capacity: of a new cache, in tokens. compiled_s: () -> seconds spent compiling so far, which the timings leave out.
  cache, held: a cache to go on from and how many of the prompt's tokens to keep of it; only for a single request.
  cancel: once another thread has set it, all rows end before the next device call. lead: of `processes.lead()`.
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
    cancel: threading.Event | None = None,
    lead: Alone = ALONE,
  ):
    self.readers = list(readers)
    self.requests = [reader.request for reader in readers]
    self.reports = [Report(reader.request.settings, reader.tokenizer, programs.links) for reader in readers]
    self._prompts, self._speculated = reading(programs, self.requests), programs.speculated
    self._fetch = programs.placement.fetch
    self._drive, self._held = driver(self._prompts, readers), held
    self._start, compiled_before = time.perf_counter(), compiled_s()
    self._times: list[list[float]] = [[] for _ in readers]  # when each token came, milliseconds from the start
    self._now = self._each = 0.0  # when the last call returned, and how long a step of it took
    self._cancel, self._turn = cancel, threading.Lock()
    self._lead, self._moment = lead, _Moment()
    self._timed = any(r.settings.max_time is not None for r in self.requests)
    self._read_soundly = True
    self._read = False
    self._ahead: Emission | None = None  # of the call that the device is at while the host reads the one before
    self._written = 0  # tokens a row that the calls so far may have written
    self._due = any(r.settings.prompt_logprobs for r in self.requests)  # also where nothing is drawn
    capacity = capacity if cache is None else cache.capacity
    self.state: State = self._prompts.begin(capacity, fields_of(self.requests, programs, capacity, held), cache)
    self._lengths = [len(request.prompt_ids) for request in self.requests]
    ahead = max(request.limit - length for request, length in zip(self.requests, self._lengths))
    if ahead > 0 or self._due:
      self._drive.prepare(self.state, self._lengths, held, loop=ahead > 1)
    self._compile_s = compiled_s() - compiled_before
    for reader, length in zip(self.readers, self._lengths):
      if reader.request.limit <= length:
        reader.end("length")
      elif reader.constraint is not None and reader.constraint.done:  # by the empty text
        reader.end("stop")

  @property
  def done(self) -> bool:
    return all(reader.done for reader in self.readers) and not self._due

  def advance(self, steps: int, ahead: bool = False) -> list[str]:
    """Reads the prompts, at the first call; then up to `steps` further tokens a row. Returns new text by row.

    ahead: give out the next call, of as many steps, before the last is read, so that the device never waits for the
    host; it is what the next `advance` reads.
    A Ctrl-C is raised when it is done: never between the giving away of a State and the keeping of the next. Threads
    take turns.
    """
    with self._turn, interrupt_later():
      self._look(steps)
      late = self._end_early()
      if self.done:
        return late
      emission, self._ahead = self._ahead or self._call(), None
      if emission is None:
        return late
      if ahead and self._goes_on():
        self._ahead = self._call()
      return [a + b for a, b in zip(late, self._hear(emission))]

  @property
  def sound(self) -> bool:
    """No row has met logits that are not finite, else its cache may hold NaN."""
    return self._read_soundly and not bool((self._fetch(self.state.finish_B) == Finish.ERROR).any())

  def _goes_on(self) -> bool:
    """Whether to give out a call before it is known what the last one wrote. Where rows have ended meanwhile, it ends
    at once. Not where the host says what may be drawn, nor where it watches the time."""
    left = max(request.limit - length for request, length in zip(self.requests, self._lengths)) - self._written
    return self._drive.runs_ahead and not self._timed and left > 0

  def _look(self, steps: int) -> None:
    """Asks what time it is, before the device is called: all that follows is the same in all processes."""
    cancelled = self._cancel is not None and self._cancel.is_set()
    self._moment = _Moment(*self._lead.agree(_Moment(self._elapsed(), self._each, steps, cancelled)))

  def _call(self) -> Emission | None:
    return self._write() if self._read else self._read_prompts()

  def _read_prompts(self) -> Emission | None:
    """Reads the prompts and draws a first token a row; None if all rows have ended before that."""
    for chunk in self._prompts.chunks(self._lengths, self._held):
      self.state = self._prompts.read_chunk(self.state, self._lengths, self._held, chunk)
      if self._timed:
        jax.block_until_ready(self.state.length_B)  # else chunks are only queued, and no time has passed
      self._look(self._moment.steps)
      self._end_early()  # no text yet
      if self.done:
        return None
    self.state, emission = self._drive.read(self.state, self._lengths, self._held)
    self._read, self._written = True, 1
    self._hear_of_prompts()
    return emission

  def _write(self) -> Emission:
    steps = self._few(min(self._moment.steps, LOOP))
    self._written += steps
    self.state, emission = self._drive.loop(self.state, steps)
    return emission

  def _hear(self, emission: Emission) -> list[str]:
    """Hands what was emitted to the readers."""
    tokens_BN, count_B, (finish_B, details) = self._fetch(emission)
    before, self._now = self._now, self._elapsed()
    self._each = (self._now - before) / max(int(count_B.max()), 1)  # steps of one call take equally long
    deltas = []
    for row, reader in enumerate(self.readers):
      if not reader.done:
        self._times[row] += [before + self._each * (step + 1) for step in range(int(count_B[row]))]
      drawn = reader.drawn
      deltas.append(reader.feed(tokens_BN[row, : count_B[row]], int(finish_B[row])))
      read = reader.drawn - drawn  # what was drawn after the end of a stop string is not part of the text
      self.reports[row].add(tokens_BN[row, :read], jax.tree.map(lambda leaf, row=row: leaf[row], details))
    return deltas

  def _hear_of_prompts(self) -> None:
    if not self._due:
      return
    self._due = False
    for reader, report, told in zip(self.readers, self.reports, self._prompts.told):
      if not report.add_prompt(reader.request.prompt_ids, told):
        reader.fail()
        self._read_soundly = False

  def _few(self, steps: int) -> int:
    """Steps for one call, few enough that stop strings, times and cancellation are noticed soon. Half of what a row's
    time seems to allow: calls get shorter towards its end, which is missed by about one step."""
    running = [reader.request.settings for reader in self.readers if not reader.done]
    each = self._moment.each
    if any(s.stop or s.stop_at_dedent for s in running):
      steps = min(steps, _SHORT)
    elif self._cancel is not None:  # more than a few only of steps so fast that many fit into a moment
      steps = min(steps, max(_SHORT, int(1e3 * _MOMENT / each) if each > 0 else 0))
    left = [1e3 * settings.max_time - self._moment.now for settings in running if settings.max_time is not None]
    if left and each > 0:
      steps = min(steps, max(1, int(min(left) / (2 * each))))
    return steps

  def _end_early(self) -> list[str]:
    """Ends what was cancelled or is out of time; the text that each row held back."""
    if self._moment.cancelled:
      return self._end_all()
    if not self._timed:
      return [""] * len(self.readers)
    limits = [request.settings.max_time for request in self.requests]
    late = [limit is not None and self._moment.now >= 1e3 * limit for limit in limits]
    self._due &= not any(late)
    return [reader.end("time") if is_late else "" for reader, is_late in zip(self.readers, late)]

  def _end_all(self) -> list[str]:
    self._due = False
    return [reader.end("cancelled") for reader in self.readers]

  def close(self) -> list[str]:
    """Ends every row that still runs, after the device call that may be running; returns the text each held back."""
    with self._turn:
      return self._end_all()

  def cached_ids(self) -> tuple[int, ...]:
    """The tokens of the first row that its cache holds: all but the one drawn last."""
    if not self._read:
      return self.requests[0].prompt_ids[: self._held]
    context_BL, length_B = self._fetch((self.state.context_BL, self.state.length_B))
    return tuple(context_BL[0, : length_B[0] - 1].tolist())

  def results(self, load_s: float) -> list[Result]:
    """What became of each request."""
    told_B = self._speculated(self.state)
    return [self._result(row, load_s, told_B[row]) for row in range(len(self.requests))]

  def _elapsed(self) -> float:
    """Milliseconds from the start, without compilation."""
    return (time.perf_counter() - self._start - self._compile_s) * 1e3

  def _result(self, row: int, load_s: float, speculated: Any) -> Result:
    request, reader, report, times = self.requests[row], self.readers[row], self.reports[row], self._times[row]
    first, further = (times[0] if times else None), len(times) - 1
    tpot = (times[-1] - times[0]) / further if further > 0 else None
    timings = Timings(
      load_s=round(load_s, 3),
      compile_s=round(self._compile_s, 3),
      ttft_ms=first,
      tpot_ms=tpot,
      tokens_per_s=1e3 / tpot if tpot else None,
      prompt_tokens_per_s=1e3 * (len(request.read_ids) - self._held) / first if first else None,
      prompt_tokens=len(request.read_ids),
      new_tokens=len(reader.token_ids),
    )
    truncated = request.at_limit if reader.finish_reason == "length" else request.truncated
    return Result(
      reader.text, request.read_ids, tuple(reader.token_ids), reader.finish_reason or "cancelled",
      reader.stop_reason, truncated, request.seed, request.settings, timings, request.sample,
      report.logprobs(), report.prompt_logprobs(), report.explanation(), speculated=speculated,
    )  # fmt: skip


class Stream:
  """An iterator of text deltas that concatenate to the whole text. `result` is the Result, once it has ended.

  `close()` ends it early; the result then says 'cancelled'. `cancel()` asks for that from any thread or signal handler
  without waiting: whoever reads the stream gets the text held back and its end. Deltas may be none for tokens that wait
  for the rest of a character or for a possible stop string.
  """

  def __init__(
    self, decoding: Decoding, load_s: float, cancel: threading.Event, finish: Callable[[Decoding], None] | None = None
  ):
    self._decoding, self._load_s, self._cancel, self._finish = decoding, load_s, cancel, finish
    self._steps = 1  # tokens of the next call
    self._result: Result | None = None

  def __iter__(self) -> Iterator[str]:
    return self

  def __next__(self) -> str:
    while not self._decoding.done:
      start = time.perf_counter()
      (delta,) = self._decoding.advance(self._steps, ahead=True)
      each = (time.perf_counter() - start) / self._steps
      self._steps = min(max(int(_MOMENT / each), 1), _GATHERED)
      if delta:
        return delta
    self._end()
    raise StopIteration

  def close(self) -> None:
    """Ends the stream; text held back for a possible stop string is in the result."""
    self._decoding.close()
    self._end()

  def cancel(self) -> None:
    """Lets the stream end before its next device call. Harmless when it has ended, and any number of times."""
    self._cancel.set()

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
def interrupt_later() -> Iterator[None]:
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


def fields_of(requests: Sequence[Request], programs: Programs, capacity: int, held: int) -> dict[str, Any]:
  """The requests as numpy rows, padded to a power of two of them; a padding row has length 0."""
  rows = programs.rows(len(requests))
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
  fields |= negative_fields(requests, rows) | source_fields(requests, rows)
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
