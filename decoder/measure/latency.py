"""How long does decoding take? Times of the first token, of each further one, and of batches, compilation apart."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from decoder.generate import LM
from decoder.measure.roofline import weight_formats

STEPS = 16  # tokens a call while the fused loop is timed: enough to hide the call, few enough for a median
NEW = 128  # tokens that the peers' scripts decode
LONG = 512  # tokens of the peers' long prompt


def timed(work: Callable[[], Any]) -> float:
  """Milliseconds that a call takes."""
  start = time.perf_counter()
  work()
  return (time.perf_counter() - start) * 1e3


def alternating(works: Mapping[Hashable, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
  """Milliseconds that each takes, called in turn `rounds` times, after a round that touches and does not count."""
  times: dict[Any, list[float]] = {name: [] for name in works}
  for number in range(rounds + 1):
    for name, work in works.items():
      taken = timed(work)
      if number:
        times[name].append(taken)
  return times


def decode_times(lm: LM, ids: Sequence[int], rows: int, tokens: int, *, steps: int, capacity: int) -> list[float]:
  """Decodes `tokens` greedy tokens a row after reading `ids`, the end of text ignored.

  Returns milliseconds: first that of the prompt with its first token, then, call by call of `steps` steps, those of one
  step. Everything is compiled before.
  """
  request = lm.request(list(ids), max_new_tokens=tokens, ignore_eos=True)
  decoding = lm.start([request] * rows, capacity=capacity)
  times, done = [timed(lambda: decoding.advance(1))], 1
  while not decoding.done:
    count = min(steps, tokens - done)
    times.append(timed(lambda: decoding.advance(count)) / count)  # noqa: B023 (called here)
    done += count
  return times


def peer_line(lm: LM, ids: Sequence[int], *, capacity: int = 512, batches: Sequence[int] = (8, 32)) -> dict[str, Any]:
  """The work that the scripts in shared/peers do: 128 greedy tokens after a short prompt, 512 prompt tokens, batches.

  tpot_ms: median of a step in the fused loop; stream_tpot_ms: of a token read from a Stream, text and all; ttft_ms,
  prefill512_ms: until the first token is there; batchN_tokens_per_s: N rows decoded together, 128 tokens each, over
  all their time but that of the prompt. weights, cache: the formats that ran, for people to read.
  """
  decode_times(lm, ids, 1, 2 * STEPS, steps=STEPS, capacity=capacity)  # touches every weight and program once
  fused = decode_times(lm, ids, 1, NEW + 1, steps=STEPS, capacity=capacity)
  line = {
    "tpot_ms": statistics.median(fused[1:]),
    "stream_tpot_ms": statistics.median(_streamed(lm, ids, capacity) for _ in range(3)),
    "ttft_ms": fused[0],
  }
  long = [(5 + 7 * i) % lm.network.vocab_size for i in range(LONG)]
  reads = [decode_times(lm, long, 1, 1, steps=1, capacity=2 * LONG)[0] for _ in range(3)]
  line["prefill512_ms"] = statistics.median(reads[1:])
  for rows in batches:
    decode_times(lm, ids, rows, 1 + STEPS, steps=STEPS, capacity=capacity)
    times = decode_times(lm, ids, rows, 1 + NEW, steps=STEPS, capacity=capacity)
    line[f"batch{rows}_tokens_per_s"] = rows * 1e3 / statistics.mean(times[1:])
  return {**line, "weights": weight_formats(lm.params), "cache": jnp.dtype(lm.network.dtype).name}


def _streamed(lm: LM, ids: Sequence[int], capacity: int) -> float:
  """Milliseconds a token, the first apart, of a stream read to its end."""
  stream = lm.stream(list(ids), max_new_tokens=NEW + 1, ignore_eos=True, capacity=capacity)
  for _ in stream:
    pass
  return stream.result.timings.tpot_ms
