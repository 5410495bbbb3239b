"""What a step of a beam search costs against a step of as many rows decoded greedily.

Usage:
  python scripts/benchmark_beams.py                        # the default model, 4 and 8 beams
  python scripts/benchmark_beams.py --weights keep --beams 4 --prompt 1000

Both go on from the same prompt and alternate within each round; a ratio is of two calls side by side. The bar is 1.15.
"""

import dataclasses
import functools
import statistics
from typing import Any

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_list("beams", ["4", "8"], "Numbers of beams, and of rows.")
flags.DEFINE_integer("prompt", 32, "Tokens of the prompt.", lower_bound=1)
flags.DEFINE_integer("rounds", 15, "Alternating rounds; medians count.", lower_bound=2)
flags.DEFINE_integer("tokens", 16, "Steps a round.", lower_bound=1, upper_bound=64)
flags.adopt_module_key_flags(entry)


def main() -> None:
  counts = [int(text) for text in FLAGS.beams]
  lm = entry.load({})
  print(f"a step after {FLAGS.prompt} tokens, V = {lm.network.vocab_size}, {FLAGS.rounds} rounds of {FLAGS.tokens}")
  for count in counts:
    compare(lm, count)


def compare(lm: Any, count: int) -> None:
  """Prints a line of medians in milliseconds, and the ratio with its quartiles."""
  from decoder.measure.latency import alternating

  running = {"rows": begin(lm, count, 1), "beams": begin(lm, 1, count)}
  works = {name: functools.partial(decoding.advance, FLAGS.tokens) for name, decoding in running.items()}
  times = alternating(works, FLAGS.rounds)
  rows, beams = (statistics.median(times[name]) / FLAGS.tokens for name in running)
  low, ratio, high = statistics.quantiles([mine / theirs for theirs, mine in zip(times["rows"], times["beams"])])
  figures = f"{count:3} rows {rows:7.2f} ms  {count:3} beams {beams:7.2f} ms  {ratio:.3f} ({low:.3f}–{high:.3f})"
  print(f"  {figures}", flush=True)


def begin(lm: Any, rows: int, beams: int) -> Any:
  """Rows that have read the prompt, each with tokens left for all rounds."""
  tokens = FLAGS.tokens * (FLAGS.rounds + 1) + 1
  ids = [(5 + 7 * i) % lm.network.vocab_size for i in range(FLAGS.prompt)]
  request = lm.request(ids, max_new_tokens=tokens, ignore_eos=True)
  searched = dataclasses.replace(request, settings=dataclasses.replace(request.settings, num_beams=beams))
  decoding = lm.start([searched] * rows)
  decoding.advance(1)
  return decoding


if __name__ == "__main__":
  entry.run(main)
