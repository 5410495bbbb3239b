"""What is left of a verse's markup, and which verses are taken for pairs."""

import pytest

from decoder.training.verses import Verse, clean, paired, quieted, set_of


@pytest.mark.parametrize(
  ("osis", "text"),
  [
    ('<w lemma="x">God</w><note><reference>1:1 </reference>Elohim.</note><w>created</w>', "God created"),
    ("<w>God</w><note>x</note>, who", "God, who"),
    ('<title canonical="true">A Psalm.</title> <l level="1"/>Yahweh, how', "A Psalm. Yahweh, how"),
    ("<title>Book One</title>Blessed <l/>is the man", "Blessed is the man"),
    ("many<l eID='1'/><l sID='2'/>are those", "many are those"),
    ("¡ <w>Oh</w> Jehová !", "¡Oh Jehová!"),
    ("a\u0301 su", "á su"),
    ("<w></w> ", ""),
  ],
)  # fmt: skip
def test_a_verse_is_its_words(osis, text):
  assert clean(osis) == text


def test_chapters_do_not_shout():
  texts = [
    "EN el principio",
    "Y ACONTECIÓ en los días",
    "Y JEHOVÁ dijo",
    "dijo Jehová á Moisés",
    "¡OH Jehová",
    "Á",
    "MAS",
  ]
  assert quieted(texts) == [
    "En el principio", "Y aconteció en los días", "Y Jehová dijo", "dijo Jehová á Moisés", "¡Oh Jehová", "Á", "MAS",
  ]  # fmt: skip


def verses(book, chapter, lengths):
  return [Verse(book, chapter, n, "x" * 40, "y" * length) for n, length in enumerate(lengths, start=1)]


def test_what_is_numbered_differently_is_left_out():
  good, odd = verses("Job", 1, [40] * 19 + [200]), verses("Numbers", 13, [10, 150, 40, 155, 40])
  kept = paired([*good, *odd])
  assert kept == good[:19], "one odd verse goes alone, many take their chapter along"
  assert paired(good[:19]) == good[:19]


def test_what_is_held_out_is_whole_books():
  assert [set_of(Verse(book, 1, 1, "", "")) for book in ("Ruth", "John", "I John", "Esther", "Mark")] == [
    "test", "test", "train", "valid", "train",
  ]  # fmt: skip
