"""How long do first and further tokens take, over a grid of batches, prompts, positions, capacities and formats?

A point is measured as a user meets it, through `LM.start`: a prompt is read, then tokens are decoded greedily, half of
them in the fused loop and half one call a token, as a stream does, in turns. Rounds go over all points of a format, so
that a machine's moods meet all alike; the first round compiles and touches, and does not count.
"""

import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder.cache import Cache, Codec, LayerSpec, Raw, allocate
from decoder.decoding import Decoding
from decoder.generate import LM
from decoder.measure import roofline
from decoder.measure.latency import timed
from decoder.measure.machine import forget_peak, peak_memory
from decoder.models.registry import Network
from decoder.programs import SMALLEST_CAPACITY, bucket
from decoder.reader import Request

CODECS: dict[str, Codec] = {name: Raw(jnp.dtype(name), bits=True) for name in ("float32", "bfloat16", "float16")}
BLOCK = 8  # steps in one call of the fused loop, then as many calls of one


@dataclasses.dataclass(frozen=True)
class Point:
  """weights: a name for what the model holds them in. cache: one of CODECS. batch: rows. prompt: tokens of each row's
  prompt, for the first token's time. position: tokens that each row holds already when decoding is measured.
  capacity: tokens a row's cache has room for."""

  weights: str
  cache: str
  batch: int
  prompt: int
  position: int
  capacity: int


class Axes(NamedTuple):
  """Values to combine. None
  of caches: the type of compute; of positions: right after the prompt; of capacities: the smallest that suffices."""

  caches: Sequence[str]
  batches: Sequence[int]
  prompts: Sequence[int]
  positions: Sequence[int] = ()
  capacities: Sequence[int] = ()


class Sample(NamedTuple):
  """One run of a point, milliseconds: fused, of a step, call by call; single, of each step that was a call."""

  ttft: float
  fused: list[float]
  single: list[float]
  compile_s: float
  peak_bytes: int


def points(weights: str, axes: Axes, tokens: int, network: Network | None = None) -> list[Point]:
  """All combinations of the axes, sensible or not (see `objection`). network: None where it is not known yet.

  Raises ValueError for an unknown cache format.
  """
  for name in axes.caches:
    if name not in CODECS:
      raise ValueError(f"--caches knows {', '.join(CODECS)}, got {name!r}")
  largest, native = (network.context, jnp.dtype(network.dtype).name) if network else (sys.maxsize, "float32")
  made = []
  for cache, batch, prompt in itertools.product(axes.caches or (native,), axes.batches, axes.prompts):
    for position in axes.positions or (prompt,):
      needed = max(prompt + 1, position + tokens + 1)
      for capacity in axes.capacities or (min(bucket(needed, SMALLEST_CAPACITY), largest),):
        made.append(Point(weights, cache, batch, prompt, position, capacity))
  return made


def say(point: Point) -> str:
  """A point in words."""
  return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(point).items())


def objection(point: Point, tokens: int, network: Network | None = None) -> str | None:
  """Why a point cannot be measured, or None."""
  longest, what = max(
    (point.prompt + 1, f"--prompts {point.prompt} and a new token"),
    (point.position + tokens + 1, f"--positions {point.position} and --tokens {tokens} + 1"),
  )
  if longest > point.capacity:
    return f"{what} do not fit --capacities {point.capacity}"
  if network is not None and max(longest, point.capacity) > network.context:
    what = what if longest > network.context else f"--capacities {point.capacity}"
    return f"{what} is beyond the model's context, {network.context}"
  return None


def measure(
  lm: LM, chosen: Iterable[Point], *, tokens: int, rounds: int, on_run: Callable[[], Any]
) -> list[dict[str, Any]]:
  """One dict of plain figures a point, see `figures`.

  tokens: decoded a row and run, at least 2. rounds: that count. on_run: called after every run, of which there
  are rounds + 1 a point.
  """
  samples: dict[Point, list[Sample]] = {point: [] for point in chosen}
  for _ in range(rounds + 1):
    for point, taken in samples.items():
      taken.append(run(lm, point, tokens))
      on_run()
  return [figures(lm, point, taken, tokens) for point, taken in samples.items()]


def run(lm: LM, point: Point, tokens: int) -> Sample:
  """Reads prompts and decodes `tokens` tokens a row, once."""
  forget_peak()
  goes_on = point.position == point.prompt
  first = begin(lm, point, point.prompt, tokens if goes_on else 0)
  first.advance(1)
  (timings, *_) = (result.timings for result in first.results(0.0))
  compiled = timings.compile_s
  decoding = first
  if not goes_on:  # an exact place, without reading that many tokens first
    decoding = begin(lm, point, point.position, tokens, held=point.position - 1)
    compiled += decoding.results(0.0)[0].timings.compile_s
    decoding.advance(1)
  fused, single, left = [], [], tokens
  while left:
    steps = min(BLOCK, -(-left // 2))
    fused.append(timed(lambda: decoding.advance(steps)) / steps)  # noqa: B023 (called here)
    alone = min(BLOCK, left - steps)
    single += [timed(lambda: decoding.advance(1)) for _ in range(alone)]
    left -= steps + alone
  return Sample(timings.ttft_ms, fused, single, compiled, peak_memory())


def begin(lm: LM, point: Point, length: int, tokens: int, held: int = 0) -> Decoding:
  """A batch whose rows start with `length` tokens, of which the cache holds `held`, as random vectors."""

  def request(row: int) -> Request:  # each with a prompt of its own: one that rows share would be read once
    ids = [(5 + 7 * i + row) % lm.network.vocab_size for i in range(length)]
    return lm.request(ids, max_new_tokens=tokens + 1, ignore_eos=True)

  return lm.start([request(row) for row in range(point.batch)], cache=filled(lm, point, held), held=held)


def filled(lm: LM, point: Point, held: int) -> Cache:
  """A cache of the point's format whose rows hold `held` tokens."""
  network = lm.network
  dtype = jnp.dtype(network.dtype)
  return jax.block_until_ready(
    _filled(network.cache_spec, CODECS[point.cache], bucket(point.batch), point.capacity, held, dtype)
  )


@functools.partial(jax.jit, static_argnums=range(6))
def _filled(spec: tuple[LayerSpec, ...], codec: Codec, batch: int, capacity: int, held: int, dtype: Any) -> Cache:
  cache = allocate(spec, batch, capacity, codec=codec)
  if not held:
    return cache
  positions_BT = jnp.broadcast_to(jnp.arange(held, dtype=jnp.int32), (batch, held))
  cache = cache.claim(positions_BT)
  for index, layer in enumerate(spec):
    shape = (2, batch, held, layer.kv_heads, layer.head_dim)
    k_BTKH, v_BTKH = jax.random.normal(jax.random.key(index), shape, dtype)
    cache = cache.with_layer(index, cache.layer(index).append(positions_BT, k_BTKH, v_BTKH))
  return cache


def figures(lm: LM, point: Point, samples: Sequence[Sample], tokens: int) -> dict[str, Any]:
  """A point and its figures as plain data; the first sample tells of compilation only.

  stored: see `roofline.weight_formats`. tpot_ms: median of a step in the fused loop; stream_tpot_ms and tpot_p95_ms:
  median and 95th percentile of a step that is a call of its own; tokens_per_s: of all rows, in the fused loop;
  gb_per_s: bytes_per_step in that time. peak_mb: of the process, or of the device.
  """
  counted = samples[1:]
  fused = [ms for sample in counted for ms in sample.fused]
  single = [ms for sample in counted for ms in sample.single]
  tpot, ttft = statistics.median(fused), statistics.median(sample.ttft for sample in counted)
  held = point.position + (tokens + 1) / 2  # over the measured steps, each of which reads what it has just written
  needed = roofline.step_bytes(lm.params, lm.network.cache_spec, CODECS[point.cache], point.batch, held)
  return {
    **dataclasses.asdict(point),
    "stored": roofline.weight_formats(lm.params),
    "ttft_ms": ttft,
    "prefill_tokens_per_s": 1e3 * point.batch * point.prompt / ttft,
    "tpot_ms": tpot,
    "stream_tpot_ms": statistics.median(single),
    "tpot_p95_ms": float(np.percentile(single, 95)),
    "tokens_per_s": 1e3 * point.batch / tpot,
    "gb_per_s": needed / tpot / 1e6,
    "peak_mb": max(sample.peak_bytes for sample in counted) / 1e6,
    "compile_s": samples[0].compile_s,
    "bytes_per_step": needed,
    "rounds_tpot_ms": [statistics.median(sample.fused) for sample in counted],
    "rounds_ttft_ms": [sample.ttft for sample in counted],
  }


def against(points: Sequence[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
  """The same points with limit_ms, the time that memory read at `limit` bytes a second gives a step, and of_limit, the
  share of it in the time that a step took."""
  told = []
  for point in points:
    least = 1e3 * point["bytes_per_step"] / limit
    told.append({**point, "limit_ms": least, "of_limit": least / point["tpot_ms"]})
  return told
