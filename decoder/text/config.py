"""What do the small files beside a vocabulary say: named tokens, BOS and EOS, added tokens, the chat template?

Checkpoints say the same thing in several files and in several shapes; everything is read once, here, into one record.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# "eot_token" and "eom_token" are ours, for the end ids that a GGUF file names and a tokenizer_config has no word for.
END_TOKENS = ("eos_token", "eot_token", "eom_token")

# Special tokens that end a turn in the chat formats of published models, whatever the EOS of their tokenizer is.
TURN_ENDS = (
  "<|im_end|>",
  "<end_of_turn>",
  "<turn|>",
  "<|eot_id|>",
  "<|eom_id|>",
  "<|eot|>",
  "<|eom|>",
  "<|end|>",
  "<|return|>",
  "<|call|>",
  "<|end_of_turn|>",
  "<|END_OF_TURN_TOKEN|>",
  "<end_of_utterance>",
)

# Files that hold a vocabulary; where several lie side by side, tokenizer.json is read.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "source.spm", "sentencepiece.bpe.model")

PIECES = ("tokenizer.model", "spiece.model")  # SentencePiece models whose numbers are the tokens'

TOKENIZER_FILES = (
  *VOCABULARIES,
  "vocab.json",
  "target.spm",
  "target_vocab.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
)


class AddedToken(NamedTuple):
  text: str
  special: bool


@dataclass(frozen=True)
class TokenizerConfig:
  """`named_tokens`: name such as "bos_token" to text. `add_bos`, `add_eos`: None where the files do not say. `added`:
  tokens by id; `listed`: further special tokens in their order, with or without an id there."""

  named_tokens: dict[str, str] = field(default_factory=dict)
  end_tokens: tuple[str, ...] = ()
  add_bos: bool | None = None
  add_eos: bool | None = None
  added: dict[int, AddedToken] = field(default_factory=dict)
  listed: tuple[str, ...] = ()
  chat_template: str | None = None


def read_config(files: Mapping[str, bytes]) -> TokenizerConfig:
  """Reads the record from file contents by name; any of the files may be absent. Raises ValueError for unreadable
  JSON.
  """
  config = read_json(files, "tokenizer_config.json")
  special_map = read_json(files, "special_tokens_map.json")
  named = {}
  for name in (*NAMED_TOKENS, *END_TOKENS):
    text = _token_text(config.get(name)) or _token_text(special_map.get(name))
    if text:
      named[name] = text
  listed = _listed_tokens(special_map) or _listed_tokens(config)
  return TokenizerConfig(
    named_tokens={name: text for name, text in named.items() if name in NAMED_TOKENS},
    end_tokens=tuple(dict.fromkeys(named[name] for name in END_TOKENS if name in named)),
    add_bos=_optional_bool(config.get("add_bos_token")),
    add_eos=_optional_bool(config.get("add_eos_token")),
    added=_added_tokens(config, read_json(files, "added_tokens.json"), listed),
    listed=listed,
    chat_template=_chat_template(files, config),
  )


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
  """The JSON object in a file; {} where there is no such file."""
  if name not in files:
    return {}
  try:
    value = json.loads(files[name])
  except ValueError as error:
    raise ValueError(f"{name}: not JSON ({error}); download the file again") from error
  if not isinstance(value, dict):
    raise ValueError(f"{name}: wanted a JSON object, got {type(value).__name__}; download the file again")
  return value


def _listed_tokens(source: Mapping[str, Any]) -> tuple[str, ...]:
  tokens = source.get("additional_special_tokens") or source.get("extra_special_tokens") or ()
  texts = map(_token_text, tokens.values() if isinstance(tokens, Mapping) else tokens)
  return tuple(dict.fromkeys(text for text in texts if text))


def _added_tokens(config, added_map, listed) -> dict[int, AddedToken]:
  added = {_token_id(index): AddedToken(text, text in listed) for text, index in added_map.items()}
  for index, token in dict(config.get("added_tokens_decoder") or {}).items():
    if _token_text(token):
      added[_token_id(index)] = AddedToken(
        _token_text(token), isinstance(token, Mapping) and bool(token.get("special"))
      )
  return added


def _token_id(index: Any) -> int:
  try:
    return int(index)
  except (TypeError, ValueError) as error:
    raise ValueError(f"added tokens: wanted a token id, got {index!r}; download the tokenizer files again") from error


def _chat_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
  if "chat_template.jinja" in files:
    return files["chat_template.jinja"].decode("utf-8")
  template = read_json(files, "chat_template.json").get("chat_template") or config.get("chat_template")
  if isinstance(template, list):
    by_name = {entry["name"]: entry["template"] for entry in template}
    template = by_name.get("default") or next(iter(by_name.values()), None)
  return template or None


def _token_text(token: Any) -> str | None:
  text = token.get("content") if isinstance(token, Mapping) else token
  return text if isinstance(text, str) and text else None


def _optional_bool(value: Any) -> bool | None:
  return value if isinstance(value, bool) else None
