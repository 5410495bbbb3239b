"""One request on the host: which ids it starts from, and how what is drawn for it becomes text."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from decoder.settings import Settings
from decoder.strategies import Finish
from decoder.text.constraints import Constraint
from decoder.text.dedent import Dedent
from decoder.text.infill import Infill
from decoder.text.stops import Stops


@dataclasses.dataclass
class Request:
  """prompt_ids: as they will be read; source_ids: by the encoder, where there is one. sample: the number of this one
  among the prompt's n. limit: length in tokens at which the row ends. ends: ids that end it. truncated: what Result
  says of it; at_limit: what, if the limit ends it. constraint: what the text must fit, as it stands at the start.
  negative_ids: the prompt that guidance leads away from; empty without. indent: columns before the prompt's last
  line, None for an empty one; read where settings stop at a dedent."""

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
  indent: int | None = None
  source_ids: tuple[int, ...] = ()

  @property
  def read_ids(self) -> tuple[int, ...]:
    """What the user gave: the source where there is one, else the prompt."""
    return self.source_ids or self.prompt_ids

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
    self.request, self.tokenizer = request, tokenizer
    self.drawn = 0  # tokens read, an end token included
    self.token_ids: list[int] = []
    self.finish_reason: str | None = None
    self.stop_reason: str | int | None = None
    self.constraint = request.constraint.copy() if request.constraint else None
    self._parts: list[str] = []
    self._ends = frozenset(request.ends)
    self._kept = frozenset(request.settings.stop_token_ids if request.settings.include_stop else ())
    self._detokenizer = tokenizer.detokenizer() if tokenizer and request.settings.detokenize else None
    self._stops = Stops(request.settings.stop, include_stop=request.settings.include_stop)
    self._dedent = Dedent(request.indent) if request.settings.stop_at_dedent else None

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
      self.drawn += 1
      deltas.append(self._feed_one(int(token)))
    if not self.done and finish == Finish.ERROR and self.constraint is not None:
      self.stop_reason = self.constraint.problem()
    if not self.done and finish != Finish.RUNNING:
      deltas.append(self.end({Finish.LENGTH: "length", Finish.ERROR: "error"}.get(Finish(finish), "cancelled")))
    return "".join(deltas)

  def end(self, reason: str) -> str:
    """Ends the row from outside; returns the text held back so far."""
    if self.done:
      return ""
    self.finish_reason = reason
    return self._take(self._detokenizer.finish() if self._detokenizer else "", last=True)

  def fail(self) -> None:
    """Ends the row because the model is broken, also where it had ended."""
    self.end("error")
    self.finish_reason = "error"

  def _feed_one(self, token: int) -> str:
    ends = token in self._ends
    text = ""
    if not ends or token in self._kept:
      self.token_ids.append(token)
      text = self._take(self._detokenizer.feed([token]) if self._detokenizer else "")
    if ends and not self.done:
      self.stop_reason = token
      text += self.end("stop")
    elif self.constraint is not None and not self.done:
      self.constraint.commit([token])
      text += self.end("stop") if self.constraint.done else ""
    return text

  def _take(self, delta: str, last: bool = False) -> str:
    # As for end tokens: the first token that may end the text is the one after min_new_tokens.
    match = len(self.token_ids) > self.request.settings.min_new_tokens
    text, fired = self._stops.feed(delta, match=match)
    if fired is not None:
      self.finish_reason, self.stop_reason = "stop", fired
    elif last:
      text += self._stops.finish()
    if self._dedent is not None:
      text, left = self._dedent.feed(text, match=match)
      if left:
        self.finish_reason, self.stop_reason = "stop", "dedent"
      elif self.done:
        text += self._dedent.finish()
    self._parts.append(text)
    return text


def is_batch(prompt: Any) -> bool:
  """A list of prompts, rather than one that is itself a list (of ids, of messages)."""
  return isinstance(prompt, list | tuple) and (
    not prompt or isinstance(prompt[0], str | Infill | list | tuple | np.ndarray)
  )
