"""What guessing ahead gains: the time of a token without it over that with it, prompt by prompt, in turn.

Usage:
  python scripts/benchmark_speculation.py --speculate lookup --prompts scripts/prompts/copy_edit.jsonl
  python scripts/benchmark_speculation.py --speculate head --prompts scripts/prompts/chat.jsonl --temperature 0.8

Only tokens before a text ends or begins to repeat itself are scored. The last line is the median over prompts.
"""

import json
import statistics
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_string("prompts", str(Path(__file__).with_name("prompts") / "copy_edit.jsonl"), "Lines of name, prompt.")
flags.DEFINE_string("speculate", "lookup", "Who guesses, as for generate.py.")
flags.DEFINE_integer("draft_tokens", 7, "Most guesses a step: 1, 3 or 7.")
flags.DEFINE_float("temperature", 0.0, "Of both.")
flags.DEFINE_integer("seed", 1, "Of both.")
flags.DEFINE_integer("tokens", 160, "Most tokens a text.")
flags.DEFINE_integer("rounds", 3, "Times that both are measured; medians count.")
flags.DEFINE_string("json", None, "Write the figures to this file.")
flags.DEFINE_bool("peer_line", False, "End with a line of JSON, for a race with other programs.")
flags.adopt_module_key_flags(entry)


def main() -> None:
  import dataclasses

  from decoder.measure.speculation import Compared, compare

  def told(one: Compared) -> None:
    same = "the same text" if one.same else "another text"
    print(
      f"{one.name:24s} {one.tokens:4d} tokens  {one.plain_ms:6.2f} → {one.ahead_ms:6.2f} ms  {one.ratio:5.2f} ×  "
      f"{one.each:.2f} tokens a step, {one.kept:.0%} of guesses kept, {same}",
      flush=True,
    )

  lines = [json.loads(line) for line in Path(FLAGS.prompts).read_text(encoding="utf-8").splitlines()]
  lm = entry.load({})
  compared = compare(
    lm, [(line["name"], line["prompt"]) for line in lines],
    {"speculate": FLAGS.speculate, "draft_tokens": FLAGS.draft_tokens}, tokens=FLAGS.tokens, rounds=FLAGS.rounds,
    told=told, temperature=FLAGS.temperature, seed=FLAGS.seed,
  )  # fmt: skip
  if not compared:
    raise ValueError(f"no prompt of {FLAGS.prompts} led to a text of 8 tokens or more")
  ratios = [one.ratio for one in compared]
  plain, ahead = (statistics.median(getattr(one, name) for one in compared) for name in ("plain_ms", "ahead_ms"))
  print(
    f"median of {len(ratios)} prompts: {statistics.median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f}), "
    f"{plain:.2f} → {ahead:.2f} ms a token"
  )
  if FLAGS.peer_line:
    print(json.dumps({"tpot_ms": ahead, "plain_tpot_ms": plain, "gain": statistics.median(ratios)}))
  if FLAGS.json is not None:
    Path(FLAGS.json).write_text(json.dumps([dataclasses.asdict(one) for one in compared], indent=1) + "\n")


if __name__ == "__main__":
  entry.run(main)
