"""Records what transformers computes with the default model, as reference values for tests/golden_test.py.

Usage: python tests/golden/record.py --model hf [--out tests/golden]   (extra `parity`; four minutes on two cores)

`--model` is a Hugging Face directory of SmolLM2-135M-Instruct with the weights of the registered GGUF file, as
`AutoModelForCausalLM.from_pretrained(folder, gguf_file=...)` reads and `save_pretrained` writes them. Everything is
float32 on CPU, one prompt at a time. Writes
  greedy_smollm2.json  the prompts, their ids, 64 greedy ids and 65 top-2 margins each
  logits_smollm2.npz   [P, 65, ·] logits: after the prompt, then after each of the 64 greedy ids; of 256 ids chosen at
                       random for each prompt, and of the 8 largest at each step
"""

import argparse
import json
from pathlib import Path

import numpy as np

STEPS, SUBSET, TOP = 64, 256, 8

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
TRADES = ("baker", "miller", "smith", "weaver", "teacher", "sailor", "mason", "gardener", "clerk", "potter")


def diary() -> str:
  """A text of more than one prefill chunk, whose end can only be continued well by looking far back."""
  days = [
    f"Day {day}. The {TRADES[day % 10]} of {PLANETS[day % 8]} sold {3 * day + 2} loaves to the "
    f"{TRADES[(day + 3) % 10]} and kept {day % 5} for the road to {PLANETS[(day + 5) % 8]}."
    for day in range(1, 23)
  ]
  return "A merchant's diary.\n\n" + "\n".join(days) + "\nDay 23. The"


def ledger() -> list[dict[str, str]]:
  rows = [f"{name} owes {7 * i + 5} coins to the {TRADES[(i + 4) % 10]}." for i, name in enumerate(TRADES * 5)]
  question = "How much does the first clerk owe, and to whom?"
  return [{"role": "user", "content": "Here is a ledger.\n" + "\n".join(rows) + "\n" + question}]


def ask(*content: str) -> list[dict[str, str]]:
  """A conversation in which user and assistant take turns."""
  return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(content)]


PROMPTS = {
  "one token": "The",
  "laws": "The three laws of thermodynamics are",
  "story": "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who",
  "list": "1, 2, 3, 5, 8, 13,",
  "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
  "markup": '<!DOCTYPE html>\n<html>\n  <head>\n    <meta charset="utf-8">\n    <title>',
  "chinese": "中国的首都是",
  "japanese": "日本で一番高い山は富士山です。",
  "chat ends": ask("What is the capital of France? Answer in one word."),
  "chat": ask("Write a short poem about the sea."),
  "chat system": [{"role": "system", "content": "You answer like a pirate."}, *ask("Who are you?")],
  "chat turns": ask("Hi!", "Hello! How can I help?", "What is 12 * 12?"),
  "long": diary(),
  "long chat": ledger(),
}


def encode(tokenizer, prompt: str | list[dict[str, str]]) -> list[int]:
  if isinstance(prompt, str):
    return tokenizer.encode(prompt)
  text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
  return tokenizer.encode(text, add_special_tokens=False)


def greedy(model, ids: list[int]) -> tuple[list[int], np.ndarray]:
  """64 greedy ids, end tokens passed over, and logits [65, V] after the prompt and after each of them."""
  import torch

  out = model.generate(
    torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
    max_new_tokens=STEPS + 1, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
  )  # fmt: skip
  return out.sequences[0, len(ids) : -1].tolist(), torch.stack(out.logits)[:, 0].numpy()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", required=True)
  parser.add_argument("--out", type=Path, default=Path(__file__).parent)
  flags = parser.parse_args()
  import torch
  import transformers
  from tokenizers import pre_tokenizers

  tokenizer = transformers.AutoTokenizer.from_pretrained(flags.model)
  # The published rule that cuts digits apart first; transformers' conversion from GGUF drops it.
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
  draw = np.random.default_rng(0)
  rows, subset_ids, subset_logits, top_ids, top_logits = [], [], [], [], []
  for name, prompt in PROMPTS.items():
    ids = encode(tokenizer, prompt)
    written, logits = greedy(model, ids)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    top = np.take_along_axis(logits, order, axis=1)
    assert order[:-1, 0].tolist() == written
    chosen = np.sort(draw.choice(logits.shape[1], SUBSET, replace=False))
    margins = [round(float(margin), 5) for margin in top[:, 0] - top[:, 1]]
    rows.append({"name": name, "prompt": prompt, "ids": ids, "greedy": written, "margins": margins})
    for kept, values in zip((subset_ids, subset_logits, top_ids, top_logits), (chosen, logits[:, chosen], order, top)):
      kept.append(values)
    print(f"{name}: {len(ids)} ids, smallest margin {min(margins):.4f}, {tokenizer.decode(written)!r}")
  record = {
    "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on CPU",
    "end": tokenizer.eos_token_id,
    "rows": rows,
  }
  text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).replace('{"name"', '\n{"name"')
  (flags.out / "greedy_smollm2.json").write_text(text + "\n", "utf-8")
  np.savez_compressed(
    flags.out / "logits_smollm2.npz",
    subset_ids=np.stack(subset_ids).astype(np.uint16),
    subset_logits=np.stack(subset_logits),
    top_ids=np.stack(top_ids).astype(np.uint16),
    top_logits=np.stack(top_logits),
  )


if __name__ == "__main__":
  main()
