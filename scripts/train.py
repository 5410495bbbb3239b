"""Trains a translator on sentence pairs: lines of source and target with a tab between.

  python scripts/train.py --data bible/train.tsv --valid bible/valid.tsv --out run      # scripts/bible.py writes these
  python scripts/translate.py --model run/model

A run that was killed goes on where it was when started again with the same flags. In --out: plan.json, what the run
depends on; tokenizer.model, a SentencePiece vocabulary of both languages; log.jsonl and loss.png; state/, of Orbax; at
the end model/, for `decoder.load` and every script here. Takes 38 minutes on two cores; needs `pip install
'decoder[train]'`.
"""

import dataclasses
import time
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_weights_flag("float", "float", "int8", "q8_0")
flags.DEFINE_string("data", None, "TSV file to train on.")
flags.DEFINE_string("valid", None, "TSV file of held-out pairs, to watch the run by.")
flags.DEFINE_string("out", None, "Directory of the run.")
flags.DEFINE_integer("steps", 2600, "Steps in all; the learning rate falls to 0 by the last.")
flags.DEFINE_integer("vocab_size", 4000, "Pieces of the vocabulary.")
flags.DEFINE_integer("width", 192, "Features of a token.")
flags.DEFINE_integer("heads", 4, "Attention heads.")
flags.DEFINE_integer("hidden", 768, "Features between the two layers of an MLP.")
flags.DEFINE_integer("encoder_layers", 4, "Layers that read.")
flags.DEFINE_integer("decoder_layers", 3, "Layers that write.")
flags.DEFINE_integer("context", 256, "Longest text in tokens; pairs with a longer one are left out.")
flags.DEFINE_integer("batch_tokens", 4096, "Tokens of the target in a step, padding included.")
flags.DEFINE_float("rate", 2e-3, "Highest learning rate.")
flags.DEFINE_integer("warm_up", 200, "Steps until it is reached.")
flags.DEFINE_float("smoothing", 0.1, "Share of the target's probability spread over the vocabulary.")
flags.DEFINE_float("noise", 0.1, "Chance that a token shown to the decoder is hidden.")
flags.DEFINE_integer("every", 130, "Steps between two looks at the held-out pairs; then, too, the run is kept.")
flags.DEFINE_integer("seed", 0, "Of the weights, the order of the pairs and the noise.")


def main() -> None:
  for name in ("data", "valid", "out"):
    if FLAGS[name].value is None:
      raise ValueError(f"--{name} is missing; see --help")
  from decoder.measure import plots
  from decoder.training import loop, translation

  plots.check()
  plan = translation.Plan(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(translation.Plan)})
  out, start = Path(FLAGS.out), time.perf_counter()
  model = translation.train(plan, Path(FLAGS.data), Path(FLAGS.valid), out, weights=entry.weights())
  log = loop.read_log(out)
  plots.draw_training(log, out / "loss.png")
  last = log[-1]
  print(
    f"{model}: {last['step']} steps, held-out loss {last['held_out']:.3f} nats a token, "
    f"{(time.perf_counter() - start) / 60:.1f} minutes; the loss is drawn in {out / 'loss.png'}"
  )


if __name__ == "__main__":
  entry.run(main)
