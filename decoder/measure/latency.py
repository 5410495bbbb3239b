"""How long does decoding take? Times of the first token, of each further one, and of batches, compilation apart."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from decoder.generate import LM

STEPS = 16  # tokens a call while the fused loop is timed: enough to hide the call, few enough for a median


def decode_times(lm: LM, ids: Sequence[int], rows: int, tokens: int, *, steps: int, capacity: int) -> list[float]:
  """Decodes `tokens` greedy tokens a row after reading `ids`, the end of text ignored.

  Returns milliseconds: first that of the prompt with its first token, then, call by call of `steps` steps, those of one
  step. Everything is compiled before.
  """
  decoding = lm.start(
    [lm.request(list(ids), max_new_tokens=tokens, ignore_eos=True) for _ in range(rows)], capacity=capacity
  )
  times, done = [], 1
  start = time.perf_counter()
  decoding.advance(1)
  times.append((time.perf_counter() - start) * 1e3)
  while not decoding.done:
    count = min(steps, tokens - done)
    start = time.perf_counter()
    decoding.advance(count)
    times.append((time.perf_counter() - start) * 1e3 / count)
    done += count
  return times


def peer_line(lm: LM, ids: Sequence[int], *, capacity: int = 512, batches: Sequence[int] = (8, 32)) -> dict[str, Any]:
  """The work that the scripts in shared/peers do: 128 greedy tokens after a short prompt, 512 prompt tokens, batches.

  tpot_ms: median of a step in the fused loop; stream_tpot_ms: of a step when each token goes to the host; ttft_ms,
  prefill512_ms: until the first token is there; batchN_tokens_per_s: N rows decoded together, prompt excluded.
  """
  decode_times(lm, ids, 1, 2 * STEPS, steps=STEPS, capacity=capacity)  # touches every weight and program once
  fused = decode_times(lm, ids, 1, 129, steps=STEPS, capacity=capacity)
  streamed = decode_times(lm, ids, 1, 65, steps=1, capacity=capacity)
  line = {
    "tpot_ms": statistics.median(fused[1:]),
    "stream_tpot_ms": statistics.median(streamed[1:]),
    "ttft_ms": min(fused[0], streamed[0]),
  }
  long = [5 + 7 * i % 40000 for i in range(512)]
  reads = [decode_times(lm, long, 1, 1, steps=1, capacity=1024)[0] for _ in range(3)]
  line["prefill512_ms"] = statistics.median(reads[1:])
  for rows in batches:
    tokens = 33 if rows < 32 else 13
    decode_times(lm, ids, rows, 3, steps=2, capacity=capacity)
    times = decode_times(lm, ids, rows, tokens, steps=4, capacity=capacity)
    line[f"batch{rows}_tokens_per_s"] = rows * 1e3 / statistics.median(times[1:])
  return line
