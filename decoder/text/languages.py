"""Which languages does a translator know, and how is it told of them?

There are two conventions. M2M-100 and NLLB have a token for each language: the source's comes before its text, the
target's is what the translation begins with. Marian's models of several targets have tokens such as >>fra<<, one of
which comes before the source.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_CODE = re.compile(r"__([a-z_]+)__|([a-z]{3}_[A-Z][a-z]{3})")  # __en__, eng_Latn
_MARK = re.compile(r">>(\w+)<<")


class Languages(NamedTuple):
  """codes: token of each language that is named on both sides; marks: of each target that is named before the source.
  A model without either knows one pair of languages, or is told in words."""

  codes: Mapping[str, int]
  marks: Mapping[str, int]

  @classmethod
  def among(cls, tokens: Iterable[str]) -> "Languages":
    """Those that a vocabulary, in the order of its ids, has tokens for."""
    codes, marks = {}, {}
    for number, token in enumerate(tokens):
      if match := _CODE.fullmatch(token):
        codes[match[1] or match[2]] = number
      elif match := _MARK.fullmatch(token):
        marks[match[1]] = number
    return cls(codes, marks)

  def code(self, setting: str, name: str) -> int:
    """The token of a language. ValueError naming the nearest one that is known."""
    return _known(setting, name, self.codes)

  def mark(self, setting: str, name: str) -> int:
    """The token that asks for a language, likewise."""
    return _known(setting, name, self.marks)


def _known(setting: str, name: str, known: Mapping[str, int]) -> int:
  found = known.get(name.strip("_") if isinstance(name, str) else name)
  if found is not None:
    return found
  near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
  hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known)[:8])}, …"
  raise ValueError(f"{setting}: this model knows no language {name!r}; {hint}")
