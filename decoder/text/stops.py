"""Where does generated text end, if strings rather than tokens say so?

Text comes in deltas that know nothing of stop strings. Only the longest suffix that may still become a stop is held
back, so a stop is found across any borders, no part of one is ever emitted, and text that cannot be one is emitted at
once.
"""

import re
from collections.abc import Sequence


class Stops:
  """Cuts a stream of text at the stop string that is completed first; of two completed at once the longer counts.

  `include_stop` keeps the stop in the text. `markers` are strings that arrive in one piece (texts of special tokens):
  the border between what is emitted and what is held never lies inside one. One object per stream.
  """

  def __init__(self, stops: Sequence[str], *, include_stop: bool = False, markers: Sequence[str] = ()):
    if isinstance(stops, str):
      raise ValueError(f"stops: wanted a sequence of strings, got the string {stops!r}; pass [{stops!r}]")
    for stop in stops:
      if not isinstance(stop, str) or not stop:
        raise ValueError(f"stops: wanted non-empty strings, got {stop!r}; leave it out")
    self._stops = tuple(dict.fromkeys(stops))
    self._include_stop = include_stop
    self._longest = max(map(len, self._stops), default=0)
    self._marker = _any_of(markers)
    self._longest_marker = max(map(len, markers), default=0)
    self._held = ""
    self._fired: str | None = None

  def feed(self, delta: str, *, match: bool = True) -> tuple[str, str | None]:
    """(text now safe to emit, the stop that fired or None). After a stop has fired there is no more text.

    match: False lets stops that `delta` completes pass; one that it only begins may still fire later.
    """
    if self._fired is not None:
      return "", self._fired
    text = self._held + delta
    found = self._first_completed(text, len(self._held)) if match else None
    if found is not None:
      start, end = found
      self._fired, self._held = text[start:end], ""
      return text[:end] if self._include_stop else text[:start], self._fired
    border = self._whole_marker_border(text, len(text) - self._possible_stop_length(text))
    self._held = text[border:]
    return text[:border], None

  def finish(self) -> str:
    """The held text, which did not become a stop; the stream is over."""
    text, self._held = self._held, ""
    return text

  def _first_completed(self, text: str, border: int) -> tuple[int, int] | None:
    """Start and end of the stop that ends first after `border`."""
    starts = [(text.find(stop, max(0, border - len(stop) + 1)), len(stop)) for stop in self._stops]
    ends = [(start + length, start) for start, length in starts if start >= 0]
    if not ends:
      return None
    end, start = min(ends)
    return start, end

  def _possible_stop_length(self, text: str) -> int:
    for length in range(min(self._longest - 1, len(text)), 0, -1):
      suffix = text[-length:]
      if any(stop.startswith(suffix) for stop in self._stops):
        return length
    return 0

  def _whole_marker_border(self, text: str, border: int) -> int:
    if border == len(text) or self._marker is None:
      return border
    for match in self._marker.finditer(text, max(0, border - self._longest_marker)):
      if match.start() < border < match.end():
        return match.start()
    return border


def _any_of(strings: Sequence[str]) -> re.Pattern[str] | None:
  longest_first = sorted(filter(None, set(strings)), key=lambda string: (-len(string), string))
  return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
