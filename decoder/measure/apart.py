"""What do rows that are decoding feel of long prompts that come in a burst? And the times that `goodput` is fed with.

Each run is made of the same background, rows that write on and on; in one of two the burst comes, and what counts are
the gaps between a background row's tokens over the same tokens in both. So a gap is never compared with one at
another position.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from decoder.generate import LM
from decoder.programs import Programs
from decoder.reader import Request
from decoder.serving.apart import Desk, Here, There, send_row
from decoder.serving.engine import Prefill, Slots, fields_for
from decoder.serving.rows import Row
from decoder.serving.transfer import Connection


class Work(NamedTuple):
  """rows: background rows, of `prompt` tokens, that write `tokens` each. burst: prompts of `long` tokens that come at
  once when the background has written `after` tokens, each answered with `answer` tokens."""

  rows: int = 4
  prompt: int = 256
  tokens: int = 600
  after: int = 100
  burst: int = 4
  long: int = 1024
  answer: int = 4


def requests(lm: LM, work: Work) -> tuple[list[Request], list[Request]]:
  """The background's requests and the burst's; what they say does not matter here."""

  def make(number: int, length: int, tokens: int) -> Request:
    ids = np.random.default_rng(number).integers(0, lm.network.vocab_size, length).tolist()
    return lm.request(ids, max_new_tokens=tokens, ignore_eos=True)

  background = [make(number, work.prompt, work.tokens) for number in range(work.rows)]
  return background, [make(1000 + number, work.long, work.answer) for number in range(work.burst)]


def write(desk: Desk, background: Sequence[Request], burst: Sequence[Request], after: int) -> dict[str, Any]:
  """Writes the background, with the burst from its `after`-th token on, to its end. Milliseconds: gaps, of each token
  of the background's first row; ttft, of each prompt of the burst. last: how many gaps there were when the burst's last
  token came."""
  times: dict[int, list[float]] = {desk.submit(request): [] for request in background}
  first = min(times)
  told: dict[int, float] = {}
  submitted, sent, last = 0.0, len(burst) == 0, 0
  while not desk.done:
    written, now = desk.turn(), time.perf_counter()
    for one in written:
      if one.number in times:
        times[one.number] += [now] * len(one.tokens)
      else:
        told.setdefault(one.number, now)
        last = len(times[first])
    if not sent and all(len(each) >= after for each in times.values()):
      submitted, sent = time.perf_counter(), True
      for request in burst:
        desk.submit(request)
  return {
    "gaps": (1e3 * np.diff(times[first])).tolist(),
    "ttft": [1e3 * (at - submitted) for at in told.values()],
    "last": last,
  }


def compare(desk: Desk, lm: LM, work: Work, rounds: int) -> dict[str, Any]:
  """Quiet and burst in turn, `rounds` times, after one of each that does not count: a summary in milliseconds."""
  background, burst = requests(lm, work)
  quiet, under, ttft = [], [], []
  for number in range(rounds + 1):
    calm = write(desk, background, (), work.after)
    busy = write(desk, background, burst, work.after)
    if number:
      window = slice(work.after, min(busy["last"], work.tokens - 1))
      quiet += calm["gaps"][window]
      under += busy["gaps"][window]
      ttft += busy["ttft"]
  return {"quiet": spread(quiet), "burst": spread(under), "ratio_p99": _p99(under) / _p99(quiet),
          "ttft_ms": statistics.median(ttft), "gaps": len(quiet)}  # fmt: skip


def spread(gaps: Sequence[float]) -> dict[str, float]:
  """p50, p99 and the longest, in milliseconds."""
  return {"p50": float(np.median(gaps)), "p99": _p99(gaps), "longest": max(gaps)}


def line(name: str, told: dict[str, Any]) -> str:
  """What `compare` gives, in a line."""
  quiet, burst = told["quiet"], told["burst"]
  p50, p99 = (f"{quiet[name]:6.1f} → {burst[name]:6.1f} ms" for name in ("p50", "p99"))
  longest, ttft = f"longest {burst['longest']:6.1f} ms", f"TTFT {told['ttft_ms'] / 1e3:.1f} s"
  return f"{name:24s} TPOT p50 {p50}   p99 {p99} ({told['ratio_p99']:.2f} ×)   {longest}   {ttft}"


def prefill_times(lm: LM, programs: Programs, lengths: Sequence[int], rounds: int = 3) -> list[tuple[int, float]]:
  """(tokens, seconds) of reading a prompt and drawing its first token, medians; nothing else runs meanwhile."""
  prefill, points = Prefill(programs), []
  for length in lengths:
    fields = fields_for(lm.request([0] * length, max_new_tokens=2, ignore_eos=True), programs)
    prefill.read(fields)
    points.append((length, _median(lambda fields=fields: jax.block_until_ready(prefill.read(fields).state), rounds)))
  return points


def step_times(
  lm: LM, programs: Programs, batches: Sequence[int], held: int, capacity: int, steps: int = 30
) -> list[tuple[int, float]]:
  """(rows, seconds) of a step for rows that hold `held` tokens and more, medians; a call a step, as serving does."""
  request = lm.request([0] * held, max_new_tokens=capacity - held, ignore_eos=True)
  row, points = Prefill(programs).read(fields_for(request, programs)), []
  for batch in batches:
    slots = Slots(programs, batch, capacity, request.settings)
    for number in range(batch):
      slots.insert(row, number)
    slots.step()
    points.append((batch, _median(slots.step, steps)))
  return points


def move_times(
  lm: LM, programs: Programs, lengths: Sequence[int], pair: tuple[Connection, Connection], slots: Slots, rounds: int = 3
) -> list[tuple[int, float]]:
  """(tokens, seconds) of moving a row over a stream into a batch, from its bytes in one thread of this process."""
  prefill, points, (here, there) = Prefill(programs), [], pair
  source = There(here, slots, 1 << 30)

  def move(row: Row) -> None:
    sender = threading.Thread(target=send_row, args=(there, 0, row))
    sender.start()
    while not (arrived := source.turn(idle=False)):
      pass
    sender.join()
    slots.release([slots.insert(arrived[0][1], 0)])
    jax.block_until_ready(slots.state)

  for length in lengths:
    row = prefill.read(fields_for(lm.request([0] * length, max_new_tokens=2, ignore_eos=True), programs))
    move(row)
    points.append((length, _median(lambda row=row: move(row), rounds)))
  return points


def colocated(programs: Programs, slots: Slots, chunk: int) -> Desk:
  """A desk that reads prompts itself, `chunk` tokens a turn."""
  return Desk(Here(Prefill(programs.in_chunks(chunk))), slots)


def _median(work: Callable[[], Any], rounds: int) -> float:
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    work()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def _p99(gaps: Sequence[float]) -> float:
  return float(np.percentile(gaps, 99))
