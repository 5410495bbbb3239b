"""Masks allow exactly the tokens after which the text can still become one that fits; checked by enumeration."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from decoder.text.constraints import Vocabulary, read_spec

SPARE = 3  # ids of the model beyond the tokenizer's
CHOICES = ["I am", " am", "x", "  x", "te", "text", "漢", "漢字", "a\n", "<eos>", "</s>", "<tool>", "here", "he"]


def vocabulary(tokenizer):
  return Vocabulary(tokenizer, tokenizer.vocab_size + SPARE, tokenizer.eos_ids)


def ids_of(constraint):
  return set(np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")).tolist())


def bytes_of(tokenizer, ids):
  """The text's bytes: what is complete of it, and the bytes of a character that is not."""
  detokenizer = tokenizer.detokenizer()
  text = detokenizer.feed(ids)
  held = len(detokenizer.finish())
  return text.encode() + (b"".join(map(tokenizer.token_bytes, ids))[-held:] if held else b"")


def viable(tokenizer, ids, language):
  """By trying each token: those that add bytes, or a first one that is the tokenizer's own space."""
  before, found = bytes_of(tokenizer, ids), set()
  for token in range(tokenizer.vocab_size):
    special = token in tokenizer.special_tokens.values()
    after = bytes_of(tokenizer, [*ids, token])
    adds = after != before or (not ids and tokenizer.token_bytes(token) == b" ")
    if not special and adds and any(text.startswith(after) for text in language):
      found.add(token)
  return found | (set(tokenizer.eos_ids) if before in language else set())


def walk(tokenizer, constraint, language, rng):
  """Random tokens under the masks, each mask compared; the text that came of it, or None where the vocabulary lacks
  what must follow."""
  ids = []
  while True:
    allowed = ids_of(constraint)
    assert allowed == viable(tokenizer, ids, language), (ids, bytes_of(tokenizer, ids))
    if not allowed:
      assert constraint.error
      return None
    token = int(rng.choice(sorted(allowed)))
    if token in tokenizer.eos_ids:
      break
    ids.append(token)
    constraint.commit([token])
    if constraint.done:
      break
  return bytes_of(tokenizer, ids)


@pytest.fixture(scope="session")
def byte_wise_tok(any_tok):
  if not any_tok.is_bytes:
    pytest.skip("its tokens are no fixed bytes")
  return any_tok


def test_masks_of_a_choice_are_exact_with_every_tokenizer(byte_wise_tok):
  choices = [*CHOICES, "no"]
  start = vocabulary(byte_wise_tok).constraint(read_spec(choice=choices), byte_wise_tok.eos_ids)
  language = {text.encode() for text in choices}
  rng = np.random.default_rng(0)
  written = {walk(byte_wise_tok, start.copy(), language, rng) for _ in range(12)}
  assert len(written) > 3
  complete = all(len(byte_wise_tok.decode(byte_wise_tok.encode(text, add_bos=False))) == len(text) for text in choices)
  assert written <= (language if complete else language | {None})


@pytest.mark.parametrize(("prefix", "trim"), list(itertools.product([False, True], repeat=2)))
def test_the_tokenizers_own_space_is_no_text(piece_toks, prefix, trim):
  """SentencePiece drops a first space on decoding: 'x' may start as '▁x', ' x' only as '▁▁x'."""
  tokenizer = piece_toks[prefix, trim]
  start = vocabulary(tokenizer).constraint(read_spec(choice=["x", "I am"]), tokenizer.eos_ids)
  language = {b"x", b"I am"}
  rng = np.random.default_rng(1)
  for _ in range(12):
    assert walk(tokenizer, start.copy(), language, rng) in language
  spaced = {token for token in ids_of(start) if tokenizer.token_bytes(token).startswith(b" ")}
  assert bool(spaced) == (prefix or trim)


@pytest.mark.parametrize("pattern", ["(ab|a)c?", "x{1,3}y", "[a-c]{2}", "(é|漢)x", "a|b|", "he(re)?"])
def test_masks_of_a_regex_are_exact(byte_tok, spm_tok, pattern):
  words = ("".join(w) for n in range(5) for w in itertools.product("abcxyé漢ehr", repeat=n))
  language = {w.encode() for w in words if re.fullmatch(pattern, w)}
  rng = np.random.default_rng(2)
  for tokenizer in (byte_tok, spm_tok):
    start = vocabulary(tokenizer).constraint(read_spec(regex=pattern), tokenizer.eos_ids)
    for _ in range(4):
      assert walk(tokenizer, start.copy(), language, rng) in language


@pytest.mark.parametrize(
  "grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"', 'start: a\na: "(" a ")" | /x/']
)
def test_grammars_nest_in_lark_and_gbnf(byte_tok, grammar):
  constraint = vocabulary(byte_tok).constraint(read_spec(grammar=grammar), byte_tok.eos_ids)
  constraint.commit(list(b"((x"))
  assert ids_of(constraint) == {ord(")")}
  constraint.commit(list(b")"))
  assert not constraint.done
  constraint.commit(list(b")"))
  assert constraint.done
  assert ids_of(constraint) == set(byte_tok.eos_ids)


NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def test_C116_a_digit_needs_no_space_and_spaces_are_limited(byte_tok):
  digits, space = set(b"-0123456789"), ord(" ")
  constraint = vocabulary(byte_tok).constraint(read_spec(json_schema=NUMBER), byte_tok.eos_ids)
  constraint.commit(list(b'{"x":'))
  assert ids_of(constraint) == digits | set(b" \r\n")
  constraint.commit([space])
  assert ids_of(constraint) == digits
  constraint.rollback(1)
  constraint.commit(list(b"\n"))
  for _ in range(100):
    if space not in ids_of(constraint):
      break
    constraint.commit([space])
  assert ids_of(constraint) == digits
  compact = vocabulary(byte_tok).constraint(
    read_spec(json_schema={**NUMBER, "x-guidance": {"whitespace_flexible": False}})
  )
  compact.commit(list(b'{"x":'))
  assert ids_of(compact) == digits


def test_a_schema_may_be_text_and_true_allows_any_json(byte_tok):
  texts = vocabulary(byte_tok)
  assert read_spec(json_schema="true") == read_spec(json_schema={}) == read_spec(json_schema=True)
  constraint = texts.constraint(read_spec(json_schema=True), byte_tok.eos_ids)
  constraint.commit(list(b'{"a": [1, null]}'))
  assert constraint.done


@given(data=st.data())
def test_rollback_is_as_if_never_committed(spm_tok, data):
  """What speculation needs: past the end of the text, over the tokenizer's own space, to the very start."""
  start = _spm_constraint(spm_tok).copy()
  taken = []
  one = start.copy()
  for _ in range(data.draw(st.integers(1, 6))):
    token = data.draw(st.sampled_from(sorted(ids_of(one))))
    one.commit([token])
    taken.append(token)
    if one.done:
      break
  count = data.draw(st.integers(0, len(taken)))
  one.rollback(count)
  other = start.copy()
  other.commit(taken[: len(taken) - count])
  assert ids_of(one) == ids_of(other)
  assert one.done == other.done
  with pytest.raises(ValueError, match="rollback wants 0"):
    one.rollback(len(taken) + 1)


@given(data=st.data())
def test_masks_ahead_are_those_after_each_guess(spm_tok, data):
  """Up to one that may not come or that nothing can follow; nothing is forbidden after it. The text stays as it is."""
  text, size = _spm_constraint(spm_tok).copy(), spm_tok.vocab_size + SPARE
  for _ in range(data.draw(st.integers(0, 2))):
    text.commit([data.draw(st.sampled_from(sorted(ids_of(text) - set(spm_tok.eos_ids)) or [0]))])
    assume(not text.done and text.error is None)
  guesses, other = [], text.copy()
  for _ in range(data.draw(st.integers(0, 4))):
    any_token, fitting = st.integers(0, size - 1), sorted(ids_of(other)) if not other.done else []
    guesses.append(data.draw(st.one_of(any_token, st.sampled_from(fitting)) if fitting else any_token))
    if guesses[-1] in fitting:
      other.commit(guesses[-1:])
  before, told = ids_of(text), text.masks(guesses)
  assert len(told) == len(guesses) + 1
  other = text.copy()
  for number, mask in enumerate(told):
    np.testing.assert_array_equal(mask, other.mask())
    if number == len(guesses) or guesses[number] not in ids_of(other):
      break
    other.commit([guesses[number]])
    if other.done:
      break
  assert (told[number + 1 :] == 2**32 - 1).all()
  assert (ids_of(text), text.error, text.done) == (before, None, False)


_kept = {}


def _spm_constraint(tokenizer):
  if not _kept:
    _kept[0] = vocabulary(tokenizer).constraint(read_spec(choice=["x", "te", "text", "I am"]), tokenizer.eos_ids)
  return _kept[0]


def test_special_tokens_are_no_text(byte_tok):
  """<eos> as a text is written in letters; <tool>, which is shown, may also come as its token."""
  constraint = vocabulary(byte_tok).constraint(read_spec(choice=["<eos>", "<tool>"]), byte_tok.eos_ids)
  assert ids_of(constraint) == {ord("<"), 260}
  control = vocabulary(byte_tok).constraint(read_spec(grammar='start: "x" <pad>'), byte_tok.eos_ids)
  control.commit([ord("x")])
  assert ids_of(control) == {256}, "a grammar may name one"


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ({"regex": "a("}, "regex cannot be used: .*unclosed group"),
    ({"regex": "(?=a)b"}, "look-ahead"),
    ({"regex": r"[^\s\S]"}, "regex allows no text at all"),
    ({"regex": ""}, "regex must be a text that is not empty"),
    ({"grammar": "start: foo"}, r"at 1\(8\): unknown name: \"foo\""),
    ({"grammar": "foo: /a/"}, "no start rule"),
    ({"grammar": 'start: "x" a\na: "y" a\n%%'}, "grammar cannot be used"),
    ({"grammar": "root ::= ("}, "cannot be read"),
    ({"grammar": "start: start"}, "grammar allows no text at all"),
    ({"json_schema": '{"type":'}, "not JSON: Expecting value"),
    ({"json_schema": 3}, "must be a mapping"),
    ({"json_schema": {"type": {3}}}, "must be plain data"),
    ({"json_schema": False}, "Unsatisfiable schema: schema is false"),
    ({"json_schema": {"enum": []}}, "Unsatisfiable"),
    ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
    ({"json_schema": {"not": {}}}, "Unimplemented keys.*not"),
    ({"json_schema": {"type": "strng"}}, "strng"),
    ({"choice": []}, "at least one"),
    ({"choice": "yes"}, "list of texts"),
    ({"choice": ["yes", ""]}, "not empty"),
    ({"choice": ["yes", 1]}, "got 1"),
    ({"choice": ["yes"], "regex": "a"}, "one constraint, got regex and choice"),
  ],
)
def test_what_is_malformed_or_allows_nothing_is_refused(byte_tok, given, words):
  with pytest.raises(ValueError, match=words):
    vocabulary(byte_tok).constraint(read_spec(**given))


def test_a_tokenizer_that_cannot_serve_is_refused(word_tok, make_bytes):
  with pytest.raises(ValueError, match="tokens stand for fixed bytes"):
    vocabulary(word_tok)
  letters = make_bytes(**{"ggml.tokens": ["a", "b", "<eos>"], "ggml.token_type": [1, 1, 3], "ggml.eos_token_id": 2,
                          "ggml.merges": [], "ggml.bos_token_id": None, "ggml.padding_token_id": None})  # fmt: skip
  with pytest.raises(ValueError, match="this tokenizer could begin"):
    vocabulary(letters).constraint(read_spec(regex="[0-9]"))
  stuck = vocabulary(letters).constraint(read_spec(regex="a[0-9]"))
  stuck.commit([0])
  assert ids_of(stuck) == set()
  assert stuck.error == "no token of the vocabulary can follow"
