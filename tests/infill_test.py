"""Code completion behind the façade: what is asked, and where the answer ends."""

import pytest
from fixtures import Letters, facade, rescript, script_lm

from decoder import Infill, Settings

BREAK, SPACE = 56, 57  # ids of "\n" and " " here


def coder(marks=("<fim_prefix>", "<fim_suffix>", "<fim_middle>")):
  """SCRIPT-LM with letters and marks: `say(text, prompt)` writes text after so many tokens, then an end token."""
  letters = [chr(ord("A") + i) for i in range(56)] + ["Ċ", "Ġ", "~"]
  tokens = [*letters, "<pad>", "<bos>", "<eos>", *marks, "<|endoftext|>"]
  tokenizer = Letters.build(
    **{
      "tokenizer.ggml.tokens": tokens,
      "tokenizer.ggml.token_type": [1] * 59 + [3] * (len(tokens) - 59),
      "tokenizer.ggml.add_bos_token": False,
    }
  )
  network, params = script_lm([0] * 128, 1, size=len(tokens))
  lm = facade(network, params, tokenizer)

  def say(text, prompt, end="<eos>"):
    ids = [*tokenizer.encode(text), tokenizer.find(end)]
    return rescript(lm, [0] * (prompt - 1) + ids)

  return say


@pytest.fixture(scope="module")
def code():
  return coder()


def test_a_prompt_of_two_parts_reads_prefix_suffix_middle(code):
  lm = code("XY", 6)
  result = lm.complete("AB", "C")
  mark = lm.tokenizer.find
  assert result.prompt_ids == (mark("<fim_prefix>"), 0, 1, mark("<fim_suffix>"), 2, mark("<fim_middle>"))
  assert (result.text, result.finish_reason, result.stop_reason) == ("XY", "stop", Letters.EOS)
  assert lm.generate(Infill("AB", "C")).text == "XY"
  assert "".join(lm.stream(Infill("AB", "C"))) == "XY"
  assert [r.text for r in lm.generate([Infill("AB", "C"), Infill("DE", "F")])] == ["XY", "XY"]
  assert code("XY", 2).complete("AB").prompt_ids == (0, 1)


@pytest.mark.parametrize("end", ["<|endoftext|>", "<fim_prefix>", "<fim_middle>"])
def test_what_such_models_write_after_an_answer_ends_it(code, end):
  lm = code("XY", 6, end)
  for changes in ({}, {"ignore_eos": True}):
    result = lm.complete("AB", "C", max_new_tokens=9, **changes)
    assert (result.text, result.stop_reason) == ("XY", lm.tokenizer.find(end))
  assert lm.generate([5] * 6, max_new_tokens=9).finish_reason == "length", "negative control"


def test_an_answer_ends_at_a_dedent_or_a_stop_string(code):
  prefix = "F\n  A"
  written = "B\n  C\n\n   D\nE"
  prompt = len(prefix) + 3 + 1
  lm = code(written, prompt)
  result = lm.complete(prefix, "X", stop_at_dedent=True)
  assert (result.text, result.finish_reason, result.stop_reason) == ("B\n  C\n\n   D", "stop", "dedent")
  assert lm.complete(prefix, "X").text == written
  both = lm.complete(prefix, "X", stop_at_dedent=True, stop=["D"])
  assert (both.text, both.stop_reason) == ("B\n  C\n\n   ", "D")
  stream = lm.stream(Infill(prefix, "X"), stop_at_dedent=True)
  assert "".join(stream) == result.text == stream.result.text
  assert code(written, len(prefix)).complete(prefix, stop_at_dedent=True).text == result.text
  empty = code("  B\n  C\nD", 2).complete("F\n", stop_at_dedent=True)
  assert (empty.text, empty.stop_reason) == ("  B\n  C", "dedent")
  cut = code("B\n ", len(prefix)).complete(prefix, stop_at_dedent=True)
  assert (cut.text, cut.stop_reason) == ("B\n ", Letters.EOS)


def test_what_cannot_be_says_why(code):
  lm = code("A", 1)
  plain = facade(*script_lm([0], 1, size=62), Letters.build())
  with pytest.raises(ValueError, match=r"no tokens for filling in the middle; looked for .*<fim_prefix>"):
    plain.complete("A", "B")
  with pytest.raises(ValueError, match="without a tokenizer"):
    facade(*script_lm([0], 1)).complete("A", "B")
  with pytest.raises(ValueError, match="shorten its prefix or suffix"):
    lm.complete("A" * 300, "B", truncate="left")
  with pytest.raises(ValueError, match=r"304 tokens, the context holds 256"):
    lm.complete("A" * 300, "B")
  with pytest.raises(ValueError, match="last line of a text, got a prompt of list"):
    lm.generate([1, 2], stop_at_dedent=True)
  with pytest.raises(ValueError, match="stop_at_dedent is found in text"):
    Settings(stop_at_dedent=True, detokenize=False)
  with pytest.raises(ValueError, match="stop_at_dedent must be"):
    Settings(stop_at_dedent=4)
  with pytest.raises(ValueError, match="wanted a string"):
    lm.complete("A", 3)
  with pytest.raises(ValueError, match="wanted a string"):
    lm.complete(None, "A")
