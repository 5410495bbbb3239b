"""Where does a step's time go? Attention, MLP, head, sampling, the rest of the device's time, and the host.

One call of the decode loop for one token, read back, as a stream does: the real program, traced by JAX's profiler. Its
operations bear the names of the scopes they were written in, which XLA keeps: of the modules of the network, and of the
two halves of a strategy. Each moment of a call belongs to the operation that began last. What none of the named scopes
claims is `other`: gaps between operations, the embedding's rows, the last norm, copies that XLA added. What is not
within the device's execution is `host`: dispatch and reading back. So the parts add up to the traced call, which is
given beside an untraced one, for tracing takes time itself.
"""

import heapq
import itertools
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from decoder.generate import LM
from decoder.measure.grid import Point, begin
from decoder.measure.latency import timed
from decoder.measure.roofline import weight_formats
from decoder.strategies import autoregressive, run
from decoder.types import Model

PARTS = ("attention", "mlp", "head", "sampling", "other", "host")
CALLS = 16
_NAME = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', re.MULTILINE)
_MARK, _EXECUTION = "decode call", "ThunkExecutor::Execute"  # the latter is what XLA calls it on CPU


class Span(NamedTuple):
  """When an operation ran, in nanoseconds, and the part it belongs to."""

  start: float
  end: float
  part: str


def measure(lm: LM, point: Point) -> dict[str, Any]:
  """Milliseconds of one decode step at `point`, by part. whole_ms: their sum, of a traced call; untraced_ms: the median
  of calls that were not traced."""
  decoding = begin(lm, point, point.position, 3 * CALLS, held=point.position - 1)
  decoding.advance(1)
  strategy = autoregressive(_named(lm.model), decoding.requests[0].settings.chain())

  leaves, tree = jax.tree.flatten(lm.params)  # passed as the programs pass them

  def program(leaves: list[Any], state: Any, limit: Any) -> Any:
    named = strategy._replace(draw=_scoped("sampling", strategy.draw))
    return run(named, tree.unflatten(leaves), state, limit, 1)

  limit, state = np.int32(1), decoding.state
  compiled = jax.jit(program, donate_argnums=1).lower(leaves, state, limit).compile()

  def call() -> None:
    nonlocal state
    state, emission = compiled(leaves, state, limit)
    jax.device_get(emission)

  for _ in range(CALLS // 2):
    call()
  untraced = statistics.median([timed(call) for _ in range(CALLS)])
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory, profiler_options=options):
      for _ in range(CALLS):
        with jax.profiler.TraceAnnotation(_MARK):
          call()
    (file,) = Path(directory).rglob("*.xplane.pb")
    calls = _read(jax.profiler.ProfileData.from_file(str(file)), scopes(compiled.as_text()))
  parts = {part: statistics.median(one[part] for one in calls) for part in PARTS}
  return {
    "weights": point.weights,
    "stored": weight_formats(lm.params),
    "cache": point.cache,
    "batch": point.batch,
    "position": point.position,
    "parts_ms": parts,
    "whole_ms": sum(parts.values()),
    "untraced_ms": untraced,
  }


def scopes(program: str) -> dict[str, str]:
  """The part that each operation of a compiled program's text belongs to."""
  return {name: part_of(scope) for name, scope in _NAME.findall(program)}


def part_of(scope: str) -> str:
  """The part that a path of scopes belongs to; the head is computed within the sampling half of a step."""
  names = re.split(r"[/()]", scope)
  return next((part for part in ("head", "attention", "mlp", "sampling") if part in names), "other")


def shares(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
  """Nanoseconds by part between start and end: each moment belongs to the span that began last of those that last
  still, and to the host where there is none."""
  total = dict.fromkeys(PARTS, 0.0)
  running: list[tuple[float, float, str]] = []  # (−start, end, part): a heap, the latest first
  edges = sorted({start, end, *(t for s in spans for t in (s.start, s.end) if start < t < end)})
  waiting = sorted((s for s in spans if s.start < end and s.end > start), reverse=True)
  for now, then in itertools.pairwise(edges):
    while waiting and waiting[-1].start <= now:
      span = waiting.pop()
      heapq.heappush(running, (-span.start, span.end, span.part))
    while running and running[0][1] <= now:
      heapq.heappop(running)
    total[running[0][2] if running else "host"] += then - now
  return total


def _read(profile: Any, part: dict[str, str]) -> list[dict[str, float]]:
  """Milliseconds by part of each marked call of a trace."""
  spans, calls = [], []
  for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
    if event.name == _MARK:
      calls.append((event.start_ns, event.end_ns))
    elif event.name == _EXECUTION or (event.name in part and not event.name.startswith("end: ")):
      spans.append(Span(event.start_ns, event.end_ns, part.get(event.name, "other")))
  return [{name: ns / 1e6 for name, ns in shares(spans, *call).items()} for call in calls]


def _named(model: Model) -> Model:
  return Model(model.forward, _scoped("head", model.head))


def _scoped(name: str, function: Any) -> Any:
  def scoped(*arguments: Any) -> Any:
    with jax.named_scope(name):
      return function(*arguments)

  return scoped
