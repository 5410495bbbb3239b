"""The view of a Result: everything a model wrote is escaped and well-formed, whatever its tokens are."""

import dataclasses
import html.parser
import math
import re

import pytest
from fixtures import Letters, facade, rand_lm

import decoder
from decoder.result import Alternative, Change, Explanation, Result, TokenLogprob
from decoder.settings import Settings
from decoder.view import show, visible

TOKENS = [
  b"<script>alert(1)</script>", b"\n", "é".encode()[:1], "é".encode()[1:], b"\xff", b"<|im_end|>",
  b'"&\x00\x1b', "\u202eabc".encode(), b" the",
]  # fmt: skip
ELEMENTS = {"html", "head", "meta", "title", "body", "style", "div", "span", "table", "tr", "td"}


def result_of(tokens, **more):
  def alternative(data, number, logprob):
    return Alternative(data.decode("utf-8", "replace"), data, number, logprob)

  told = tuple(
    TokenLogprob(data.decode("utf-8", "replace"), data, number, -0.5 * number, 1 + number,
                 (alternative(b"<b>", 90, -0.1), alternative(b"' onload='x", 91, -math.inf)))
    for number, data in enumerate(tokens)
  )  # fmt: skip
  fields = {f.name: None for f in dataclasses.fields(Result)}
  ids = tuple(range(len(tokens)))
  return Result(**{**fields, "token_ids": ids, "finish_reason": "stop", "settings": Settings(logprobs=2),
                   "logprobs": told, **more})  # fmt: skip


class Checker(html.parser.HTMLParser):
  """Which elements there are and whether each is closed in order; text outside the cards."""

  def __init__(self, page):
    super().__init__()
    self.open, self.seen, self.text, self.attributes = [], [], [], set()
    self.feed(page)
    self.close()

  def handle_starttag(self, tag, attributes):
    self.seen.append(tag)
    self.attributes |= {name for name, _ in attributes}
    if tag != "meta":
      self.open.append((tag, dict(attributes).get("class")))

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    classes = [name for _, name in self.open]
    if "decoder-view" in classes and "card" not in classes and "note" not in classes:
      self.text.append(data)


def test_markup_in_tokens_is_text():
  page = show(result_of(TOKENS)).page()
  checked = Checker(page)
  assert checked.open == []
  assert set(checked.seen) <= ELEMENTS
  assert checked.attributes <= {"lang", "charset", "style", "class", "dir", "tabindex"}
  text = "".join(checked.text)
  assert text.startswith("<script>alert(1)</script>↵\n⟨c3⟩é�<|im_end|>")
  assert text.endswith(" the")
  assert '"&␀␛' in text
  assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", page)
  assert "src=" not in page
  assert "http" not in page
  assert len(re.findall('class="card"', page)) == len(TOKENS)
  assert Checker(page.replace("&lt;script&gt;alert", "<script>alert")).seen != checked.seen, "negative control"


def test_colours_follow_probability():
  page = show(result_of([b"a"] * 20))._repr_html_()
  depths = [float(x) for x in re.findall(r"225, 95, 0, ([\d.]+)", page)][5:]  # the legend comes first
  assert depths == sorted(depths)
  assert (depths[0], depths[-1]) == (0.0, 0.75)
  assert "0.00 %" in page, "an impossible alternative"


def test_cards_are_drawn_whole():
  html = show(result_of([b"a"] * 2))._repr_html_()
  assert "opacity" not in html, "it would make a layer of the prompt, and later tokens would be drawn over its cards"
  assert re.search(r'<div style="padding: 0 \d+em \d+em 0"><div class="decoder-view"', html), "room beside the last"


@pytest.fixture(scope="module")
def told():
  lm = facade(*rand_lm(), Letters.build())
  return lm.generate("ABC", logprobs=2, explain=True, temperature=1.0, top_k=4, max_new_tokens=5, seed=1)


def test_a_real_result_shows_and_prints(told):
  page = decoder.show([told, told]).page()
  assert Checker(page).open == []
  assert page.count("top_k") >= len(told.logprobs)
  lines = str(show(told)).splitlines()
  assert sum("rank" in line for line in lines) == len(told.logprobs)
  assert any(re.search(r"top_k +4 +5\d ", line) for line in lines)
  only = show(dataclasses.replace(told, logprobs=None))
  assert "top_k" in str(only)
  assert Checker(only.page()).open == []
  assert str(show([told, told])).count("──") == 4


def test_a_favourite_that_was_taken_is_said():
  change = Change("bad_words", 7, 1, True, 0.25)
  step = Explanation("x", 3, 0.2, 0.25, 7, (Change("masks", 8, 0, False, 0.2), change))
  text = str(show(result_of([b"x"], explanation=(step,))))
  assert re.search(r"bad_words +7 +1 +0.2500  took the most probable", text)
  assert "masks" not in text, "it changed nothing"
  page = show(result_of([b"x"], explanation=(step,))).page()
  row = '<td>kept</td><td>removed</td><td>then</td><td></td></tr><tr><td class="w">bad_words</td><td>7</td><td>1</td>'
  assert f"{row}<td>25.00 %</td><td>took the most probable</td>" in page


def test_what_tells_nothing_is_refused():
  with pytest.raises(ValueError, match="logprobs=5"):
    show(result_of([b"a"], logprobs=None))
  with pytest.raises(ValueError, match="Result"):
    show(["text"])


def test_without_a_tokenizer_ids_are_shown():
  assert visible(None, 17) == "#17"
  one = TokenLogprob(None, None, 17, -1.0, 2, ())
  assert "#17" in show(result_of([b"a"], logprobs=(one,))).page()
