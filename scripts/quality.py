"""Compares formats of weights with float32: logits and next-token laws, each token read from the text itself.

Usage:
  python scripts/quality.py --model model.gguf --text book.txt --formats int8,q8_0,q4_0,q4_1
  python scripts/quality.py --model q4_1.gguf --text book.txt --formats keep         # the file's bits and their floats
  python scripts/quality.py --model f32.gguf --text book.txt --formats q4_1.gguf     # a file, kept as it is

--model is read in float32. A format is one of --weights, or another checkpoint of the same model. Prints a table:
  format       max error   mean error    mean KL     max KL  same choice  tokens
  q8_0              0.12        0.014    0.00021      0.011       99.1 %    2048
"""

from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "The reference, as in generate.py.")
flags.DEFINE_string("text", None, "A text file, or several joined by commas.")
flags.DEFINE_list("formats", ["int8", "q8_0", "q4_0", "q4_1"], "What to compare.")
flags.DEFINE_integer("tokens", 2048, "How much of the text is read.")


def main() -> None:
  if FLAGS.text is None:
    raise ValueError("--text is missing; see --help")
  text = "\n".join(Path(name).expanduser().read_text(encoding="utf-8") for name in FLAGS.text.split(","))
  import decoder
  from decoder.measure.quality import compare

  reference = decoder.load(FLAGS.model, dtype="float32")
  ids = reference.encode(text, add_bos=False)[: FLAGS.tokens]
  columns = ("max error", "mean error", "mean KL", "max KL", "same choice", "tokens")
  print(f"{'format':20s}", *(f"{name:>11s}" for name in columns), flush=True)
  for name in FLAGS.formats:
    known = name in entry.WEIGHTS
    other = decoder.load(FLAGS.model if known else name, dtype="float32", weights=name if known else "keep")
    if other.network.vocab_size != reference.network.vocab_size:
      raise ValueError(f"{name} has {other.network.vocab_size} ids, {FLAGS.model} {reference.network.vocab_size}")
    q = compare(reference, other, ids)
    numbers = (f"{x:11.3g}" for x in (q.max_error, q.mean_error, q.mean_kl, q.max_kl))
    print(f"{name[-20:]:20s}", *numbers, f"{100 * q.same_choice:9.1f} %", f"{q.tokens:11d}", flush=True)


if __name__ == "__main__":
  entry.run(main)
