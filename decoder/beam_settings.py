"""What may be asked of a beam search, besides how probabilities come about."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from decoder.sampling import LogitTransform, SamplingSettings
from decoder.sampling.masks import padded_ids
from decoder.sampling.orders import SHAPING, build
from decoder.sampling.transforms import chain

MOST_BEAMS = 1024  # rows of one batch; more is a slip, and would not end
_NORMS = ("length", "gnmt")


@dataclasses.dataclass(frozen=True)
class BeamSettings(SamplingSettings):
  """num_beams: texts carried on together; 1 is none but the text itself. The n best hypotheses are given, n ≤
  num_beams, each with its score: the sum of log-probs over len^length_penalty, or over ((5 + len) / 6)^length_penalty
  where length_norm is 'gnmt'; len counts what was written and its end token. early_stopping: True stops at as many
  hypotheses as beams, times patience; False where the best live text would be no better if it ended now; 'never' where
  nothing better can come. A temperature above 0 draws the candidates instead of taking the best.
  num_beam_groups: groups that search one after the other, each avoiding what those before took at the same step, at a
  price of diversity_penalty a beam.
  forced_tokens: ids that the text begins with. continuations: lists of ids, or texts, one of which must come after
  that, and then an end token. These two need no num_beams.
  """

  num_beams: int = 1
  num_beam_groups: int = 1
  diversity_penalty: float = 0.0
  length_penalty: float = 1.0
  length_norm: str = "length"
  early_stopping: bool | str = False
  patience: float = 1.0
  forced_tokens: Sequence[int] = ()
  continuations: Sequence[Sequence[int] | str] | None = None

  may_hold_texts: ClassVar[tuple[str, ...]] = (*SamplingSettings.may_hold_texts, "continuations")

  @property
  def searches(self) -> bool:
    """Whether a text comes of a search."""
    return self.num_beams > 1 or bool(self.forced_tokens) or self.continuations is not None

  @property
  def structure(self) -> tuple:
    return (*super().structure, self.searches and (self.num_beams, self.num_beam_groups))

  def beam_chains(self, full: bool) -> tuple[LogitTransform, LogitTransform]:
    """The chain in two: what makes probabilities, and what forbids or forces tokens. Each keeps the order."""
    known = {**self.numbers(), "temperature": self.temperature or 1.0}
    law, limits = ([name for name in self.names if (name in SHAPING) == shapes] for shapes in (True, False))
    return chain(*self.transforms, *build(law, known, full)), chain(*build(limits, known, full))

  def encoded(self, spell: Callable[[str, str], Sequence[tuple[int, ...]]]) -> Self:
    """As in SamplingSettings; of a continuation's spellings the first, which has no space that its text has not."""
    if self.continuations is None:
      return super().encoded(spell)
    ids = [spell("continuations", one)[0] if isinstance(one, str) else one for one in self.continuations]
    return dataclasses.replace(super().encoded(spell), continuations=ids)

  def check_forced(self, ends: Sequence[int], room: int) -> None:
    """ValueError for what must be written, as ids, but does not fit in `room` tokens or cannot be ended."""
    if len(self.forced_tokens) > room:
      raise ValueError(f"forced_tokens are {len(self.forced_tokens)}, there is room for {room}; raise max_new_tokens")
    if self.continuations is None:
      return
    if not ends:
      raise ValueError("continuations are followed by an end token, and there is none; give stop_token_ids")
    for one in self.continuations:
      inside, size = [token for token in one if token in ends], len(self.forced_tokens) + len(one) + 1
      if inside:
        raise ValueError(f"continuations: {one!r} holds the end token {inside[0]}; it comes by itself, leave it out")
      if size > room:
        raise ValueError(f"continuations: {one!r} takes {size} tokens with its end, there is room for {room}")

  def check_vocabulary(self, size: int) -> None:
    super().check_vocabulary(size)
    listed = {
      "forced_tokens": self.forced_tokens,
      "continuations": [token for one in self.continuations or () for token in one],
    }
    for name, ids in listed.items():
      beyond = [token for token in ids if token >= size]
      if beyond:
        raise ValueError(f"{name} has token {beyond[0]}, but the model's tokens are 0 … {size - 1}")

  def _check_beams(self, n: int) -> None:
    """ValueError for numbers that make no sense, by themselves or together."""
    for name, most in (("num_beams", MOST_BEAMS), ("num_beam_groups", MOST_BEAMS)):
      value = getattr(self, name)
      if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer 1 … {most}, got {value!r}")
    for name, low, high in (("diversity_penalty", 0, 1e6), ("length_penalty", -5, 5), ("patience", 0, 1e6)):
      value = getattr(self, name)
      if not isinstance(value, numbers.Real) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number {low} … {high:g}, got {value!r}")
    if self.patience == 0 or math.isnan(self.patience):
      raise ValueError("patience must be above 0: a search that may stop at no hypothesis finds none")
    if self.length_norm not in _NORMS:
      raise ValueError(f"length_norm must be 'length' or 'gnmt', got {self.length_norm!r}")
    if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
      raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
    object.__setattr__(self, "forced_tokens", _ids("forced_tokens", self.forced_tokens))
    if self.continuations is not None:
      object.__setattr__(self, "continuations", _sequences(self.continuations))
    self._check_together(n)

  def _check_together(self, n: int) -> None:
    if self.num_beams % self.num_beam_groups:
      raise ValueError(f"num_beams {self.num_beams} is not a multiple of num_beam_groups {self.num_beam_groups}")
    if self.searches and n > self.num_beams:
      raise ValueError(f"n={n} hypotheses need as many beams, got num_beams={self.num_beams}; raise it")
    changed = [f.name for f in dataclasses.fields(BeamSettings) if f.name in _OF_BEAMS]
    unused = [name for name in changed if getattr(self, name) != _OF_BEAMS[name]]
    if unused and not self.searches:
      raise ValueError(f"{unused[0]} acts on a search alone; set num_beams to 2 or more")
    if self.diversity_penalty and self.num_beam_groups == 1:
      raise ValueError("diversity_penalty acts between groups; set num_beam_groups to 2 or more")
    if self.patience != 1 and self.early_stopping is not True:
      raise ValueError("patience acts where early_stopping is True; set it so, or leave patience at 1")


_OF_BEAMS = {
  "diversity_penalty": 0.0, "length_penalty": 1.0, "length_norm": "length", "early_stopping": False, "patience": 1.0,
}  # fmt: skip


def _ids(name: str, value: Any) -> tuple[int, ...]:
  if not isinstance(value, list | tuple):
    raise ValueError(f"{name} must be a list of token ids, integers ≥ 0, got {value!r}")
  padded_ids(name, tuple(value))
  return tuple(int(token) for token in value)


def _sequences(value: Any) -> tuple[tuple[int, ...] | str, ...]:
  if not isinstance(value, list | tuple) or not value:
    raise ValueError(f"continuations must be a list of at least one text or list of token ids, got {value!r}")
  return tuple(one if isinstance(one, str) else _ids("continuations", one) for one in value)
