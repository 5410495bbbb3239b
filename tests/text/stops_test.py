"""Laws of stop strings: streaming cuts where the whole text would be cut, and holds back no more than it must."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.text import Stops


def run(deltas, stops, **options):
  """(emitted pieces, fired) of a whole stream."""
  cutter = Stops(stops, **options)
  pieces, fired = [], None
  for delta in deltas:
    text, fired = cutter.feed(delta)
    pieces.append(text)
    if fired is not None:
      break
  return [*pieces, cutter.finish()], fired


def cut_whole(text, stops, include_stop=False):
  """The specification, character by character: the first end at which a stop is complete, the longest one there."""
  for end in range(1, len(text) + 1):
    complete = [stop for stop in stops if text[:end].endswith(stop)]
    if complete:
      stop = max(complete, key=len)
      return text[:end] if include_stop else text[: end - len(stop)], stop
  return text, None


def splits(text):
  for borders in itertools.product((False, True), repeat=len(text) - 1):
    edges = [0, *(i + 1 for i, border in enumerate(borders) if border), len(text)]
    yield [text[a:b] for a, b in itertools.pairwise(edges)]


def holds_within_law(deltas, stops):
  """Whether after each delta exactly the longest suffix that is a prefix of a stop is held (no stop fires)."""
  cutter, seen, emitted = Stops(stops), "", ""
  for delta in deltas:
    seen += delta
    emitted += cutter.feed(delta)[0]
    held = max(
      (n for n in range(len(seen) + 1) for stop in stops if n < len(stop) and seen.endswith(stop[:n])), default=0
    )
    if len(seen) - len(emitted) != held:
      return False
  return True


@pytest.mark.parametrize("chunks", [["DEF", "G", "HI", "J"], ["<", "|im_", "end", "|>"], ["漢", "字\n", "\n"]])
def test_c58_a_prefix_of_a_stop_is_not_emitted(chunks):
  stop = "".join(chunks)
  pieces, fired = run(chunks, [stop])
  assert "".join(pieces) == ""
  assert fired == stop


@pytest.mark.parametrize(
  ("text", "stop", "want"), [("xx###yy", "###", "xx"), ("ababac", "abac", "ab"), ("##-###", "###", "##-")]
)
def test_c59_multi_token_stop_in_stream(text, stop, want):
  for deltas in splits(text):
    pieces, fired = run(deltas, [stop])
    assert ("".join(pieces), fired) == (want, stop)


def test_c59_negative_control_looking_into_each_delta_alone_fails():
  assert any("".join(delta.partition("###")[0] for delta in deltas) != "xx" for deltas in splits("xx###yy"))


def test_c60_text_that_cannot_be_a_stop_is_emitted_at_once():
  cutter = Stops(["<|im_end|>"])
  assert cutter.feed("I ") == ("I ", None)
  assert cutter.feed("am <") == ("am ", None)
  assert cutter.feed("3") == ("<3", None)
  two = Stops(["\n\n", "###"])
  assert [two.feed(text)[0] for text in ("a\n", "b##", "", "\n", "c")] == ["a", "\nb", "", "##", "\nc"]
  nested = Stops(["aab"])
  assert [nested.feed(text)[0] for text in ("a", "a", "a", "c")] == ["", "", "a", "aac"]


def test_c60_negative_control_holding_a_fixed_length_breaks_the_law():
  assert holds_within_law(["I ", "am <", "3 <|i", "n"], ["<|im_end|>"])

  def fixed_length(deltas, stop):
    held = "".join(deltas)
    return held[: max(0, len(held) - len(stop) + 1)]

  assert fixed_length(["I "], "<|im_end|>") == ""  # where the law says "I "


@pytest.mark.parametrize(
  ("stops", "text", "at_once", "held"),
  [(["<|im_end|>"], "ab<|im", "ab", "<|im"), (["\n\n"], "end.\n", "end.", "\n"), (["###", "#!"], "##", "", "##")],
)
def test_c61_held_text_is_flushed_at_the_end(stops, text, at_once, held):
  cutter = Stops(stops)
  assert cutter.feed(text) == (at_once, None)
  assert cutter.finish() == held
  assert cutter.finish() == ""


@pytest.mark.parametrize("stop", [">>", "|>x", "eot|>!"])
def test_c62_a_marker_is_not_split_by_holding_back(stop):
  deltas = ["a", "<|eot|>", "b"]
  pieces, fired = run(deltas, [stop], markers=["<|eot|>", "<|e"])
  assert fired is None
  assert "".join(pieces) == "a<|eot|>b"
  assert any("<|eot|>" in piece for piece in pieces)
  without, _ = run(deltas, [stop])
  assert not any("<|eot|>" in piece for piece in without)  # negative control


@pytest.mark.parametrize(
  ("deltas", "stops", "kept", "fired"),
  [
    (["ab", "c#", "##d"], ["zz", "###"], "abc", "###"),
    (["one.\n", "\ntwo"], ["\n\n", "two"], "one.", "\n\n"),
    (["x<|e", "nd|>"], ["end", "<|end|>"], "x<|", "end"),
  ],
)
def test_c64_which_stop_fired_and_whether_it_stays(deltas, stops, kept, fired):
  for include, want in ((False, kept), (True, kept + fired)):
    pieces, got = run(deltas, stops, include_stop=include)
    assert ("".join(pieces), got) == (want, fired)


@pytest.mark.parametrize(
  ("early", "later", "text", "fired"),
  [
    ("ab", "cd", "abcd", None),
    ("xa", "b", "x", "ab"),  # begun early, completed later
    ("abab", "abx", "abab", "ab"),
    ("ab", "", "ab", None),
    ("a", "a", "aa", None),
  ],
)
def test_c54_a_stop_completed_too_early_passes(early, later, text, fired):
  for deltas in splits(early):
    cutter = Stops(["ab"])
    pieces = [cutter.feed(delta, match=False)[0] for delta in deltas]
    last, got = cutter.feed(later)
    assert ("".join([*pieces, last, cutter.finish()]), got) == (text, fired)


def test_c54_a_stop_within_what_is_held_for_a_longer_one_has_passed_too():
  cutter = Stops(["abcd", "bc"])
  assert cutter.feed("abc", match=False) == ("", None)
  assert cutter.feed("x") == ("abcx", None)


def test_after_a_stop_nothing_more_comes():
  cutter = Stops(["#"])
  assert cutter.feed("a#b") == ("a", "#")
  assert cutter.feed("c#") == ("", "#")
  assert cutter.finish() == ""


def test_the_earliest_completion_wins():
  assert run(["abcd"], ["abcd", "bc"]) == (["a", ""], "bc")
  assert run(["xabc"], ["bc", "abc"]) == (["x", ""], "abc")


@given(
  text=st.text("ab#", max_size=12),
  stops=st.lists(st.text("ab#", min_size=1, max_size=5), max_size=3),
  include=st.booleans(),
  data=st.data(),
)
def test_streaming_equals_the_whole_for_any_split(text, stops, include, data):
  borders = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
  edges = [0, *sorted(borders), len(text)]
  deltas = [text[a:b] for a, b in itertools.pairwise(edges)]
  markers = data.draw(st.lists(st.text("ab#", min_size=1, max_size=4), max_size=2))
  pieces, fired = run(deltas, stops, include_stop=include, markers=markers)
  assert ("".join(pieces), fired) == cut_whole(text, stops, include)


@given(text=st.text("ab#", max_size=20), stops=st.lists(st.text("ab#", min_size=1, max_size=5), max_size=3))
def test_exactly_the_possible_stop_is_held(text, stops):
  before, _ = cut_whole(text, stops)
  assert holds_within_law(list(before), stops) or cut_whole(before, stops)[1] is not None


@pytest.mark.parametrize("stops", ["###", [""], [3], [None]])
def test_what_is_no_list_of_stops_is_an_error(stops):
  with pytest.raises(ValueError, match="stops: wanted"):
    Stops(stops)


def test_without_stops_all_passes():
  assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)
