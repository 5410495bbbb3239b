"""Verse pairs of two public-domain Bibles: data for a small translator that needs no download but Debian's.

The modules are `sword-text-web` (World English Bible) and `sword-text-sparv` (Reina-Valera 1909), read with `pysword`;
`scripts/bible.py` tells how to get them.
"""

import re
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

from decoder.checkpoint.progress import progress_bar

WEB, REINA_VALERA = "engWEB2015eb", "spaRV1909eb"

# Books, not verses: a neighbour of a verse says half of it.
TEST_BOOKS = ("Ruth", "Jonah", "John", "James")
VALID_BOOKS = ("Esther", "Haggai", "Philippians")
SETS = ("train", "valid", "test")

# Footnotes, and headings but for a psalm's own, which the Spanish has in its text.
_UNSPOKEN = re.compile(r'<note\b.*?</note>|<title\b(?![^>]*canonical="true").*?</title>', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_BEFORE_MARK = re.compile(r"\s+([,.;:!?’”)\]])")
_AFTER_MARK = re.compile(r"([¡¿“‘(\[])\s+")
_SHOUTED = re.compile(r"^(\W*)((?:\w\s+)?)([A-ZÁÉÍÓÚÑ]{2,})(?=\W)")
_NAME = re.compile(r"(?<=[a-záéíóú] )[A-ZÁÉÍÓÚÑ][a-záéíóúñ]+")


class Verse(NamedTuple):
  book: str
  chapter: int
  number: int
  english: str
  spanish: str


def clean(osis: str) -> str:
  """The words of a verse in OSIS markup. What stands where a footnote was are two words, not one."""
  text = _TAG.sub("", re.sub(r"<(l|lg|div|lb|milestone)\b[^>]*>", " ", _UNSPOKEN.sub(" ", osis)))
  text = unicodedata.normalize("NFC", " ".join(text.replace("¶", " ").split()))
  return _AFTER_MARK.sub(r"\1", _BEFORE_MARK.sub(r"\1", text))


def quieted(texts: list[str]) -> list[str]:
  """Without the capitals in which chapters begin (EN el principio, Y ACONTECIÓ): of a word after the first, its first
  letter stays one if it is one within sentences, as names have it."""
  names = {name for text in texts for name in _NAME.findall(text)}

  def quiet(match: re.Match) -> str:
    word = match[3].capitalize()
    return match[1] + match[2] + (word if not match[2] or word in names else word.lower())

  return [_SHOUTED.sub(quiet, text) for text in texts]


def verses(directory: Path, progress: bool = True) -> list[Verse]:
  """Every verse that both have, in order. directory: of SWORD, with mods.d in it. ValueError for anything else."""
  english, spanish = (_opened(directory, name) for name in (WEB, REINA_VALERA))
  mine, theirs = ({book.osis_name: book for book in _books(module)} for module in (english, spanish))
  found, shared = [], [name for name in mine if name in theirs]
  with progress_bar(len(shared), "reading verses", progress, unit="book") as advance:
    for book, other in ((mine[name], theirs[name]) for name in shared):
      for chapter, counts in enumerate(zip(book.chapter_lengths, other.chapter_lengths), start=1):
        for number in range(1, min(counts) + 1):
          at = {"chapters": [chapter], "verses": [number], "clean": False}
          texts = clean(english.get(books=[book.name], **at)), clean(spanish.get(books=[other.name], **at))
          if all(texts):
            found.append(Verse(book.name, chapter, number, *texts))
      advance(1)
  english, spanish = quieted([verse.english for verse in found]), quieted([verse.spanish for verse in found])
  return [v._replace(english=mine, spanish=theirs) for v, mine, theirs in zip(found, english, spanish)]


def paired(found: list[Verse], least: float = 0.5, most: float = 2.0) -> list[Verse]:
  """Those that are likely to say the same. Editions number some chapters differently, and then one text is much longer
  than the other; a chapter where more than a fifth of the verses are so is left out as a whole. least, most: Spanish
  characters for one in English, relative to the usual."""
  usual = sum(len(verse.spanish) for verse in found) / sum(len(verse.english) for verse in found)

  def fits(verse: Verse) -> bool:
    return least <= len(verse.spanish) / len(verse.english) / usual <= most

  bad: dict[tuple, list[bool]] = {}
  for verse in found:
    bad.setdefault((verse.book, verse.chapter), []).append(not fits(verse))
  return [v for v in found if fits(v) and 5 * sum(bad[v.book, v.chapter]) <= len(bad[v.book, v.chapter])]


def set_of(verse: Verse) -> str:
  """Which of SETS a verse belongs to."""
  return "test" if verse.book in TEST_BOOKS else "valid" if verse.book in VALID_BOOKS else "train"


def _books(module: Any) -> list[Any]:
  """Old Testament, then New, each in order."""
  return [book for books in module.get_structure().get_books().values() for book in books]


def _opened(directory: Path, name: str) -> Any:
  try:
    from pysword.modules import SwordModules
  except ImportError as error:
    raise ValueError("reading SWORD modules needs pysword; run: pip install pysword") from error
  modules = SwordModules(str(directory))
  try:
    known = modules.parse_modules()
  except FileNotFoundError as error:
    raise ValueError(f"{directory} holds no SWORD modules: it must have a folder mods.d") from error
  if name not in known:
    raise ValueError(f"{directory} lacks the module {name}, it has {', '.join(sorted(known)) or 'none'}; see --help")
  return modules.get_bible_from_module(name)
