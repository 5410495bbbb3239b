"""What requests ask about their tokens: which inspections the device makes, and their answers as fields of a Result.

Rows decoded together share a program, so it makes the union of what they ask, with numbers of alternatives in few
sizes; each row is given what it asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from decoder.result import Alternative, Change, Explanation, TokenLogprob
from decoder.sampling import Logprobs, Together, explain, nothing, processed_logprobs, raw_logprobs
from decoder.settings import MOST_ALTERNATIVES, Settings

_SIZES = (0, 1, 5, 20, 100, MOST_ALTERNATIVES)  # numbers of alternatives that programs are compiled for
_POINTS = {"raw": raw_logprobs, "processed": processed_logprobs}


def inspection(each: Sequence[Settings], full: bool) -> Callable:
  """What to tell of each draw for rows of these settings under their full or short chain; equal for equal needs."""
  parts = []
  for mode, point in _POINTS.items():
    numbers = [number for settings in each for number in [_alternatives(settings, mode)] if number is not None]
    if numbers:
      parts.append((mode, point(size_for(max(numbers)))))
  if any(settings.explain for settings in each):
    parts.append(("explain", explain(each[0].chain(full))))
  return Together(tuple(parts)) if parts else nothing


def size_for(number: int) -> int:
  """The number of alternatives that is computed where `number` are wanted."""
  return next(size for size in _SIZES if size >= number)


def _alternatives(settings: Settings, mode: str) -> int | None:
  """How many the row needs at this point; None if it needs nothing there."""
  if settings.logprobs is not None and settings.logprobs_mode == mode:
    return settings.logprobs
  return 0 if settings.best_of is not None and mode == "raw" else None


class Report:
  """What was told of one row's tokens. links: names of the chain's transforms."""

  def __init__(self, settings: Settings, tokenizer: Any, links: Sequence[str]):
    self._settings, self._tokenizer, self._links = settings, tokenizer, ("masks", *links)
    self._ids: list[int] = []
    self._told: list[Any] = []  # pytrees of numpy, one a token
    self._prompt: tuple[TokenLogprob | None, ...] | None = None

  def add(self, ids: Sequence[int], details: Any) -> None:
    """ids: of drawn tokens; details: numpy leaves with one entry a token."""
    for index, token in enumerate(ids):
      self._ids.append(int(token))
      self._told.append(jax.tree.map(lambda leaf, index=index: leaf[index], details))

  def add_prompt(self, ids: Sequence[int], told: Any) -> bool:
    """told: `Told` with numpy leaves over the prompt's tokens but the first. Whether all logits were finite."""
    if not self._settings.prompt_logprobs:
      return True
    self._prompt = told_logprobs(ids[1:], told, self._settings.logprobs or 0, self._tokenizer)
    return None not in self._prompt

  def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
    """None for the first token, which nothing precedes, and for one before which the logits were not finite."""
    return (None, *self._prompt) if self._prompt is not None else None

  def logprobs(self) -> tuple[TokenLogprob, ...] | None:
    if self._settings.logprobs is None:
      return None
    return tuple(
      token_logprob(token, told[self._settings.logprobs_mode], self._settings.logprobs, self._tokenizer)
      for token, told in zip(self._ids, self._told)
    )

  def explanation(self) -> tuple[Explanation, ...] | None:
    if not self._settings.explain:
      return None
    return tuple(self._explain(token, told["explain"]) for token, told in zip(self._ids, self._told))

  def mean_logprob(self) -> float:
    """What best_of goes by: the mean raw log-prob of what was drawn, an end token included; −inf for nothing."""
    return float(np.mean([told["raw"].logprob for told in self._told], dtype=np.float64)) if self._told else -np.inf

  def _explain(self, token: int, told: Any) -> Explanation:
    columns = (told.kept_K, told.removed_K, told.best_removed_K, told.probability_K)
    changes = tuple(Change(*row) for row in zip(self._links, *(column.tolist() for column in columns)))
    text, _ = token_text(token, self._tokenizer)
    return Explanation(text, token, float(told.before), changes[-1].probability, changes[-1].kept, changes)


def token_logprob(token: int, told: Logprobs, number: int, tokenizer: Any) -> TokenLogprob:
  """One token's log-prob, with at most `number` of the alternatives told."""
  tops = zip(told.top_ids_C[:number].tolist(), told.top_logprobs_C[:number].tolist())
  alternatives = tuple(Alternative(*token_text(other, tokenizer), other, logprob) for other, logprob in tops)
  return TokenLogprob(*token_text(token, tokenizer), token, float(told.logprob), int(told.rank), alternatives)


def told_logprobs(ids: Sequence[int], told: Any, number: int, tokenizer: Any) -> tuple[TokenLogprob | None, ...]:
  """Of given tokens: one entry in `told` for each of them; None where the logits were not finite."""
  return tuple(
    token_logprob(token, jax.tree.map(lambda leaf, n=n: leaf[n], told.logprobs), number, tokenizer) if sound else None
    for n, (token, sound) in enumerate(zip(ids, told.sound_BT))
  )


def token_text(token: int, tokenizer: Any) -> tuple[str | None, bytes | None]:
  """A token's text and bytes; empty for ids that pad the vocabulary."""
  if tokenizer is None:
    return None, None
  data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
  return data.decode("utf-8", "replace"), data
