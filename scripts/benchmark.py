"""Measures decoding on this machine.

Usage:
  python scripts/benchmark.py --peer_line --model WORK/hf        # the line that shared/peers/race.py reads
  python scripts/benchmark.py --capacities 256,8192              # does a step cost more in a larger cache?

--peer_line prints one JSON line: tpot_ms, stream_tpot_ms, ttft_ms, prefill512_ms, batch8_tokens_per_s, ...
--capacities alternates caches of these sizes over the same tokens and prints each median and the ratio to the first.
"""

import json
import statistics

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_bool("peer_line", False, "Do the work of shared/peers and print one JSON line.")
flags.DEFINE_list("batches", ["8", "32"], "Rows decoded together, for --peer_line.")
flags.DEFINE_list("capacities", [], "Cache sizes to compare, in tokens.")
flags.DEFINE_integer("rounds", 5, "Alternating rounds, for --capacities.")
flags.adopt_module_key_flags(entry)

PROMPT = (
  "The history of the city begins with a small settlement near the river, where traders met and boats were built. "
)


def main() -> None:
  if not FLAGS.peer_line and not FLAGS.capacities:
    raise ValueError("nothing to measure: give --peer_line or --capacities")
  capacities = [int(size) for size in FLAGS.capacities]
  lm = entry.load({})
  ids = lm.encode(PROMPT)
  if FLAGS.peer_line:
    from decoder.measure.latency import peer_line

    print(json.dumps(peer_line(lm, ids, batches=[int(rows) for rows in FLAGS.batches])), flush=True)
  if capacities:
    compare_capacities(lm, ids, capacities)


def compare_capacities(lm, ids, capacities: list[int]) -> None:
  from decoder.measure.latency import STEPS, decode_times

  runs = {capacity: [] for capacity in capacities}
  for number in range(FLAGS.rounds + 1):
    for capacity, medians in runs.items():
      times = decode_times(lm, ids, 1, 129, steps=STEPS, capacity=capacity)
      if number:  # the first round compiles and touches
        medians.append(statistics.median(times[1:]))
  first = runs[capacities[0]]
  for capacity, medians in runs.items():
    ratio = statistics.median(m / f for m, f in zip(medians, first))
    print(f"capacity {capacity:6d}: {statistics.median(medians):7.2f} ms a token, {ratio:.3f} × the first", flush=True)


if __name__ == "__main__":
  entry.run(main)
