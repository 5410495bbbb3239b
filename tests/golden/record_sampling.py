"""Records what transformers' logits processors leave, for `tests/sampling/presets_test.py`.

Usage (an environment with transformers 5.24 and torch):
  python tests/golden/record_sampling.py

Writes sampling_transformers.npz: logits [cases, V] (random, tied, and logarithms of dyadic probabilities) and what each
chain of CHAINS leaves of them, built by generate() itself from a GenerationConfig.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList

V = 16  # torch sorts up to 16 stably; beyond, which of several equals stay follows no rule
PROMPT, SAID = (1, 2, 3, 5), (1, 2, 3, 1, 2)
EOS = [7, 11]
CHAINS = {
  "temperature": dict(temperature=0.7),
  "top_k": dict(top_k=3),
  "top_k 2": dict(top_k=2),
  "top_p": dict(top_p=0.75),
  "top_p .5": dict(top_p=0.5),
  "top_p 0": dict(top_p=0.0),
  "min_p": dict(min_p=0.25),
  "typical": dict(typical_p=0.5),
  "typical .9": dict(typical_p=0.9),
  "epsilon": dict(epsilon_cutoff=0.125),
  "eta": dict(eta_cutoff=0.25),
  "repetition": dict(repetition_penalty=1.5),
  "ngram": dict(no_repeat_ngram_size=2),
  "bad words": dict(bad_words_ids=[[4], [1, 2, 3], [9, 9]]),
  "sequence bias": dict(sequence_bias=[[[6], 2.0], [[2, 8], -1.5], [[9, 9], 5.0]]),
  "min new tokens": dict(min_new_tokens=6),
  "decay": dict(exponential_decay_length_penalty=(2, 1.5)),
  "suppress": dict(suppress_tokens=[0, 5]),
  "forced end": dict(forced_eos_token_id=11, max_length=len(PROMPT) + len(SAID) + 1),
  "many": dict(
    repetition_penalty=1.2, bad_words_ids=[[2, 6]], temperature=0.8, top_k=10, top_p=0.9, min_p=0.02, typical_p=0.95,
    epsilon_cutoff=0.01, eta_cutoff=0.02,
  ),
}  # fmt: skip


def logits() -> np.ndarray:
  """Rows to try: random ones, ties, and dyadic probabilities, whose sums are exact."""
  rng = np.random.default_rng(0)
  rows = [rng.normal(size=V) * scale for scale in (0.3, 1, 3, 10)]
  rows += [np.round(rng.normal(size=V) * 2) / 2 for _ in range(3)]
  dyadic = [
    [0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [0.5, 0.125, 0.125, 0.25],
    [0.125, 0.125, 0.25, 0.25, 0.25], [0.5, 0.25, 0.0625, 0.0625, 0.0625, 0.0625],
  ]  # fmt: skip
  for probabilities in dyadic:
    placed = np.zeros(V)
    placed[rng.permutation(V)[: len(probabilities)]] = probabilities
    with np.errstate(divide="ignore"):
      rows.append(np.log(placed))
  return np.asarray(rows, np.float32)


def processors(changes: dict) -> LogitsProcessorList:
  """The list that generate() makes of these settings."""
  asked = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_length": 100, **changes}
  config = GenerationConfig(do_sample=True, eos_token_id=EOS, **asked)
  config._eos_token_tensor = torch.tensor(EOS)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
  )
  return model._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu")


def main() -> None:
  given = logits()
  tokens = torch.tensor([PROMPT + SAID])
  left = {}
  for name, changes in CHAINS.items():
    chain = processors(changes)
    left[name] = np.stack([chain(tokens, torch.tensor(row[None]))[0].numpy() for row in given]).astype(np.float32)
  about = {"transformers": transformers.__version__, "torch": torch.__version__, "chains": CHAINS}
  about |= {"prompt": PROMPT, "said": SAID, "eos": EOS}
  target = Path(__file__).parent / "sampling_transformers.npz"
  np.savez_compressed(target, logits=given, about=json.dumps(about), **{f"left {name}": x for name, x in left.items()})
  print(f"{target}: {len(left)} chains on {len(given)} rows")


if __name__ == "__main__":
  main()
