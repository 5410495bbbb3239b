"""Which ids ask a code model for the text between two texts (fill in the middle)?

Models that learned it (Bavarian et al. 2022, arXiv:2207.14255) mark the parts by tokens of their own; a family is the
texts of those tokens and the order of the parts. What may follow the answer, an end token or the next file of a
repository, ends it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from decoder.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Infill:
  """A prompt: the model writes what belongs between `prefix` and `suffix`."""

  prefix: str
  suffix: str


class Family(NamedTuple):
  """Texts of tokens. middle: None where the answer follows the prefix itself, the suffix then comes first.
  ends: tokens that models of the family write after their answer."""

  prefix: str
  suffix: str
  middle: str | None
  ends: tuple[str, ...] = ()


FAMILIES = {
  "StarCoder, Granite": Family(
    "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>")
  ),
  "SantaCoder": Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
  "Qwen2.5-Coder, CodeGemma": Family(
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
  ),
  "Code Llama": Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
  "DeepSeek-Coder": Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),
  "Codestral": Family("[PREFIX]", "[SUFFIX]", None),
}


def find_family(tokenizer: Tokenizer) -> Family:
  """The family whose tokens the tokenizer has. ValueError, with the tokens looked for, where it has none's."""
  for family in FAMILIES.values():
    marks = (family.prefix, family.suffix, family.middle)
    if all(tokenizer.find(mark) is not None for mark in marks if mark is not None):
      return family
  looked_for = "; ".join(f"{name}: {' '.join(filter(None, family[:3]))}" for name, family in FAMILIES.items())
  raise ValueError(
    f"this model has no tokens for filling in the middle; looked for {looked_for}; "
    "take a model that has them, or complete the prefix alone"
  )


def infill_ids(tokenizer: Tokenizer, prompt: Infill, add_bos: bool | None = None) -> list[int]:
  """The ids of a prompt: prefix, suffix, then the middle's mark; suffix first where the family has no such mark."""
  family = find_family(tokenizer)
  # What precedes the prefix is unseen code or nothing: it is read as a text of its own. The suffix goes on in a line.
  prefix = [tokenizer.find(family.prefix), *tokenizer.encode(prompt.prefix, add_bos=False, add_eos=False)]
  suffix = [tokenizer.find(family.suffix), *tokenizer.encode_inside(prompt.suffix)]
  parts = [*suffix, *prefix] if family.middle is None else [*prefix, *suffix, tokenizer.find(family.middle)]
  wants_bos = tokenizer.adds_bos if add_bos is None else add_bos
  if wants_bos and tokenizer.bos_id is None:
    raise ValueError("add_bos=True, but this tokenizer has no BOS token; leave it out")
  return [tokenizer.bos_id, *parts] if wants_bos else parts


def infill_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
  """Ids that end an answer: the family's ends, and its marks, which begin another document."""
  family = find_family(tokenizer)
  marks = (*family.ends, family.prefix, family.suffix, family.middle)
  ids = [tokenizer.find(mark) for mark in marks if mark is not None]
  return tuple(dict.fromkeys(token for token in ids if token is not None))
