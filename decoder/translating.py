"""Texts translated line by line, however many there are: lines of like length together, results in the lines' order.

A window of lines is planned at once, by its texts and the settings alone, so that whoever was stopped plans the same
again and goes on. What a batch may hold is bounded, and lengths come in powers of two, so few programs are compiled.
"""

import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from decoder.journal import Journal
from decoder.programs import SMALLEST_CHUNK, bucket
from decoder.result import Result
from decoder.settings import Settings
from decoder.translator import Translator

WINDOW = 1000  # lines: enough that a batch finds lines of like length, few enough to wait for on a stream
BATCH_TOKENS = 16384
_LONGER, _LEAST = 3, 15  # where no limit is given: so many times what was read, and so many more
# What ends a sentence: marks before a space, with closing quotes and brackets; those of Chinese and Japanese need none.
_END = re.compile(r"[.!?…؟।]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*")


class Part(NamedTuple):
  """What the encoder reads at once. length: in tokens, those of languages and its end among them."""

  text: str
  length: int


class Line(NamedTuple):
  """parts: numbers of those it consists of, none for an empty line; lines of one text share them."""

  source: str
  parts: tuple[int, ...]


class Window(NamedTuple):
  """batches: numbers of parts that are translated together, the longest first."""

  lines: tuple[Line, ...]
  parts: tuple[Part, ...]
  batches: tuple[tuple[int, ...], ...]


class Translation(NamedTuple):
  """text: without spaces around it. score: Σ log p / length^length_penalty of what was written, see docs/beams.md; None
  where nothing was. finish_reason: as in Result. Of several parts: the mean, and the first reason that is not 'stop'.
  """

  text: str
  score: float | None
  finish_reason: str


@dataclasses.dataclass(frozen=True)
class Lines:
  """How lines are translated.

  settings: for all lines; where max_new_tokens is None, a part is given three times the tokens that were read (their
  number rounded up to a power of two, at least 16) and 15 more. batch_tokens: most tokens that the rows of a batch may
  hold, those read and those of every beam, padding counted; one line may exceed it. split: cut a line that is beyond
  the context at the ends of its sentences. ValueError for what makes no sense.
  """

  lm: Translator
  settings: Settings
  batch_tokens: int = BATCH_TOKENS
  split: bool = False

  def __post_init__(self) -> None:
    if not isinstance(self.lm, Translator):
      raise ValueError(f"{self.lm.name} continues texts and translates none; name an encoder–decoder")
    if self.batch_tokens < 1:
      raise ValueError(f"batch_tokens must be at least 1, got {self.batch_tokens}")
    if self.settings.n != 1:
      raise ValueError(f"a line has one translation, got n={self.settings.n}; leave it out")

  def windows(self, lines: Iterable[str], where: Callable[[int], str] = "line {}".format) -> Iterator[Window]:
    """What to do, for WINDOW lines at a time. where: what to call the line of a number, from 1 on, in errors.
    ValueError for a line that cannot be translated and for settings that this model cannot follow, before any compute.
    """
    lines, first = iter(lines), 1
    while window := list(itertools.islice(lines, WINDOW)):
      yield self._plan(window, where, first)
      first += len(window)

  def _plan(self, lines: Sequence[str], where: Callable[[int], str], first: int) -> Window:
    parts: list[Part] = []
    found: dict[str, int] = {}
    planned = []
    for number, source in enumerate(lines, first):
      numbers = []
      for part in self._parts(source, where, number):
        place = found.get(part.text) if self.settings.temperature == 0 else None  # drawn texts differ
        if place is None:
          place = found[part.text] = len(parts)
          parts.append(part)
        numbers.append(place)
      planned.append(Line(source, tuple(numbers)))
    for part in {self._new(part.length): part for part in parts}.values():
      self.lm.requests([part.text], self._settings_for(part.length))
    return Window(tuple(planned), tuple(parts), tuple(self._batches(parts)))

  def translate(
    self,
    window: Window,
    done: dict[int, Translation] | None = None,
    keep: Callable[[dict[int, Translation], list[Result]], None] = lambda translations, results: None,
  ) -> Iterator[tuple[str, Translation]]:
    """Each line and its translation, as soon as all lines before it are done. done: parts that are, by number. keep:
    told of each batch, by part and as results, before any of it is given out."""
    done, written = dict(done or {}), 0
    for batch in ((), *window.batches):
      if not all(number in done for number in batch):
        results = self._results([window.parts[number] for number in batch])
        translations = {number: _translation(result) for number, result in zip(batch, results)}
        keep(translations, results)
        done |= translations
      while written < len(window.lines) and all(number in done for number in window.lines[written].parts):
        line = window.lines[written]
        yield line.source, _joined([done[number] for number in line.parts])
        written += 1

  def rows(self, length: int) -> int:
    """Of a batch whose longest part has so many tokens: the largest power of two that keeps to batch_tokens."""
    tokens = bucket(length, SMALLEST_CHUNK) + self.settings.num_beams * self._new(length)
    return 1 << max(self.batch_tokens // tokens, 1).bit_length() - 1

  def _parts(self, source: str, where: Callable[[int], str], number: int) -> list[Part]:
    length = self.lm.length(source, self.settings)
    if length <= self.lm.context:
      return [Part(source, length)] if length else []
    if not self.split:
      raise ValueError(
        f"{where(number)} has {length} tokens, {self.lm.name} reads at most {self.lm.context}; shorten it, or split it "
        "at the ends of its sentences (--split)"
      )
    parts = self._cut(source)
    longest = max(part.length for part in parts)
    if longest > self.lm.context:
      raise ValueError(
        f"{where(number)} has a sentence of {longest} tokens, {self.lm.name} reads at most {self.lm.context}; break it "
        "up"
      )
    return [part for part in parts if part.length]

  def _cut(self, source: str) -> list[Part]:
    """As many sentences in each part as fit, at least one."""
    texts = [""]
    for sentence in _sentences(source):
      if texts[-1] and self.lm.length(texts[-1] + sentence, self.settings) > self.lm.context:
        texts.append("")
      texts[-1] += sentence
    return [Part(text.strip(), self.lm.length(text, self.settings)) for text in texts]

  def _batches(self, parts: Sequence[Part]) -> Iterator[tuple[int, ...]]:
    order, start = sorted(range(len(parts)), key=lambda number: -parts[number].length), 0
    while start < len(order):
      rows = self.rows(parts[order[start]].length)
      yield tuple(order[start : start + rows])
      start += rows

  def _results(self, parts: Sequence[Part]) -> list[Result]:
    each = [self._settings_for(part.length) for part in parts]
    return [group[0] for group in self.lm.answer(self.lm.requests([part.text for part in parts], each))]

  def _settings_for(self, length: int) -> Settings:
    """With its own limit, and a cache that is no larger than it; a score where a search does not make one."""
    s, new = self.settings, self._new(length)
    capacity = min(bucket(1 + new, SMALLEST_CHUNK), self.lm.context) if s.capacity is None else s.capacity
    logprobs = 0 if s.logprobs is None and not s.searches else s.logprobs
    return dataclasses.replace(s, max_new_tokens=new, capacity=capacity, logprobs=logprobs)

  def _new(self, length: int) -> int:
    new = self.settings.max_new_tokens
    if new is None:
      new = max(_LONGER * bucket(length, SMALLEST_CHUNK) + _LEAST, self.settings.min_new_tokens)
    return min(new, self.lm.context - 1)


def translate_windows(
  job: Lines, windows: Iterable[Window], journal: Journal | None, heard: Callable[[list[Result]], None]
) -> Iterator[tuple[str, Translation]]:
  """The lines of all windows in order, each with its translation. journal: what was done before, and where to keep what
  is done; None keeps nothing. heard: told of each batch's results."""
  known: dict[int, dict[int, Translation]] = {}
  for window, translations in journal.records if journal else ():
    known.setdefault(window, {}).update({part: Translation(*told) for part, told in translations})
  for number, window in enumerate(windows):

    def keep(translations: dict[int, Translation], results: list[Result], number: int = number) -> None:
      if journal:
        journal.add((number, tuple(translations.items())))
      heard(results)

    yield from job.translate(window, known.pop(number, None), keep)


def _translation(result: Result) -> Translation:
  score = result.score
  if score is None and result.logprobs:
    score = sum(token.logprob for token in result.logprobs) / len(result.logprobs)
  return Translation(result.text.strip(), score, result.finish_reason)


def _joined(parts: Sequence[Translation]) -> Translation:
  """The translation of a line; without a space after a character of a script that has none."""
  text = ""
  for part in parts:
    wide = text and unicodedata.east_asian_width(text[-1]) in "WF"
    text += part.text if wide or not text else f" {part.text}"
  scores = [part.score for part in parts if part.score is not None]
  reasons = [part.finish_reason for part in parts if part.finish_reason != "stop"]
  return Translation(text, sum(scores) / len(scores) if scores else None, reasons[0] if reasons else "stop")


def _sentences(text: str) -> list[str]:
  """What a text consists of, each with the space after it."""
  cuts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
  return [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]
