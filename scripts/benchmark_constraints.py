"""What a constraint adds to the time of a token, one row.

Usage:
  python scripts/benchmark_constraints.py --rounds 20

Constrained and free steps alternate within each round, 16 at a time: free ones in one device call, and, streamed token
by token, in a call each. What a constraint costs is its ratio to the first; what its masks cost is nearly its ratio to
the second, since a constrained step is at least a call.
"""

import statistics
import time
from typing import Any

import entry
import jax
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_integer("rounds", 20, "Alternating rounds; medians count.")
flags.adopt_module_key_flags(entry)

TOKENS = 16
PERSON = {
  "type": "object",
  "properties": {
    "name": {"type": "string", "minLength": 20, "maxLength": 30},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "likes": {"enum": ["books", "music", "walking"]},
  },
  "required": ["name", "age", "likes"],
  "additionalProperties": False,
}
CONSTRAINTS = {
  "JSON schema": dict(json_schema={"type": "array", "items": PERSON, "minItems": 40}),
  "regular expression": dict(regex="[A-Za-z ,.]{4000,6000}"),
}


def main() -> None:
  lm = entry.load({})
  for name, constraint in CONSTRAINTS.items():
    free, streamed, held = begin(lm), begin(lm), begin(lm, **constraint)
    rounds = []
    for number in range(FLAGS.rounds + 1):
      times = [step(free, TOKENS), step(streamed, 1), step(held, TOKENS)]
      if number:  # the first touches
        rounds.append(times)
    ms = [statistics.median(times) for times in zip(*rounds)]
    ratios = [statistics.quantiles([times[2] / times[other] for times in rounds]) for other in (0, 1)]
    print(f"{name}: free {ms[0]:.1f} ms, a call a token {ms[1]:.1f} ms, constrained {ms[2]:.1f} ms", end="; ")
    print(" and ".join(f"{median:.3f} ({low:.3f}–{high:.3f})" for low, median, high in ratios), "times", flush=True)


def begin(lm: Any, **constraint: Any) -> Any:
  """A decoding that has read a prompt."""
  tokens = TOKENS * (FLAGS.rounds + 1) + 1
  decoding = lm.start([lm.request("Some people, as JSON:\n", max_new_tokens=tokens, ignore_eos=True, **constraint)])
  decoding.advance(1)
  return decoding


def step(decoding: Any, at_once: int) -> float:
  """Milliseconds a token, over TOKENS of them."""
  start, drawn = time.perf_counter(), len(decoding.readers[0].token_ids)
  while (left := drawn + TOKENS - len(decoding.readers[0].token_ids)) > 0:
    decoding.advance(min(at_once, left))
  jax.block_until_ready(decoding.state.length_B)
  return (time.perf_counter() - start) * 1e3 / TOKENS


if __name__ == "__main__":
  entry.run(main)
