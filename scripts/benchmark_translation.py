"""Encoder–decoders against transformers: the same random weights, beams and lengths, in one alternating run.

Usage:
  pip install 'decoder[parity]'
  python scripts/benchmark_translation.py                             # a Marian of opus-mt's size, 8 texts, 4 beams
  python scripts/benchmark_translation.py --family t5 --beams 1,4 --rounds 5

Writes a checkpoint of the family's base size to a temporary directory, loads it in both, and translates one batch with
a fixed number of tokens each round, after a round that is not counted. Both use two threads or as many as there are
cores, float32. Prints tokens a second of the texts that are given back, and the ratio of every round.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import entry
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_enum("family", "marian", ["marian", "t5"], "What to build.")
flags.DEFINE_list("beams", ["1", "4"], "Numbers of beams.")
flags.DEFINE_integer("batch", 8, "Texts.", lower_bound=1)
flags.DEFINE_integer("read", 32, "Tokens of each text.", lower_bound=2)
flags.DEFINE_integer("tokens", 48, "Tokens to write for each.", lower_bound=2)
flags.DEFINE_integer("rounds", 5, "Alternating rounds.", lower_bound=1)


def main() -> None:
  try:
    import torch
    from transformers import AutoModelForSeq2SeqLM
  except ImportError as error:
    raise ValueError("this compares with transformers; run: pip install 'decoder[parity]'") from error
  import decoder

  with tempfile.TemporaryDirectory() as scratch:
    build(Path(scratch))
    theirs, ours = AutoModelForSeq2SeqLM.from_pretrained(scratch).eval(), decoder.load(scratch)
  generator = torch.Generator().manual_seed(0)
  texts = torch.randint(5, 30_000, (FLAGS.batch, FLAGS.read), generator=generator)
  sizes = f"{FLAGS.batch} texts of {FLAGS.read} tokens, {FLAGS.tokens} written"
  print(f"{FLAGS.family}, {sizes}, float32, {FLAGS.rounds} rounds")
  for beams in map(int, FLAGS.beams):
    works = {
      "transformers": lambda beams=beams: by_transformers(theirs, texts, beams),
      "ours": lambda beams=beams: by_us(ours, texts.tolist(), beams),
    }
    compare(beams, works)


def compare(beams: int, works: dict[str, Any]) -> None:
  from decoder.measure.latency import alternating

  times = alternating(works, FLAGS.rounds)
  written = 1e3 * FLAGS.batch * FLAGS.tokens
  rates = {name: written / statistics.median(spent) for name, spent in times.items()}
  ratios = [a / b for a, b in zip(*times.values())]
  print(
    f"  {beams} beams: " + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())
    + f"; {statistics.median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})", flush=True,
  )  # fmt: skip


def by_us(lm: Any, texts: list[list[int]], beams: int) -> None:
  new = FLAGS.tokens
  results = lm.generate(
    texts, num_beams=beams, temperature=0.0, min_new_tokens=new, max_new_tokens=new, ignore_eos=True
  )
  assert all(len(result.token_ids) == new for result in results), "each text has its tokens"


def by_transformers(model: Any, texts: Any, beams: int) -> None:
  import torch

  with torch.inference_mode():
    out = model.generate(
      texts, attention_mask=torch.ones_like(texts), num_beams=beams, do_sample=False, min_new_tokens=FLAGS.tokens,
      max_new_tokens=FLAGS.tokens,
    )  # fmt: skip
  assert out.shape == (FLAGS.batch, FLAGS.tokens + 1), "each text has its tokens, after the start token"


def build(directory: Path) -> None:
  """A checkpoint with random weights: opus-mt's base model, or T5's."""
  import torch
  from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

  torch.manual_seed(0)
  if FLAGS.family == "marian":
    layers = {f"{half}_{name}": value for half in ("encoder", "decoder")
              for name, value in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))}  # fmt: skip
    config = MarianConfig(
      vocab_size=32_000, d_model=512, max_position_embeddings=512, activation_function="swish", scale_embedding=True,
      pad_token_id=31_999, eos_token_id=0, decoder_start_token_id=31_999, **layers,
    )  # fmt: skip
    model = MarianMTModel(config)
  else:
    config = T5Config(
      vocab_size=32_000, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
  model.save_pretrained(directory)


if __name__ == "__main__":
  entry.run(main)
