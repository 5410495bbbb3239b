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

# Of M2M-100 (arXiv:2010.11125) and of the WMT21 models made of it, in the order of their tokens.
_M2M_100 = (
  "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id "
  "ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si "
  "sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
_WMT21 = "en ha is ja cs ru zh de"


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


def is_code(token: str) -> bool:
  """Whether a token of a vocabulary stands for a language that a text is in."""
  return _CODE.fullmatch(token) is not None


def tokens_of_m2m_100(language_codes: str) -> tuple[str, ...]:
  """What comes after the vocabulary, where no file lists it; language_codes: of tokenizer_config.json."""
  known = {"m2m100": _M2M_100, "wmt21": _WMT21}
  if language_codes not in known:
    raise ValueError(
      f"tokenizer_config.json: language_codes must be one of {', '.join(known)}, got {language_codes!r}; list the "
      "language tokens as additional_special_tokens in special_tokens_map.json"
    )
  return tuple(f"__{code}__" for code in known[language_codes].split())


def _known(setting: str, name: str, known: Mapping[str, int]) -> int:
  found = known.get(name.strip("_") if isinstance(name, str) else name)
  if found is not None:
    return found
  near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
  hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known)[:8])}, …"
  raise ValueError(f"{setting}: this model knows no language {name!r}; {hint}")
