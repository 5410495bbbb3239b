"""Which tokenizer does a GGUF file describe?

Its metadata hold a vocabulary, not a tokenizer: `tokenizer.ggml.model` names the algorithm and `tokenizer.ggml.pre` the
rule that cuts text into words. Both are rewritten as the files that the libraries read (tokenizer.json,
tokenizer.model). Key names and token types: the GGUF specification; rules by name: the published tokenizer.json of the
models named.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from decoder.text.config import TURN_ENDS
from decoder.text.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_piece_proto

_PREFIX = "tokenizer.ggml."
_NAMES = {
  "bos": "bos",
  "eos": "eos",
  "eot": "eot",
  "eom": "eom",
  "unknown": "unk",
  "separator": "sep",
  "padding": "pad",
  "cls": "cls",
  "mask": "mask",
}


class _Cut(NamedTuple):
  """How text is cut before BPE: regular expressions one after the other, each isolating its matches."""

  patterns: tuple[str, ...]
  adds_bos: bool = False
  ignore_merges: bool = False
  normalizer: str | None = None


_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
  return (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
  )


def _o200k(digits: str, ending: str) -> str:
  upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
  start = r"[^\r\n\p{L}\p{N}]?"
  words = rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
  return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_BY_FAMILY = {
  ("default",): _Cut((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
  ("gpt-2", "gpt2", "phi-2", "mpt", "olmo"): _Cut((_GPT2,)),
  ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): _Cut((r"\p{N}", _GPT2)),
  ("llama-bpe", "llama3", "llama-v3", "falcon3"): _Cut((_cl100k(r"\p{N}{1,3}"),), adds_bos=True, ignore_merges=True),
  ("dbrx", "smaug-bpe"): _Cut((_cl100k(r"\p{N}{1,3}"),)),
  ("qwen2", "deepseek-r1-qwen"): _Cut((_cl100k(r"\p{N}"),), normalizer="NFC"),
  ("stablelm2",): _Cut((_cl100k(r"\p{N}"),)),
  ("qwen35",): _Cut((_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),), normalizer="NFC"),
  ("gpt-4o", "llama4"): _Cut((_o200k(r"\p{N}{1,3}", rf"(?i:{_CONTRACTIONS})?"),)),
  ("tekken",): _Cut((_o200k(r"\p{N}", ""),), adds_bos=True, ignore_merges=True),
}
_CUTS = {name: cut for names, cut in _BY_FAMILY.items() for name in names}


def files_from_gguf(metadata: Mapping[str, Any]) -> dict[str, bytes]:
  """The tokenizer files that mean the same as the `tokenizer.*` keys. Raises ValueError for what is unknown or
  missing.
  """
  model = metadata.get(_PREFIX + "model")
  makers = {"gpt2": _bpe_files, "llama": _piece_files, "t5": _piece_files}
  if model not in makers:
    raise ValueError(
      f"{_PREFIX}model: wanted one of {', '.join(sorted(makers))}, got {model!r}; "
      "load the tokenizer.json of the original checkpoint with load_tokenizer"
    )
  tokens = metadata.get(_PREFIX + "tokens")
  if not tokens:
    raise ValueError(f"{_PREFIX}tokens: the file has no vocabulary; use a GGUF file of the whole model")
  types = [int(kind) for kind in metadata.get(_PREFIX + "token_type") or [NORMAL] * len(tokens)]
  if len(types) != len(tokens):
    raise ValueError(
      f"{_PREFIX}token_type: wanted {len(tokens)} entries as in tokens, got {len(types)}; the file is damaged"
    )
  named = _named_ids(metadata, len(tokens))
  for index, text in enumerate(tokens):
    if types[index] == NORMAL and text in TURN_ENDS:
      types[index] = CONTROL  # converters have written ends of a turn as plain tokens
  files = makers[model](metadata, list(tokens), types, named)
  template = metadata.get("tokenizer.chat_template")
  return files | ({"chat_template.jinja": template.encode("utf-8")} if template else {})


def _named_ids(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
  named = {}
  for key, name in _NAMES.items():
    index = metadata.get(f"{_PREFIX}{key}_token_id")
    if index is None or index in (-1, 0xFFFFFFFF):  # both are written for "none"
      continue
    if not 0 <= index < size:
      raise ValueError(f"{_PREFIX}{key}_token_id: wanted 0 <= id < {size}, got {index}; the file is damaged")
    named[name] = int(index)
  return named


def _config(metadata, tokens, named, *, kind: str, adds_bos: bool, adds_eos: bool = False) -> dict[str, Any]:
  return {
    "tokenizer_class": kind,
    "add_bos_token": bool(_value(metadata, "add_bos_token", adds_bos)) and "bos" in named,
    "add_eos_token": bool(_value(metadata, "add_eos_token", adds_eos)) and "eos" in named,
    **{f"{name}_token": tokens[index] for name, index in named.items()},
  }


def _value(metadata: Mapping[str, Any], key: str, default: Any) -> Any:
  value = metadata.get(_PREFIX + key)
  return default if value is None else value


def _bpe_files(metadata, tokens: list[str], types: list[int], named: dict[str, int]) -> dict[str, bytes]:
  name = _value(metadata, "pre", "default")
  if name not in _CUTS:
    raise ValueError(
      f"{_PREFIX}pre: {name!r} is not known, known are {', '.join(sorted(_CUTS))}; "
      "load the tokenizer.json of the original checkpoint with load_tokenizer"
    )
  cut = _CUTS[name]
  while types and types[-1] == UNUSED:  # padding of the embedding's rows, no tokens
    types.pop()
  for role in ("bos", "eos", "eot", "eom"):
    if role in named and types[named[role]] == NORMAL:
      types[named[role]] = CONTROL
  vocabulary: dict[str, int] = {}
  for index, text in enumerate(tokens[: len(types)]):
    vocabulary.setdefault(text, index)
  config = _config(metadata, tokens, named, kind="PreTrainedTokenizerFast", adds_bos=cut.adds_bos)
  source = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      _added_token(index, tokens[index], kind)
      for index, kind in enumerate(types)
      if kind in (CONTROL, UNKNOWN, USER_DEFINED) and vocabulary[tokens[index]] == index and tokens[index]
    ],
    "normalizer": {"type": cut.normalizer} if cut.normalizer else None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_split, cut.patterns), _byte_level()]},
    "post_processor": _affixes(tokens, named, config),
    "decoder": _byte_level(),
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": cut.ignore_merges,
      "vocab": vocabulary,
      "merges": _merges(metadata),
    },
  }
  return {"tokenizer.json": _to_bytes(source), "tokenizer_config.json": _to_bytes(config)}


def _merges(metadata: Mapping[str, Any]) -> list[list[str]]:
  merges = metadata.get(_PREFIX + "merges")
  if merges is None:
    raise ValueError(f"{_PREFIX}merges: a BPE vocabulary without merges; convert the model to GGUF again")
  pairs = [merge.split(" ") for merge in merges]
  for merge, pair in zip(merges, pairs):
    if len(pair) != 2:
      raise ValueError(f"{_PREFIX}merges: wanted two tokens and a space, got {merge!r}; the file is damaged")
  return pairs


def _added_token(index: int, text: str, kind: int) -> dict[str, Any]:
  return {
    "id": index,
    "content": text,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": kind != USER_DEFINED,
  }


def _split(pattern: str) -> dict[str, Any]:
  return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level() -> dict[str, Any]:
  return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _affixes(tokens: Sequence[str], named: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, Any] | None:
  """The post-processor that other readers of tokenizer.json follow; ours reads add_bos_token and add_eos_token."""
  before = ["bos"] if config["add_bos_token"] else []
  after = ["eos"] if config["add_eos_token"] else []
  if not before and not after:
    return None
  special = {tokens[named[role]]: named[role] for role in before + after}

  def template(*sequences: tuple[str, int]) -> list[dict[str, Any]]:
    items = []
    for name, kind in sequences:
      items += [{"SpecialToken": {"id": tokens[named[role]], "type_id": kind}} for role in before]
      items.append({"Sequence": {"id": name, "type_id": kind}})
      items += [{"SpecialToken": {"id": tokens[named[role]], "type_id": kind}} for role in after]
    return items

  return {
    "type": "TemplateProcessing",
    "single": template(("A", 0)),
    "pair": template(("A", 0), ("B", 1)),
    "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in special.items()},
  }


def _piece_files(metadata, tokens: list[str], types: list[int], named: dict[str, int]) -> dict[str, bytes]:
  scores = metadata.get(_PREFIX + "scores")
  if scores is None or len(scores) != len(tokens):
    raise ValueError(
      f"{_PREFIX}scores: wanted {len(tokens)} entries as in tokens, got {0 if scores is None else len(scores)}; "
      "the file is damaged"
    )
  unigram = metadata[_PREFIX + "model"] == "t5"
  if UNKNOWN not in types:
    types[named.get("unk", 0)] = UNKNOWN  # SentencePiece wants exactly one
  model = read_piece_proto().ModelProto()
  seen: set[str] = set()
  for index, (text, score, kind) in enumerate(zip(tokens, scores, types)):
    if not text or text in seen:  # SentencePiece refuses both
      text, kind = f"<unused piece {index}>", UNUSED
    seen.add(text)
    model.pieces.add(piece=text, score=score, type=kind)
  trainer = model.trainer_spec
  trainer.model_type = trainer.UNIGRAM if unigram else trainer.BPE
  trainer.byte_fallback = BYTE in types
  trainer.vocab_size = len(tokens)
  for role in ("unk", "bos", "eos", "pad"):
    setattr(trainer, f"{role}_id", named.get(role, -1))
    if role in named:
      setattr(trainer, f"{role}_piece", tokens[named[role]])
  trainer.unk_piece = tokens[types.index(UNKNOWN)]
  trainer.unk_id = types.index(UNKNOWN)
  normalizer = model.normalizer_spec
  normalizer.name = "nmt_nfkc" if unigram else "identity"
  normalizer.add_dummy_prefix = bool(_value(metadata, "add_space_prefix", True))
  normalizer.remove_extra_whitespaces = bool(_value(metadata, "remove_extra_whitespaces", False))
  normalizer.precompiled_charsmap = bytes(byte & 0xFF for byte in _value(metadata, "precompiled_charsmap", b""))
  config = _config(
    metadata, tokens, named, kind="T5Tokenizer" if unigram else "LlamaTokenizer", adds_bos=not unigram, adds_eos=unigram
  )
  return {"tokenizer.model": model.SerializeToString(), "tokenizer_config.json": _to_bytes(config)}


def _to_bytes(value: Any) -> bytes:
  return json.dumps(value, ensure_ascii=False).encode("utf-8")
