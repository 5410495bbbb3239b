"""How many requests a second meet their promises, colocated or apart? A simulation of turns, fed with measured times.

Goodput, after Zhong et al. 2024 (DistServe, arXiv:2401.09670): the requests a second, per device, whose first token
comes within one time (TTFT) and whose further ones come, on average, within another (TPOT). A colocated device reads a
chunk of a prompt before each step, as `serving.apart.Here` does; apart, some devices only read and some only decode.
Nothing here is random but the load, which a seed fixes; no JAX is needed.
"""

import bisect
import collections
import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Times(NamedTuple):
  """Measured on one device. prefill: (tokens, seconds) of reading prompts with their first draw; step: (rows, seconds)
  of a step; move: (tokens, seconds) from a prompt's end to its row's being in a batch elsewhere. Each ascending and at
  least one; between them, and beyond the last two, linear. Where a larger one measured less, which is noise, it counts
  as the slowest below it."""

  prefill: Sequence[tuple[int, float]]
  step: Sequence[tuple[int, float]]
  move: Sequence[tuple[int, float]]


class Asked(NamedTuple):
  """A request: when it comes (seconds), tokens of its prompt and tokens it is to write, at least 1."""

  arrival: float
  prompt: int
  new: int


class Told(NamedTuple):
  """What became of a request: seconds from its arrival to its first token, and between its further ones (0: none)."""

  ttft: float
  tpot: float


class Fleet(NamedTuple):
  """Devices. prefill, decode: apart; together: each does both, reading `chunk` tokens before a step. slots: rows a
  decoding device holds."""

  prefill: int = 0
  decode: int = 0
  together: int = 0
  slots: int = 16
  chunk: int = 512

  @property
  def devices(self) -> int:
    return self.prefill + self.decode + self.together

  @property
  def name(self) -> str:
    if self.together:
      return f"{self.together} colocated, chunks of {self.chunk}"
    return f"{self.prefill} prefill : {self.decode} decode"


class Promise(NamedTuple):
  """Seconds that TTFT and TPOT may take."""

  ttft: float
  tpot: float

  def kept(self, told: Told) -> bool:
    return told.ttft <= self.ttft and told.tpot <= self.tpot

  def times(self, scale: float) -> "Promise":
    return Promise(self.ttft * scale, self.tpot * scale)


def read_times(file: Path) -> Times:
  """What `scripts/goodput.py --measure` wrote. ValueError for anything else."""
  try:
    told = json.loads(file.read_text(encoding="utf-8"))
    times = Times(*([(int(x), float(y)) for x, y in told[name]] for name in Times._fields))
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{file} holds no serving times; name a file that scripts/goodput.py --measure wrote") from error
  for name, points in zip(Times._fields, times):
    sizes = [x for x, _ in points]
    if not points or sizes != sorted(set(sizes)) or min(y for _, y in points) <= 0:
      raise ValueError(f"{file}: {name} wants (size, seconds above 0) by ascending sizes, got {points[:4]}")
  return times


def load(
  rate: float, count: int, seed: int, prompt: tuple[int, float], new: tuple[int, float], most: tuple[int, int]
) -> list[Asked]:
  """Requests that come by chance, as Poisson's do of which `count` are known to come in `count / rate` seconds. prompt,
  new: median and spread (of the logarithm) of their lengths, log-normal, at most `most`. With one seed, other rates
  bring the same requests in other time."""
  rng = random.Random(seed)
  times = list(itertools.accumulate(rng.expovariate(1.0) for _ in range(count)))

  def length(median: int, spread: float, limit: int) -> int:
    return min(max(round(median * rng.lognormvariate(0, spread)), 1), limit)

  scale = count / rate / times[-1]
  return [Asked(now * scale, length(*prompt, most[0]), length(*new, most[1])) for now in times]


def simulate(asked: Sequence[Asked], times: Times, fleet: Fleet) -> list[Told]:
  """What becomes of each request, in the order given, that of arrival. ValueError for a fleet that cannot serve.

  Requests go to the device with the fewest; prompts are read first come first served.
  """
  apart, mixed = fleet.prefill and fleet.decode, fleet.prefill or fleet.decode
  if not (apart and not fleet.together) and not (fleet.together and not mixed):
    raise ValueError(f"a fleet is of devices together, or of both prefill and decode devices, got {fleet}")
  if fleet.slots < 1 or fleet.chunk < 1:
    raise ValueError(f"a device wants at least one slot and chunks of at least one token, got {fleet}")
  costs = _Costs(*map(_linear, times))
  first, last = [0.0] * len(asked), [0.0] * len(asked)
  arrivals = [(one.arrival, number) for number, one in enumerate(asked)]
  if fleet.prefill:
    arrivals = _read(asked, arrivals, costs, fleet.prefill, first, last)
  devices = [_Device(costs, fleet, asked, first, last) for _ in range(fleet.together or fleet.decode)]
  _run(devices, arrivals, bool(fleet.prefill))
  spans = zip(asked, first, last)
  return [Told(a - one.arrival, (b - a) / max(one.new - 1, 1)) for one, a, b in spans]


def attainment(told: Iterable[Told], promise: Promise) -> float:
  """The share of requests that keep their promise."""
  kept = [promise.kept(one) for one in told]
  return sum(kept) / len(kept)


def goodput(asked: Sequence[Asked], told: Sequence[Told], promise: Promise, devices: int) -> float:
  """Requests a second and device that keep their promise, over the time in which they came."""
  return sum(map(promise.kept, told)) / asked[-1].arrival / devices


def highest_rate(
  ask: Callable[[float], Sequence[Asked]], times: Times, fleet: Fleet, promise: Promise, share: float = 0.9
) -> float:
  """The goodput that DistServe plots: the highest rate, a second and device, at which `share` of the requests keep
  their promise; to 1 %, and 0 where not even a nearly idle fleet does. ValueError where they keep it at any rate."""

  def enough(rate: float) -> bool:
    return attainment(simulate(ask(rate), times, fleet), promise) >= share

  low = 1e-6
  if not enough(low):
    return 0.0
  high = 1e-3
  while enough(high):
    low, high = high, 2 * high
    if high > 1e9:
      count = len(ask(high))
      raise ValueError(f"{fleet.name}: even {count} requests at once keep {promise}; simulate more requests")
  while high > 1.01 * low:
    middle = (low * high) ** 0.5
    low, high = (middle, high) if enough(middle) else (low, middle)
  return low / fleet.devices


class Line(NamedTuple):
  """One fleet in a sweep. rates: requests a second and device; attained, good: the share that kept their promise and
  the goodput, by rate; scales: factors of the promise; best: `highest_rate` by scale; highest: that of the promise."""

  fleet: Fleet
  rates: list[float]
  attained: list[float]
  good: list[float]
  scales: list[float]
  best: list[float]
  highest: float


class Sweep(NamedTuple):
  """promise: what the rates were held to."""

  promise: Promise
  lines: list[Line]


def fleets(devices: int, slots: int, chunk: int) -> list[Fleet]:
  """So many devices colocated, and in every split of prefill and decode. ValueError for fewer than two."""
  if devices < 2:
    raise ValueError(f"prefill and decode apart want two devices or more, got {devices}")
  splits = [Fleet(prefill=n, decode=devices - n, slots=slots) for n in range(1, devices)]
  return [Fleet(together=devices, slots=slots, chunk=chunk), *splits]


def promise(times: Times, prompt: float, slots: int, ttft: float | None = None, tpot: float | None = None) -> Promise:
  """What is promised: as given, else 5 × what a prompt of this length takes, and 1.5 × a step of half the slots."""
  costs = _Costs(*map(_linear, times))
  return Promise(ttft or 5 * costs.prefill(prompt), tpot or 1.5 * costs.step(max(slots // 2, 1)))


def sweep(
  times: Times, fleets: Sequence[Fleet], ask: Callable[[float], Sequence[Asked]], promise: Promise,
  scales: Sequence[float] = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0), points: int = 16,
) -> Sweep:  # fmt: skip
  """Every fleet at the same rates a device, up to 1.5 × the highest that any serves, and for promises `scales` × as
  long."""
  best = [[highest_rate(ask, times, fleet, promise.times(scale)) for scale in scales] for fleet in fleets]
  highest = [highest_rate(ask, times, fleet, promise) for fleet in fleets]
  rates = [1.5 * max(max(highest), 1e-3) * (i + 1) / points for i in range(points)]
  lines = []
  for fleet, by_scale, most in zip(fleets, best, highest):
    asked = [ask(rate * fleet.devices) for rate in rates]
    told = [simulate(one, times, fleet) for one in asked]
    attained = [attainment(one, promise) for one in told]
    good = [goodput(one, two, promise, fleet.devices) for one, two in zip(asked, told)]
    lines.append(Line(fleet, rates, attained, good, list(scales), by_scale, most))
  return Sweep(promise, lines)


class _Costs(NamedTuple):
  """Seconds, by tokens or rows."""

  prefill: Callable[[float], float]
  step: Callable[[float], float]
  move: Callable[[float], float]


class _Device:
  """One that decodes, and reads prompts where it is given any: the turns of `serving.apart.Desk`."""

  def __init__(self, costs: _Costs, fleet: Fleet, asked: Sequence[Asked], first: list[float], last: list[float]):
    self._costs, self._fleet, self._asked, self._first, self._last = costs, fleet, asked, first, last
    self.prompts: collections.deque[int] = collections.deque()
    self.ready: collections.deque[int] = collections.deque()  # read, without a slot yet
    self._rows: list[tuple[int, int]] = []  # (the step that ends it, number), a heap
    self._offset = self._steps = 0
    self.idle = True

  @property
  def requests(self) -> int:
    return len(self.prompts) + len(self.ready) + len(self._rows)

  def turn(self, now: float) -> float:
    """When a turn that begins now is over."""
    if self.prompts:
      now = self._read(now)
    while self.ready and len(self._rows) < self._fleet.slots:
      number = self.ready.popleft()
      heapq.heappush(self._rows, (self._steps + self._asked[number].new - 1, number))
    if self._rows:
      now += self._costs.step(len(self._rows))
      self._steps += 1
      while self._rows and self._rows[0][0] <= self._steps:
        self._last[heapq.heappop(self._rows)[1]] = now
    return now

  def _read(self, now: float) -> float:
    number = self.prompts[0]
    length = self._asked[number].prompt
    until = min(self._offset + self._fleet.chunk, length)
    before = self._costs.prefill(self._offset) if self._offset else 0.0
    now += max(self._costs.prefill(until) - before, 0.0)
    self._offset = until
    if until == length:
      self.prompts.popleft()
      self._offset, self._first[number], self._last[number] = 0, now, now
      if self._asked[number].new > 1:
        self.ready.append(number)
    return now


def _run(devices: Sequence[_Device], arrivals: Sequence[tuple[float, int]], read: bool) -> None:
  """Lets devices turn until all is done. arrivals: (seconds, number), ascending; read: their prompts are."""
  turns: list[tuple[float, int]] = []  # (when its turn is over, device), a heap

  def until(time: float) -> None:
    while turns and turns[0][0] <= time:
      now, index = heapq.heappop(turns)
      device = devices[index]
      if device.requests:
        heapq.heappush(turns, (device.turn(now), index))
      else:
        device.idle = True

  for time, number in arrivals:
    until(time)
    index = min(range(len(devices)), key=lambda index: devices[index].requests)
    device = devices[index]
    (device.ready if read else device.prompts).append(number)
    if device.idle:
      device.idle = False
      heapq.heappush(turns, (time, index))
  until(float("inf"))


def _read(
  asked: Sequence[Asked], arrivals: Sequence[tuple[float, int]], costs: _Costs, devices: int, first: list[float],
  last: list[float],
) -> list[tuple[float, int]]:  # fmt: skip
  """Prompts read on devices of their own: when each row is where it is decoded, ascending; of those that go on."""
  free, rows = [0.0] * devices, []
  for time, number in arrivals:
    done = max(time, heapq.heappop(free)) + costs.prefill(asked[number].prompt)
    heapq.heappush(free, done)
    first[number] = last[number] = done
    if asked[number].new > 1:
      rows.append((done + costs.move(asked[number].prompt), number))
  return sorted(rows)


def _linear(points: Sequence[tuple[int, float]]) -> Callable[[float], float]:
  """Through the points, never falling; below the first as at it, beyond the last as between the last two."""
  places = [x for x, _ in points]
  points = list(zip(places, itertools.accumulate((y for _, y in points), max)))
  known: dict[float, float] = {}

  def at(x: float) -> float:
    if x <= places[0] or len(points) == 1:
      return points[0][1]
    i = min(bisect.bisect_right(places, x), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

  def remembered(x: float) -> float:
    if x not in known:
      known[x] = at(x)
    return known[x]

  return remembered
