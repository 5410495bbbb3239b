"""One request on the host: which ids it starts from, and how what is drawn for it becomes text."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from decoder.settings import Settings
from decoder.strategies import Finish
from decoder.text.constraints import Constraint
from decoder.text.stops import Stops


@dataclasses.dataclass
class Request:
  """prompt_ids: as they will be read. sample: the number of this one among the prompt's n. limit: length in tokens at
  which the row ends. ends: ids that end it. truncated: what Result says of it; at_limit: what, if the limit ends it.
  constraint: what the text must fit, as it stands at the start. negative_ids: the prompt that guidance leads away from;
  empty without."""

  prompt_ids: tuple[int, ...]
  settings: Settings
  seed: int
  sample: int
  limit: int
  ends: tuple[int, ...]
  truncated: str | None
  at_limit: str | None
  constraint: Constraint | None = None
  negative_ids: tuple[int, ...] = ()

  @property
  def guided(self) -> bool:
    return bool(self.negative_ids)

  @property
  def reach(self) -> int:
    """Tokens that a row of its cache must have room for."""
    return self.limit + max(0, len(self.negative_ids) - len(self.prompt_ids))


class Reader:
  """Turns one row's tokens into text; knows when it has ended. constraint: how the text stands against what it must
  fit; None for nothing."""

  def __init__(self, request: Request, tokenizer: Any):
    self.request = request
    self.token_ids: list[int] = []
    self.finish_reason: str | None = None
    self.stop_reason: str | int | None = None
    self.constraint = request.constraint.copy() if request.constraint else None
    self._parts: list[str] = []
    self._ends = frozenset(request.ends)
    self._detokenizer = tokenizer.detokenizer() if tokenizer else None
    self._stops = Stops(request.settings.stop, include_stop=request.settings.include_stop)

  @property
  def text(self) -> str:
    return "".join(self._parts)

  @property
  def done(self) -> bool:
    return self.finish_reason is not None

  def feed(self, ids: Iterable[int], finish: int) -> str:
    """New text for these tokens and the device's word on how the row stands after them."""
    deltas = []
    for token in ids:
      if self.done:  # drawn in the same call as the token that completed a stop string
        break
      deltas.append(self._feed_one(int(token)))
    if not self.done and finish == Finish.ERROR and self.constraint is not None:
      self.stop_reason = self.constraint.error
    if not self.done and finish != Finish.RUNNING:
      deltas.append(self.end({Finish.LENGTH: "length", Finish.ERROR: "error"}.get(Finish(finish), "cancelled")))
    return "".join(deltas)

  def end(self, reason: str) -> str:
    """Ends the row from outside; returns the text held back so far."""
    if self.done:
      return ""
    self.finish_reason = reason
    return self._take(self._detokenizer.finish() if self._detokenizer else "", last=True)

  def _feed_one(self, token: int) -> str:
    if token in self._ends:
      self.stop_reason = token
      return self.end("stop")
    self.token_ids.append(token)
    text = self._take(self._detokenizer.feed([token]) if self._detokenizer else "")
    if self.constraint is not None and not self.done:
      self.constraint.commit([token])
      text += self.end("stop") if self.constraint.done else ""
    return text

  def _take(self, delta: str, last: bool = False) -> str:
    text, fired = self._stops.feed(delta)
    if fired is not None:
      self.finish_reason, self.stop_reason = "stop", fired
    elif last:
      text += self._stops.finish()
    self._parts.append(text)
    return text
