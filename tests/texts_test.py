"""Settings that take texts where a model has ids: bad words and DRY's breakers."""

import pytest
from fixtures import Letters, facade, rescript, script_lm

from decoder import Settings
from decoder.sampling import SamplingSettings

HELLO = [ord(c) - ord("A") for c in "HELLO"]


@pytest.fixture(scope="module")
def byte_words():
  """A token a byte, and "Ġx"."""
  from text.conftest import byte_metadata

  from decoder.text import tokenizer_from_gguf

  return tokenizer_from_gguf(byte_metadata())


@pytest.fixture(scope="module")
def hello():
  return rescript(facade(*script_lm([0] * 64, 3, size=62), Letters.build()), [*HELLO, Letters.EOS])


def test_a_bad_word_is_forbidden_as_the_tokenizer_writes_it(hello):
  assert hello.generate("AB").text == "HELLO", "negative control"
  by_text = hello.generate("AB", bad_words=["LL", [HELLO[0]]], max_new_tokens=5)
  by_ids = hello.generate("AB", bad_words=[HELLO[2:4], HELLO[:1]], max_new_tokens=5)
  assert by_text.token_ids == by_ids.token_ids
  assert "LL" not in by_text.text
  assert by_text.settings.bad_words == ((HELLO[2], HELLO[2]), (HELLO[0],)), "what it was is told as ids"
  assert hello.generate("AB", by_text.settings).token_ids == by_text.token_ids


def test_with_a_space_before_it_where_the_tokenizer_has_that(byte_words):
  assert byte_words.spellings("x") == [(120,), (259,)], "x and Ġx"
  assert byte_words.spellings(" x") == [(259,)]
  assert byte_words.spellings("é") == [(0xC3, 0xA9), (32, 0xC3, 0xA9)]
  assert byte_words.spellings("\n") == [(10,)]
  bare = Letters.build()
  assert bare.spellings("AB") == [(0, 1)], "no token has a space"


def test_breakers_are_single_tokens(byte_words):
  def spell(name, text):
    return byte_words.spellings(text)

  assert SamplingSettings(dry_breakers=[3, "\n", "x"]).encoded(spell).dry_breakers == (3, 10, 120, 259)
  with pytest.raises(ValueError, match=r"dry_breakers must be single tokens, got 'ab', which has 2"):
    SamplingSettings(dry_breakers=["ab"]).encoded(spell)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(bad_words=["é"]), "^bad_words: the tokenizer has no tokens for all of 'é'"),
    (dict(bad_words=["Aé"]), "^bad_words: the tokenizer has no tokens for all of 'Aé'"),
    (dict(dry_breakers=[" "], dry_multiplier=1.0), "^dry_breakers: the tokenizer has no tokens for all of ' '"),
    (dict(bad_words=[""]), "^bad_words must hold texts of at least one character"),
    (dict(bad_words="abc"), "^bad_words must be a list"),
    (dict(bad_words=[["a"]]), "^bad_words must hold token ids"),
    (dict(order=("temperature",), bad_words=["A"]), "order has no transform for bad_words"),
    (dict(preset="mlx", bad_words=["A"]), "preset 'mlx' has no transform for bad_words"),
  ],
)
def test_texts_that_cannot_be_are_refused_by_name(hello, changes, message):
  with pytest.raises(ValueError, match=message):
    hello.generate("AB", **changes)


def test_texts_need_a_tokenizer_and_a_model():
  with pytest.raises(ValueError, match="came without a tokenizer"):
    facade(*script_lm([0], 3)).generate([1, 2, 3], bad_words=["A"])
  asked = Settings(bad_words=["A", [2]], dry_breakers=["B"])
  with pytest.raises(ValueError, match="hold texts"):
    asked.chain()
  assert asked.describe()["bad_words"] == ["A", [2]]
  assert asked.describe()["chain"][0] == {"name": "bad_words", "bad_words": ["A", [2]]}


@pytest.mark.slow
def test_texts_in_streams_and_sessions(hello):
  want = hello.generate("AB", bad_words=["LL"], max_new_tokens=5).text
  for stream in (hello.stream, hello.session().stream):
    assert "".join(stream("AB", bad_words=["LL"], max_new_tokens=5)) == want
