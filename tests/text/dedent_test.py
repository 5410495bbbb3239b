"""Laws of the end of a block: streaming cuts where the whole text would be cut, and holds back only what may be cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.text.dedent import Dedent, indentation


def run(deltas, indent, **options):
  """(text, whether it ended) of a whole stream."""
  block, pieces, ended = Dedent(indent), [], False
  for delta in deltas:
    text, ended = block.feed(delta, **options)
    pieces.append(text)
    if ended:
      break
  return "".join([*pieces, block.finish()]), ended


def cut_whole(text, indent):
  """The specification, line by line: the first line goes on in the prompt's, unless that one is empty."""
  lines = text.split("\n")
  for number, line in enumerate(lines):
    if not line.strip() or (number == 0 and indent is not None):
      continue
    width = len(line) - len(line.lstrip())
    indent = width if indent is None else indent
    if width < indent:
      return "\n".join(lines[:number]).rstrip("\n "), True
  return text, False


@pytest.mark.parametrize(
  ("text", "columns"),
  [
    ("", None), ("def f():\n", None), ("x", 0), ("  x", 2), ("def f():\n    ", 4), ("a\n  b\n    return ", 4),
    ("\tx", 8), ("  \tx", 8), ("if a:\r\n    b", 4),
  ],
)  # fmt: skip
def test_indentation_of_the_last_line(text, columns):
  assert indentation(text) == columns


@pytest.mark.parametrize(
  ("indent", "text", "kept"),
  [
    (4, "return 1\n\nprint(f())", "return 1"),
    (4, "if x:\n        a\n    else:\n        b\ndef g():", "if x:\n        a\n    else:\n        b"),
    (4, "a\n\n\n    b\n  c", "a\n\n\n    b"),
    (0, "a\nb\n\nc", None),
    (None, "    return 1\n\nprint", "    return 1"),
    (None, "\n\n  a\n  b\nc", "\n\n  a\n  b"),
    (None, "a\nb", None),
    (8, "a\n\tb\n    c", "a\n\tb"),
    (4, "a\r\n    b\r\nc", "a\r\n    b"),
    (4, "a\n  ", None),
    (4, "", None),
  ],
)
def test_a_block_ends_before_a_line_that_begins_left_of_it(indent, text, kept):
  assert run([text], indent) == (text if kept is None else kept, kept is not None)
  assert run(text, indent) == (text if kept is None else kept, kept is not None)


def test_only_what_may_be_cut_is_held_back():
  block = Dedent(4)
  seen = [(char, block.feed(char)[0]) for char in "a\n\n     b c\n  "]
  assert "".join(text for _, text in seen) == "a\n\n     b c"
  assert [text for _, text in seen if text] == ["a", "\n\n    ", " ", "b", " ", "c"]  # at column 4 it is inside
  assert block.finish() == "\n  "


def test_lines_pass_while_nothing_may_end():
  block = Dedent(4)
  assert block.feed("a\nb\n", match=False) == ("a\nb", False)
  assert block.feed("    c\nd") == ("\n    c", True)
  assert block.feed("e") == ("", True)


@given(text=st.text("ab \n", max_size=20), indent=st.one_of(st.none(), st.integers(0, 4)), data=st.data())
def test_any_split_gives_what_the_lines_say(text, indent, data):
  borders = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
  deltas = [text[a:b] for a, b in itertools.pairwise([0, *sorted(borders), len(text)])]
  got, ended = run(deltas, indent)
  want, wanted = cut_whole(text, indent)
  assert ended == wanted
  assert got.rstrip("\n ") == want.rstrip("\n ")
  assert got == (want if not ended else got)
  assert text.startswith(got)
