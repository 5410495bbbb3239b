"""Trains a head that drafts for a model: it guesses the next tokens, and the model judges all guesses in one pass.

  python scripts/distill.py --out run                         # for the default model
  python scripts/generate.py --prompt "Hello" --speculate head:run/head

First the model writes texts, which follow the prompts of --seeds, templates and topics; then the head learns from its
law at each token of them. Either is gone on with when started again with the same flags. In --out: texts/, the texts
and the model's features; plan.json, what the run depends on; log.jsonl and loss.png, the loss and the share of guesses
that would be kept, over texts held out; state/, of Orbax; at the end head/. Needs `pip install 'decoder[train]'`.
"""

import dataclasses
import json
import time
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
flags.DEFINE_enum("head_weights", "q8_0", ["float", *entry.WEIGHTS[1:]], "How the head is stored.")
flags.DEFINE_string("seeds", str(Path(__file__).with_name("prompts") / "seeds.json"), "JSON file of templates, topics.")
flags.DEFINE_string("out", None, "Directory of the run.")
flags.DEFINE_integer("written", 2560, "Texts that the model writes.")
flags.DEFINE_integer("length", 256, "Tokens of a text, prompt included.")
flags.DEFINE_integer("rows", 32, "Texts written at once.")
flags.DEFINE_integer("steps", 800, "Steps in all; the learning rate falls to 0 by the last.")
flags.DEFINE_integer("tokens", 6144, "Tokens that the head may draft, the most frequent ones.")
flags.DEFINE_integer("guesses", 2, "Guesses ahead that it learns.")
flags.DEFINE_float("fade", 0.8, "How much each further guess counts, of the one before it.")
flags.DEFINE_integer("texts", 16, "Texts in a step.")
flags.DEFINE_float("rate", 2e-3, "Highest learning rate.")
flags.DEFINE_integer("warm_up", 100, "Steps until it is reached.")
flags.DEFINE_integer("held_out", 64, "Texts that are not trained on.")
flags.DEFINE_integer("every", 100, "Steps between two looks at them; then, too, the run is kept.")
flags.DEFINE_integer("seed", 0, "Of prompts, texts, weights and order.")


def main() -> None:
  if FLAGS.out is None:
    raise ValueError("--out is missing; see --help")
  from decoder.measure import plots
  from decoder.training import distillation, gathering, loop

  plots.check()
  plan = distillation.Plan(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(distillation.Plan)})
  seeds = json.loads(Path(FLAGS.seeds).read_text(encoding="utf-8"))
  lm, out = entry.load({}), Path(FLAGS.out)
  prompts = (
    lm.encode([{"role": "user", "content": text}])
    for text in gathering.filled(seeds["templates"], seeds["topics"], FLAGS.seed)
  )
  texts = gathering.gather(
    lm.network, lm.params, lm.ends, prompts, out / "texts", texts=FLAGS.written, length=FLAGS.length, rows=FLAGS.rows,
    seed=FLAGS.seed,
  )  # fmt: skip
  weights = None if FLAGS.head_weights == "float" else FLAGS.head_weights
  gathered, start = gathering.seconds(out / "texts"), time.perf_counter()
  head = distillation.train(plan, texts, lm.network, lm.params, lm.config, lm.ends, out, weights=weights)
  log = loop.read_log(out)
  plots.draw_training(log, out / "loss.png")
  last = log[-1]
  print(
    f"{head}: {len(texts.ids_NL):,} texts, written in {gathered / 60:.1f} minutes; {last['step']} steps, "
    f"{(time.perf_counter() - start) / 60:.1f} minutes; of first guesses {last['kept_1']:.0%} are kept at temperature "
    f"1, held out; drawn in {out / 'loss.png'}"
  )


if __name__ == "__main__":
  entry.run(main)
