"""A SentencePiece model that only cuts a text, and a vocabulary that numbers its pieces: Marian, M2M-100, NLLB.

Marian's source.spm and M2M-100's sentencepiece.bpe.model stand beside a vocab.json; a piece that is not in it is
unknown. NLLB's sentencepiece.bpe.model stands alone and is numbered as fairseq does, by four special tokens and then
its pieces. Language tokens come after either vocabulary, in the order in which special_tokens_map.json or
tokenizer_config.json lists them. Marian's target.spm is not needed: the vocabulary alone tells what was written.

Punctuation is not normalised before, by Moses' rules for which Marian's data was; nor does transformers, which has them
where `sacremoses` is installed and calls them nowhere.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from decoder.text.config import TokenizerConfig, read_config, read_json
from decoder.text.languages import is_code, tokens_of_m2m_100
from decoder.text.pieces import (
  BYTE,
  CONTROL,
  NORMAL,
  UNKNOWN,
  later_processor,
  markup_pattern,
  processor,
  read_model,
  strip_rule,
)
from decoder.text.tokenizer import Tokenizer

_MARIAN, _FAIRSEQ = "source.spm", "sentencepiece.bpe.model"
_NAMED = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}  # where no file says otherwise
_FAIRSEQ_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
_MARK = re.compile(r">>.*?<<", re.DOTALL)  # before a text, the language that Marian is to write


class MappedTokenizer(Tokenizer):
  """Tokenizer of a source.spm or sentencepiece.bpe.model, and of the vocab.json beside it."""

  def __init__(self, files: Mapping[str, bytes]):
    super().__init__(files, _with_defaults(files, read_config(files)))
    name = _MARIAN if _MARIAN in files else _FAIRSEQ
    model, self._marks = read_model(name, files[name]), name == _MARIAN
    self._first = processor(name, model)
    _check_one_vocabulary(files)
    self._ids = _with_added(_vocabulary(files, self._config, name, model), self._config)
    self._texts = {number: text for text, number in self._ids.items()}
    self.vocab_size = 1 + max(self._texts)
    self._unknown = self._ids[self._config.named_tokens["unk_token"]]
    added = [token.text for token in self._config.added.values()]
    special = [token.text for token in self._config.added.values() if token.special]
    self._set_tokens(self._ids, [*special, *self._config.listed], self._config.end_tokens)
    self._plain = set(self._ids) - set(added) - set(self.special_tokens)
    self._markup = markup_pattern([*added, *self.special_tokens])
    self._bytes_of = {piece.piece: bytes([int(piece.piece[3:5], 16)]) for piece in model.pieces if piece.type == BYTE}
    markup = {self._ids[text] for text in (*added, *self.special_tokens)}
    exact = {self._ids[text] for text in self._bytes_of if text in self._ids}
    self._set_rule(**strip_rule(model.normalizer_spec), strip_through=frozenset(markup), exact_ids=frozenset(exact))
    self._later = later_processor(name, model)
    self.adds_bos, self.adds_eos = False, self._config.add_eos is not False

  def find(self, text: str) -> int | None:
    return self._ids.get(text)

  def _encode(self, text: str) -> list[int]:
    return self._encode_with(self._first, text)

  def _encode_inside(self, text: str) -> list[int]:
    return self._encode_with(self._first if text[:1] == " " and self._rule.strip_repeats else self._later, text)

  def _encode_with(self, cutter: Any, text: str) -> list[int]:
    ids, position = [], 0
    for match in self._markup.finditer(text):
      ids += [*self._cut(cutter, text[position : match.start()]), self._ids[match.group()]]
      cutter, position = self._first, match.end()
    return ids + self._cut(cutter, text[position:])

  def _cut(self, cutter: Any, text: str) -> list[int]:
    mark = _MARK.match(text) if self._marks else None
    pieces = cutter.encode(text[mark.end() :] if mark else text, out_type=str)
    return [self._ids.get(piece, self._unknown) for piece in ([mark.group(), *pieces] if mark else pieces)]

  def _make_bytes(self, token: int) -> bytes:
    text = self._texts.get(token, "")
    if text in self._bytes_of:
      return self._bytes_of[text]
    return (text.replace("▁", " ") if text in self._plain else text).encode("utf-8")


def _with_defaults(files: Mapping[str, bytes], config: TokenizerConfig) -> TokenizerConfig:
  named, listed = _NAMED | config.named_tokens, config.listed
  known = (*listed, *(token.text for token in config.added.values()))
  if _FAIRSEQ in files and "vocab.json" in files and not any(map(is_code, known)):
    codes = read_json(files, "tokenizer_config.json").get("language_codes", "m2m100")
    listed = (*listed, *tokens_of_m2m_100(codes))
  ends = config.end_tokens or (named["eos_token"],)
  return dataclasses.replace(config, named_tokens=named, end_tokens=ends, listed=listed)


def _check_one_vocabulary(files: Mapping[str, bytes]) -> None:
  separate = read_json(files, "tokenizer_config.json").get("separate_vocabs")
  if separate or "target_vocab.json" in files:
    what = "tokenizer_config.json: separate_vocabs" if separate else "target_vocab.json"
    raise ValueError(f"{what} is of a model of two vocabularies, which is not supported; choose one that shares them")


def _vocabulary(files: Mapping[str, bytes], config: TokenizerConfig, name: str, model: Any) -> dict[str, int]:
  """Tokens that the files number, by text."""
  if "vocab.json" in files:
    vocabulary = _read_vocabulary(files, name, model)
    lacking = [text for text in map(config.named_tokens.get, ("unk_token", "eos_token")) if text not in vocabulary]
    if lacking:
      raise ValueError(f"vocab.json has no {lacking[0]!r}; download it again")
    return vocabulary
  if name == _MARIAN:
    raise ValueError(f"{name} is there without vocab.json, which numbers its pieces; download that, too")
  if not config.listed and not config.added:
    raise ValueError(
      f"{name} is there without vocab.json, so it is read as NLLB's, but neither special_tokens_map.json nor "
      "tokenizer_config.json lists language tokens; download the one that is missing"
    )
  return _numbered_as_fairseq(name, model)


def _read_vocabulary(files: Mapping[str, bytes], name: str, model: Any) -> dict[str, int]:
  vocabulary = read_json(files, "vocab.json")
  wrong = next((text for text, number in vocabulary.items() if type(number) is not int or number < 0), None)
  if wrong is not None:
    raise ValueError(f"vocab.json: wanted ids ≥ 0, got {vocabulary[wrong]!r} for {wrong!r}; download it again")
  if len(set(vocabulary.values())) < len(vocabulary):
    raise ValueError("vocab.json: several tokens have one id; download it again")
  pieces = [piece.piece for piece in model.pieces if piece.type == NORMAL]
  known = sum(piece in vocabulary for piece in pieces)
  if 2 * known < len(pieces):
    raise ValueError(
      f"vocab.json and {name} are of different models: it numbers {known} of its {len(pieces)} pieces; download both "
      "again"
    )
  return vocabulary


def _numbered_as_fairseq(name: str, model: Any) -> dict[str, int]:
  if [piece.type for piece in model.pieces[:3]] != [UNKNOWN, CONTROL, CONTROL]:
    begins = ", ".join(piece.piece for piece in model.pieces[:3])
    raise ValueError(
      f"{name} begins with {begins}, where NLLB's has <unk>, <s>, </s>; add the vocab.json or tokenizer.json of the "
      "checkpoint"
    )
  texts = (*_FAIRSEQ_FIRST, *(piece.piece for piece in model.pieces[3:]))
  return {text: number for number, text in enumerate(texts)}


def _with_added(vocabulary: Mapping[str, int], config: TokenizerConfig) -> dict[str, int]:
  """The vocabulary and what comes beside it: tokens that files give ids, then those that they only list or name."""
  ids, texts = dict(vocabulary), {number: text for text, number in vocabulary.items()}
  for number, token in config.added.items():
    if ids.get(token.text, number) != number or texts.get(number, token.text) != token.text:
      raise ValueError(
        f"the vocabulary and the added tokens of tokenizer_config.json or added_tokens.json contradict each other: "
        f"{token.text!r} is {number} there; download the tokenizer files again"
      )
    ids[token.text] = number
  beyond = dict.fromkeys(text for text in (*config.listed, *config.named_tokens.values()) if text not in ids)
  return ids | {text: number for number, text in enumerate(beyond, 1 + max(ids.values()))}
