"""A tokenizer.json, run by the `tokenizers` library.

The library encodes. Decoding is ours wherever the file's decoder is one of the two families whose tokens are plain
bytes (ByteLevel, and pieces with ▁ for a space); any other decoder is called on a sliding window of ids.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from decoder.text.config import read_config
from decoder.text.detokenizer import Detokenizer, WindowDetokenizer
from decoder.text.languages import is_code
from decoder.text.tokenizer import Tokenizer

_SPACE = "▁"
_ANCHOR = "☺"


class _Decoder(NamedTuple):
  """`kind`: "bytes" (ByteLevel), "pieces" (▁ is a space) or "other"."""

  kind: str
  byte_tokens: bool = False
  strip: bool = False


class FastTokenizer(Tokenizer):
  """Tokenizer of a tokenizer.json; special-token markup, normalisation and prefixes are as the file says."""

  def __init__(self, files: Mapping[str, bytes]):
    super().__init__(files, read_config(files))
    self._backend, source = _open(files["tokenizer.json"])
    self._add_missing_tokens()
    added = self._backend.get_added_tokens_decoder()
    self._added = {index: token.content for index, token in added.items()}
    self._decoder = _read_decoder(source.get("decoder"))
    self.is_bytes = self._decoder.kind != "other"
    self.vocab_size = 1 + max(_largest_id(source["model"].get("vocab") or ()), max(added, default=-1))
    ids_by_text = {token.content: index for index, token in added.items()}
    for text in (*self._config.named_tokens.values(), *self._config.end_tokens):
      index = self._backend.token_to_id(text)
      if index is not None:
        ids_by_text.setdefault(text, index)
    self._set_tokens(ids_by_text, [token.content for token in added.values() if token.special], self._config.end_tokens)
    self._set_affixes()
    strip_through = self._ids_before_a_prefix() if self._decoder.strip else ()
    self._set_rule(strip=self._decoder.strip, strip_through=frozenset(strip_through))

  def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
    if self.is_bytes:
      return super().detokenizer(skip_special=skip_special)
    decode = functools.partial(self._backend.decode, skip_special_tokens=False)
    return WindowDetokenizer(self._rule, decode, skip_special=skip_special)

  def _encode(self, text: str) -> list[int]:
    return self._backend.encode(text, add_special_tokens=False).ids

  def find(self, text: str) -> int | None:
    return self._backend.token_to_id(text)

  def _encode_inside(self, text: str) -> list[int]:
    # The file's own space comes before a character that merges with nothing, and goes with it.
    anchor, ids = self._encode(_ANCHOR), self._encode(_ANCHOR + text)
    return ids[len(anchor) :] if self._decoder.strip and ids[: len(anchor)] == anchor else self._encode(text)

  def _make_bytes(self, token: int) -> bytes:
    text = self._added.get(token)
    if text is not None:
      return text.encode("utf-8")
    text = self._backend.id_to_token(token)
    if text is None:
      return b""
    if self._decoder.kind == "bytes":
      byte_of = _byte_of_char()
      return bytes(byte_of[char] for char in text) if all(char in byte_of for char in text) else text.encode("utf-8")
    if self._decoder.byte_tokens and _is_byte_token(text):
      return bytes([int(text[3:5], 16)])
    return (text.replace(_SPACE, " ") if self._decoder.kind == "pieces" else text).encode("utf-8")

  def _add_missing_tokens(self) -> None:
    """Older checkpoints list tokens beside tokenizer.json that are not in it; they belong right after its last id."""
    from tokenizers import AddedToken

    for index, token in sorted(self._config.added.items()):
      if (
        index == self._backend.get_vocab_size(with_added_tokens=True) and self._backend.token_to_id(token.text) is None
      ):
        self._backend.add_tokens([AddedToken(token.text, special=token.special, normalized=False)])

  def _set_affixes(self) -> None:
    """What the file's post-processor puts around a text, unless the tokenizer_config says otherwise."""
    plain = self._encode("a")
    full = self._backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), 0)
    before, after = full[:start], full[start + len(plain) :]
    if self.bos_id is None and len(before) == 1 and not is_code(self._backend.id_to_token(before[0]) or ""):
      self.bos_id = before[0]
    config = self._config
    add_bos = self.bos_id is not None and before[:1] == [self.bos_id] if config.add_bos is None else config.add_bos
    add_eos = bool(after) if config.add_eos is None else config.add_eos
    self.adds_bos = add_bos and self.bos_id is not None
    self.adds_eos = add_eos and bool(self.eos_ids)

  def _ids_before_a_prefix(self) -> list[int]:
    """The ids of added tokens after whose markup the file puts its own space: all of them (as Llama 2) or none."""
    return [index for index, text in self._added.items() if self._prefixes_after(text, index)]

  def _prefixes_after(self, text: str, index: int) -> bool:
    ids = self._encode(text + "a")
    return ids[:1] == [index] and len(ids) > 1 and (self._backend.id_to_token(ids[1]) or "").startswith(_SPACE)


def _open(data: bytes) -> tuple[Any, dict[str, Any]]:
  from tokenizers import Tokenizer as Backend

  try:
    text = data.decode("utf-8")
    source = json.loads(text)
    backend = Backend.from_str(text)
  except Exception as error:  # the library raises plain Exception
    raise ValueError(f"tokenizer.json: {error}; download it again, or update `tokenizers`") from error
  # Both are settings for training batches; a prompt is neither cut nor padded behind the user's back.
  backend.no_truncation()
  backend.no_padding()
  return backend, source


def _largest_id(vocabulary: Mapping[str, int] | list) -> int:
  return max(vocabulary.values(), default=-1) if isinstance(vocabulary, Mapping) else len(vocabulary) - 1


def _read_decoder(decoder: Mapping[str, Any] | None) -> _Decoder:
  steps = (decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]) if decoder else []
  kinds = [step["type"] for step in steps]
  if kinds == ["ByteLevel"]:
    return _Decoder("bytes")
  byte_tokens = "ByteFallback" in kinds
  if [kind for kind in kinds if kind != "ByteFallback"] == ["Metaspace"] and steps[-1].get(
    "replacement", _SPACE
  ) == _SPACE:
    scheme = steps[-1].get("prepend_scheme", "always" if steps[-1].get("add_prefix_space", True) else "never")
    return _Decoder("pieces", byte_tokens, strip=scheme != "never")
  if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]) and _is_space(
    steps[0]
  ):
    strip = steps[3] if len(steps) == 4 else {"start": 0, "stop": 0, "content": " "}
    if strip["start"] in (0, 1) and strip["stop"] == 0 and strip["content"] == " ":
      return _Decoder("pieces", byte_tokens, strip=strip["start"] == 1)
  return _Decoder("other")


def _is_space(replace: Mapping[str, Any]) -> bool:
  return replace.get("pattern") == {"String": _SPACE} and replace.get("content") == " "


def _is_byte_token(text: str) -> bool:
  return (
    len(text) == 6
    and text.startswith("<0x")
    and text.endswith(">")
    and all(c in "0123456789ABCDEFabcdef" for c in text[3:5])
  )


@functools.cache
def _byte_of_char() -> dict[str, int]:
  """GPT-2's alphabet: a printable byte is its own Latin-1 character, the others are numbered from U+0100 on."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
