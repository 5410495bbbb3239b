"""Which tokens may come next, if the text must fit a JSON schema, a regular expression, a grammar or a choice?

`llguidance` parses; here every kind of constraint becomes one of its grammars, and our tokenizer its vocabulary. Masks
are exact: a token is allowed if and only if the text with its bytes can still become one that fits. Text is what the
detokenizer makes of tokens, so special tokens stand for none, and the first token's own leading space counts as little
as there.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from decoder.text.tokenizer import Tokenizer

# Between the parts of a JSON text: nothing, one space, or a line break with its indentation. What is unbounded here, a
# model may write for ever.
_JSON_SPACE = r" |\r?\n( {0,16}|\t{0,8})"
# The model, not the parser, decides how to cut a forced text into tokens.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class Spec(NamedTuple):
  """What a text must fit. name: the setting it came from. grammar: in llguidance's Lark."""

  name: str
  grammar: str


def read_spec(
  json_schema: Any = None, regex: str | None = None, grammar: str | None = None, choice: Sequence[str] | None = None
) -> Spec | None:
  """The one constraint that is given, or None. ValueError for two, and for one that is malformed or unsatisfiable as
  far as that shows without a tokenizer.

  json_schema: a mapping or its JSON text. regex: in the syntax of Rust's regex crate, matched as a whole. grammar:
  Lark with a rule `start`, or GBNF. choice: texts, one of which is written.
  """
  given = {"json_schema": json_schema, "regex": regex, "grammar": grammar, "choice": choice}
  given = {name: value for name, value in given.items() if value is not None}
  if len(given) > 1:
    raise ValueError(f"a text can have one constraint, got {' and '.join(given)}; leave all but one out")
  if not given:
    return None
  ((name, value),) = given.items()
  spec = Spec(name, _WRITERS[name](value))
  problem = _problem(spec.grammar)
  if problem:
    if name != "grammar":  # what we wrote around it has no lines to point at
      problem = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", problem)
    raise ValueError(f"{name} cannot be used: {problem}; see llguidance's documentation for what it knows")
  return spec


class Vocabulary:
  """A tokenizer as the parser sees it; building it takes a moment, so keep it.

  tokenizer: of ours. size: ids of the model, those beyond the tokenizer's are never allowed. ends: ids that end a text
  and are never part of one. ValueError for a tokenizer whose tokens are no fixed bytes.
  """

  def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]):
    from llguidance import LLTokenizer

    if not tokenizer.is_bytes:
      raise ValueError(
        "constraints need a tokenizer whose tokens stand for fixed bytes (byte-level BPE, SentencePiece), and this "
        "model's decides by the tokens around; leave the constraint out"
      )
    self.size = size
    known = range(min(size, tokenizer.vocab_size))
    tokens = [tokenizer.token_bytes(i) for i in known] + [b""] * (size - len(known))
    special = {i for i in (*tokenizer.special_tokens.values(), *ends) if i < size}
    # At the start of a text a token may stand for less than elsewhere: such a one has a second id, after all others.
    opening = {i: tokenizer.opening_bytes(i) for i in known if i not in special}
    shorter = [i for i in opening if opening[i] != tokens[i]]
    self.shorter, self.repeats = np.array(shorter, np.int64), tokenizer.strip_repeats
    self.empty = np.array([i for i in shorter if not opening[i]], np.int64)
    self.end = size + len(shorter)
    self._second = {i: size + k for k, i in enumerate(shorter)}
    self._empty = frozenset(self.empty.tolist())
    self._parser_tokens = LLTokenizer(_Tokens([*tokens, *(opening[i] for i in shorter)], sorted(special)))

  def constraint(self, spec: Spec, ends: Sequence[int] = ()) -> "Constraint":
    """A text that has not begun. ends: ids that may be drawn where it fits. ValueError where nothing can be written."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(self._parser_tokens, _lark(spec.grammar), log_level=0)
    constraint = Constraint(matcher, self, ends)
    if constraint.error is None:
      return constraint
    bytewise = LLMatcher(LLTokenizer("byte"), _lark(spec.grammar), log_level=0)
    bytewise.compute_bitmask()
    if bytewise.is_error():
      raise ValueError(f"{spec.name} allows no text at all, not even an empty one; no model could follow it")
    raise ValueError(f"{spec.name} allows no text that this tokenizer could begin: its vocabulary lacks the bytes")

  def inner(self, token: int, opening: bool) -> list[int]:
    """The parser's tokens for one of ours: none for a space that is no text."""
    if not opening:
      return [token]
    return [] if token in self._empty else [self._second.get(token, token)]


class Constraint:
  """How one text stands against a grammar. `copy()` is another text that has begun alike.

  `done`: it fits, and nothing can follow. `error`: why the parser gave up, else None; nothing is allowed after that.
  """

  def __init__(self, matcher: Any, vocabulary: Vocabulary, ends: Sequence[int]):
    self._matcher, self._vocabulary, self._ends = matcher, vocabulary, list(ends)
    self._widths: list[int] = []  # of each committed token, in the parser's tokens
    self.error: str | None = None
    bits = self._bits()
    self._done_at_start = bool(bits[vocabulary.end]) and bits.sum() == 1

  @property
  def done(self) -> bool:
    if self.error is not None:
      return False
    return self._matcher.is_stopped() if any(self._widths) else self._done_at_start

  def copy(self) -> "Constraint":
    twin = object.__new__(Constraint)
    twin.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), _widths=list(self._widths))
    return twin

  def mask(self) -> np.ndarray:
    """The ids that may come next, a bit each: uint32 words, lowest bit first. End ids where the text fits."""
    if not self._opening:
      return self._words()
    vocabulary, bits = self._vocabulary, self._bits()
    allowed = np.zeros(32 * -(-vocabulary.size // 32), bool)
    allowed[: vocabulary.size] = bits[: vocabulary.size]
    allowed[vocabulary.shorter] = bits[vocabulary.size : vocabulary.end]
    allowed[vocabulary.empty] = not self._widths and self.error is None
    if bits[vocabulary.end]:
      allowed[self._ends] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)

  def masks(self, guesses: Sequence[int]) -> np.ndarray:
    """The mask for what comes next, and after each of `guesses`: [guesses + 1, words]. They forbid nothing after one
    that may not come, or that nothing can follow. The text stays as it is."""
    first, text = self.mask(), self.copy() if len(guesses) else self
    masks_JW = np.full((len(guesses) + 1, len(first)), 2**32 - 1, np.uint32)
    masks_JW[0] = first
    for number, token in enumerate(guesses):
      if not masks_JW[number, token >> 5] >> (token & 31) & 1:
        break
      text.commit([token])
      if text.done:
        break
      masks_JW[number + 1] = text.mask()
    return masks_JW

  def problem(self) -> str | None:
    """Why nothing can come next, where the parser sees no way on."""
    self.mask()
    return self.error

  def commit(self, tokens: Sequence[int]) -> None:
    """Takes tokens, drawn under the masks before each, as the next of the text."""
    for token in tokens:
      inner = [self._vocabulary.end] if token in self._ends else self._vocabulary.inner(int(token), self._opening)
      self._widths.append(len(inner))
      self._matcher.consume_tokens(inner)
      self._note_error()

  def rollback(self, count: int) -> None:
    """Forgets the last `count` tokens."""
    start = len(self._widths) - count
    if not 0 <= start <= len(self._widths):
      raise ValueError(f"rollback wants 0 … {len(self._widths)} tokens, those committed, got {count}")
    self._matcher.rollback(sum(self._widths[start:]))
    del self._widths[start:]
    self._note_error()

  @property
  def _opening(self) -> bool:
    return not self._widths or (self._vocabulary.repeats and not any(self._widths))

  def _words(self) -> np.ndarray:
    """The mask where the parser's ids are ours, but for its end: its own words, without those past the vocabulary."""
    parsers = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
    self._note_error()
    words = parsers[: -(-self._vocabulary.size // 32)].astype(np.uint32)
    if self.error is not None:
      return np.zeros_like(words)
    words[-1] &= 2**32 - 1 >> -self._vocabulary.size % 32
    end = self._vocabulary.end
    if parsers[end >> 5] >> (end & 31) & 1:
      for token in self._ends:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words

  def _bits(self) -> np.ndarray:
    """What the parser allows, by its own ids; bool."""
    packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
    self._note_error()
    bits = np.unpackbits(packed, bitorder="little").view(bool)
    return bits if self.error is None else np.zeros_like(bits)

  def _note_error(self) -> None:
    if self._matcher.is_error() and self.error is None:
      self.error = _first_line(self._matcher.get_error())


class _Tokens:
  """What llguidance asks of a tokenizer that need not encode: `_OPTIONS` see to that. Having no end of its own, it is
  given one after the last token."""

  is_tokenizer_wrapper = True
  eos_token_id = bos_token_id = None

  def __init__(self, tokens: list[bytes], special: list[int]):
    self.tokens, self.special_token_ids = tokens, special


def _lark(grammar: str) -> str:
  from llguidance import LLMatcher

  return LLMatcher.grammar_from_lark(grammar)


@functools.lru_cache(64)
def _problem(grammar: str) -> str:
  """What is wrong with a grammar, as far as it shows without a tokenizer; '' for nothing."""
  from llguidance import LLMatcher

  wrong, messages = LLMatcher.validate_grammar_with_warnings(_lark(grammar))
  return _first_line(messages[0]) if wrong else ""


def _first_line(message: str) -> str:
  """What the parser's message says, without the dump of grammar and state below it."""
  if message.startswith("NoExtension"):
    return "no token of the vocabulary can follow"
  lines = [line.strip() for line in message.split("<state>")[0].splitlines()]
  error = next((line for line in lines if line.startswith("error: ")), "")  # of a regular expression, after a drawing
  return lines[0].removesuffix(" regex parse error:") + (f" {error}" if error else "")


def _write_schema(schema: Any) -> str:
  if isinstance(schema, str):
    try:
      schema = json.loads(schema)
    except json.JSONDecodeError as error:
      raise ValueError(f"json_schema is not JSON: {error}; got {schema[:60]!r}") from error
  if schema is True:
    schema = {}
  if not isinstance(schema, Mapping | bool):
    raise ValueError(f"json_schema must be a mapping or its JSON text, got {schema!r}")
  if schema is not False:
    asked = schema.get("x-guidance") or {}
    space = {} if "whitespace_flexible" in asked else {"whitespace_pattern": _JSON_SPACE}
    schema = {**schema, "x-guidance": {**space, **asked}}
  try:
    text = json.dumps(schema)
  except (TypeError, ValueError) as error:
    raise ValueError(f"json_schema must be plain data: {error}") from error
  return f"start: %json {text}{_OPTIONS}"


def _write_regex(pattern: Any) -> str:
  from llguidance import regex_to_lark

  _check_text("regex", pattern)
  return f"start: /{regex_to_lark(pattern)}/{_OPTIONS}"


def _write_grammar(grammar: Any) -> str:
  from llguidance.gbnf_to_lark import any_to_lark

  _check_text("grammar", grammar)
  if "::=" not in grammar:
    return grammar + _OPTIONS
  try:
    return any_to_lark(grammar) + _OPTIONS
  except Exception as error:  # the converter raises plain Exception
    raise ValueError(f"grammar is taken for GBNF, for its '::=', but cannot be read: {error}") from error


def _write_choice(choices: Any) -> str:
  if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
    raise ValueError(f"choice must be a list of texts, at least one, got {choices!r}")
  for text in choices:
    _check_text("choice", text)
  return "start: " + " | ".join(map(json.dumps, choices)) + _OPTIONS


def _check_text(name: str, value: Any) -> None:
  if not isinstance(value, str) or not value:
    raise ValueError(f"{name} must be a text that is not empty, got {value!r}")


_WRITERS = {"json_schema": _write_schema, "regex": _write_regex, "grammar": _write_grammar, "choice": _write_choice}
