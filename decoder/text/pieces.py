"""A SentencePiece model whose pieces are the tokens, run by the `sentencepiece` library: a tokenizer.model, or the
spiece.model of T5 and mT5.

The library encodes stretches of plain text and knows nothing of the markup of control and added tokens, so the text is
cut at that markup here. A space is put in front of the first stretch only, and a BOS written as markup leaves it the
first; T5, which was made so, has one in front of each.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from decoder.text.config import PIECES, TURN_ENDS, AddedToken, read_config, read_json
from decoder.text.tokenizer import Tokenizer

# SentencePiece.Type in sentencepiece_model.proto; GGUF numbers token_type alike.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class PieceTokenizer(Tokenizer):
  """Tokenizer of one of PIECES and the JSON files beside it."""

  def __init__(self, files: Mapping[str, bytes]):
    super().__init__(files, read_config(files))
    name = next(name for name in PIECES if name in files)
    model = read_model(name, files[name])
    self._is_t5 = self._check_class(name)
    if name == "spiece.model":
      self._add_sentinels([piece.piece for piece in model.pieces])
    self._first = processor(name, model)
    self._types = [piece.type for piece in model.pieces]
    self._texts = {index: piece.piece for index, piece in enumerate(model.pieces)}
    self._texts |= {index: token.text for index, token in self._config.added.items()}
    self._added = frozenset(self._config.added)
    self.vocab_size = _vocab_size(self._types, self._added)
    self._name_tokens()
    normalizer = model.normalizer_spec
    byte_ids = frozenset(index for index, kind in enumerate(self._types) if kind == BYTE)
    starting = self._markup_ids.values() if self._is_t5 else () if self.bos_id is None else [self.bos_id]
    self._set_rule(**strip_rule(normalizer), strip_through=frozenset(starting), exact_ids=byte_ids)
    self._later = later_processor(name, model)
    self._after_markup = self._first if self._is_t5 else self._later

  def find(self, text: str) -> int | None:
    return self._ids_by_text.get(text)

  @functools.cached_property
  def _ids_by_text(self) -> dict[str, int]:
    return {text: index for index, text in reversed(self._texts.items())}

  def _encode(self, text: str) -> list[int]:
    return self._encode_with(self._first, text)

  def _encode_inside(self, text: str) -> list[int]:
    return self._encode_with(self._first if text[:1] == " " and self._rule.strip_repeats else self._later, text)

  def _encode_with(self, processor: Any, text: str) -> list[int]:
    ids: list[int] = []
    position = 0
    for match in self._markup.finditer(text) if self._markup else ():
      if match.start() > position:
        ids += processor.encode(text[position : match.start()])
        processor = self._after_markup
      token = self._markup_ids[match.group()]
      if token != self.bos_id or ids:
        processor = self._after_markup
      ids.append(token)
      position = match.end()
    return ids + processor.encode(text[position:]) if position < len(text) else ids

  def _make_bytes(self, token: int) -> bytes:
    text = self._texts.get(token, "")
    kind = self._types[token] if token < len(self._types) and token not in self._added else None
    if kind == BYTE:
      return bytes([int(text[3:5], 16)])
    return (text.replace("▁", " ") if kind in (NORMAL, USER_DEFINED, UNUSED) else text).encode("utf-8")

  def _name_tokens(self) -> None:
    processor = self._first
    ids = {
      "bos_token": processor.bos_id(),
      "eos_token": processor.eos_id(),
      "unk_token": processor.unk_id(),
      "pad_token": processor.pad_id(),
    }
    of_model = {name: self._texts[index] for name, index in ids.items() if index >= 0}
    config = self._config = dataclasses.replace(self._config, named_tokens=of_model | self._config.named_tokens)
    ends = (*config.end_tokens, *([config.named_tokens["eos_token"]] if "eos_token" in config.named_tokens else ()))
    markup = {text: index for index, text in self._texts.items() if self._is_markup(index)}
    known = dict(markup)
    for text in (*config.named_tokens.values(), *ends, *TURN_ENDS):
      index = processor.piece_to_id(text)
      if text not in known and self._texts.get(index) == text:
        known[text] = index
    special = [text for text, index in markup.items() if not (index in self._added and not config.added[index].special)]
    special += [text for text in (*ends, *TURN_ENDS) if text in known]
    self._set_tokens(known, special, ends)
    self._markup_ids = {text: index for text, index in (markup | self.special_tokens).items() if text}
    self._markup = markup_pattern(self._markup_ids)
    self.adds_bos = self.bos_id is not None and config.add_bos is not False
    self.adds_eos = bool(self.eos_ids) and (self._is_t5 if config.add_eos is None else config.add_eos)

  def _check_class(self, name: str) -> bool:
    """Whether the conventions are T5's. ValueError for a spiece.model of other models, which have others."""
    kind = read_json(self._files, "tokenizer_config.json").get("tokenizer_class") or ""
    is_t5 = kind.startswith(("T5", "MT5"))
    if name == "spiece.model" and kind and not is_t5:
      raise ValueError(
        f"tokenizer_config.json: spiece.model is read as T5's, and this one is a {kind}'s; take the tokenizer.json of "
        "the checkpoint"
      )
    return is_t5 or name == "spiece.model"

  def _add_sentinels(self, pieces: list[str]) -> None:
    """T5's <extra_id_99> … <extra_id_0>, which come after the pieces, where no file gives them ids."""
    settings, listed = read_json(self._files, "tokenizer_config.json"), self._config.listed
    listed = [text for text in listed if text.startswith("<extra_id_")]
    number = settings.get("extra_ids", len(listed) or 100)
    if not isinstance(number, int) or number < 0 or (listed and number not in (0, len(listed))):
      raise ValueError(
        f"tokenizer_config.json: extra_ids is {number!r}, but {len(listed)} <extra_id_…> are listed as special tokens; "
        "download the tokenizer files again"
      )
    texts = [f"<extra_id_{number - 1 - place}>" for place in range(number)]
    known = {*pieces, *(token.text for token in self._config.added.values())}
    sentinels = {len(pieces) + place: AddedToken(text, True) for place, text in enumerate(texts) if text not in known}
    self._config = dataclasses.replace(self._config, added=sentinels | self._config.added)

  def _is_markup(self, index: int) -> bool:
    return index in self._added or self._types[index] in (CONTROL, UNKNOWN)


def read_piece_proto() -> Any:
  """The module with SentencePiece's own protocol buffers."""
  try:
    from sentencepiece import sentencepiece_model_pb2
  except ImportError as error:
    raise ImportError(
      f"reading a SentencePiece model needs the packages sentencepiece and protobuf ({error}); "
      "pip install sentencepiece protobuf"
    ) from error
  return sentencepiece_model_pb2


def read_model(name: str, data: bytes) -> Any:
  """The protocol buffer in a file. ValueError naming the file for one that cannot be used."""
  model = read_piece_proto().ModelProto()
  try:
    model.ParseFromString(data)
  except Exception as error:  # protobuf's DecodeError is no ValueError
    raise ValueError(
      f"{name}: not a SentencePiece model ({error}); a tiktoken file of that name is not read, "
      "take the tokenizer.json of the checkpoint"
    ) from error
  if not model.pieces:
    raise ValueError(f"{name}: a SentencePiece model without pieces; download it again")
  if model.trainer_spec.treat_whitespace_as_suffix:
    raise ValueError(f"{name}: treat_whitespace_as_suffix is not supported; take the checkpoint's tokenizer.json")
  return model


def processor(name: str, model: Any) -> Any:
  """What the library makes of the model in a file of this name."""
  from sentencepiece import SentencePieceProcessor

  try:
    return SentencePieceProcessor(model_proto=model.SerializeToString())
  except (RuntimeError, OSError, ValueError) as error:
    raise ValueError(f"{name}: SentencePiece refuses the model: {error}; download it again") from error


def later_processor(name: str, model: Any) -> Any:
  """The same for a text that goes on after others, without a space in front. Changes the model."""
  model.normalizer_spec.add_dummy_prefix = False
  return processor(name, model)


def strip_rule(normalizer: Any) -> dict[str, bool]:
  """What of a DecodeRule a model's normaliser says."""
  trims = normalizer.remove_extra_whitespaces
  return {"strip": normalizer.add_dummy_prefix or trims, "strip_repeats": trims}


def markup_pattern(texts: Iterable[str]) -> re.Pattern | None:
  """Where one of these texts stands, the longest that does."""
  longest_first = sorted(texts, key=len, reverse=True)
  return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _vocab_size(types: list[int], added: frozenset[int]) -> int:
  """Files pad the end of a vocabulary with unused pieces; those are no tokens."""
  size = len(types)
  while size and types[size - 1] == UNUSED:
    size -= 1
  return max(size, max(added, default=-1) + 1)
