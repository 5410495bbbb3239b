"""How does a stream of token ids become a stream of text?

Every token stands for bytes; text is those bytes decoded as UTF-8 as they come, so that the deltas of a stream
concatenate to exactly the text of the whole, whatever the split. Work per token does not grow with the text. Which
bytes a token stands for, and which leading space is the tokenizer's own, is data (`DecodeRule`); stop strings are
`stops.py`.
"""

import codecs
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

_REPLACE_EACH = "decoder.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
  if not isinstance(error, UnicodeDecodeError):
    raise error
  return "\ufffd" * (error.end - error.start), error.end


# Python's own "replace" writes one U+FFFD for a whole truncated character; here each undecodable byte is shown as one.
codecs.register_error(_REPLACE_EACH, _replace_each_byte)


class Detokenizer(Protocol):
  """Text of a stream of ids. One object per stream; not reusable after `finish`."""

  def feed(self, ids: Iterable[int]) -> str:
    """The text that these ids complete; '' while a character still lacks bytes. What is returned is never retracted."""
    ...

  def finish(self) -> str:
    """The rest: one U+FFFD for each byte of a character that never became complete."""
    ...


@dataclass(frozen=True)
class DecodeRule:
  """What a vocabulary says about turning ids into bytes.

  `strip` drops one leading space of the first token with text, which the tokenizer had put there when it encoded;
  `strip_repeats` goes on while nothing is left of the tokens so far (SentencePiece with `remove_extra_whitespaces`).
  `strip_through` are the ids of markup (the BOS, or all) after which, where it is shown, such a space is the
  tokenizer's too. `exact_ids` are byte tokens: their space was in the text.
  """

  token_bytes: Callable[[int], bytes]
  special_ids: frozenset[int]
  strip: bool = False
  strip_repeats: bool = False
  strip_through: frozenset[int] = field(default_factory=frozenset)
  exact_ids: frozenset[int] = field(default_factory=frozenset)

  def stripped(self, token: int) -> bytes:
    """The bytes of a token where a leading space is the tokenizer's."""
    data = self.token_bytes(token)
    return data if token in self.exact_ids else data.removeprefix(b" ")


class ByteDetokenizer:
  """Detokenizer of a vocabulary whose every token is a fixed string of bytes (ByteLevel BPE, SentencePiece)."""

  def __init__(self, rule: DecodeRule, *, skip_special: bool = True):
    self._rule = rule
    self._skip_special = skip_special
    self._strip = rule.strip
    self._utf8 = codecs.getincrementaldecoder("utf-8")(_REPLACE_EACH)

  def feed(self, ids: Iterable[int]) -> str:
    return self._utf8.decode(b"".join([self._bytes(token) for token in map(operator.index, ids)]))

  def finish(self) -> str:
    return self._utf8.decode(b"", final=True)

  def _bytes(self, token: int) -> bytes:
    rule = self._rule
    data = rule.token_bytes(token)
    special = token in rule.special_ids
    if special and self._skip_special:
      return b""
    if special or token in rule.strip_through:
      self._strip = token in rule.strip_through
    elif self._strip:
      data = rule.stripped(token)
      self._strip = rule.strip_repeats and not data
    return data


class WindowDetokenizer:
  """Detokenizer of a vocabulary known only by a function from ids to text (WordPiece and the like).

  The text of a token may depend on the token before it, so the last token that gave text is decoded again with the new
  ones and the text they share is cut off. Exact where a decoder looks one token back, as those of `tokenizers` do.
  """

  # An unfinished character ends in U+FFFD and has at most four bytes; longer than that it is invalid and goes out.
  _LONGEST_WAIT = 4

  def __init__(self, rule: DecodeRule, decode: Callable[[Sequence[int]], str], *, skip_special: bool = True):
    self._rule = rule
    self._decode = decode
    self._skip_special = skip_special
    self._shown: list[int] = []
    self._pending: list[int] = []

  def feed(self, ids: Iterable[int]) -> str:
    return "".join([self._feed_one(token) for token in map(operator.index, ids)])

  def finish(self) -> str:
    return self._take() if self._pending else ""

  def _feed_one(self, token: int) -> str:
    self._rule.token_bytes(token)  # refuses an id outside the vocabulary, which `decode` may pass over
    if self._skip_special and token in self._rule.special_ids:
      return ""
    self._pending.append(token)
    text = self._decode(self._shown + self._pending)
    if text.endswith("\ufffd") and len(self._pending) < self._LONGEST_WAIT:
      return ""
    return self._take()

  def _take(self) -> str:
    before, after = self._decode(self._shown), self._decode(self._shown + self._pending)
    delta = after[len(before) :]
    if delta:
      self._shown = self._pending
    else:
      self._shown = self._shown + self._pending if self._shown else self._pending
    self._pending = []
    return delta
