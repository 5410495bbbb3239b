"""A batch of beam searches on its way: owns the Search, calls the compiled programs, and tells of the hypotheses."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from decoder.beam_programs import BeamPrograms, beam_fields, room_for
from decoder.decoding import fields_of, interrupt_later
from decoder.processes import ALONE, Alone
from decoder.programs import LOOP, bucket
from decoder.reader import Reader
from decoder.report import Report
from decoder.result import Result, Timings
from decoder.strategies import Finish, Search, hypotheses

_SHORT = 8  # steps a call where time or cancellation may end it
_SMALLEST_ROOM = 64  # slots


class Searching:
  """Requests searched together, with the verbs of `Decoding`; a prompt's n requests are its n best hypotheses.

  What is ended early, by time or cancellation, has the hypotheses found so far; where there are fewer than wanted, the
  texts that were still carried on stand in, without a score.
  """

  def __init__(
    self,
    programs: BeamPrograms,
    readers: Sequence[Reader],
    *,
    compiled_s: Callable[[], float],
    cancel: threading.Event | None = None,
    lead: Alone = ALONE,
  ):
    self.readers, self.requests = list(readers), [reader.request for reader in readers]
    self.reports = [Report(reader.request.settings, reader.tokenizer, programs.links) for reader in readers]
    self._programs, self._cancel, self._lead, self._turn = programs, cancel, lead, threading.Lock()
    self._examples = [request for request in self.requests if request.sample == 0]
    self._start, compiled_before = time.perf_counter(), compiled_s()
    self._early: str | None = None  # why the search was ended from outside
    self._steps, self._spent_ms, self._compiled_s = 0, 0.0, lambda: compiled_s() - compiled_before
    self._search: Search | None = None
    self._finish_B = np.full(len(self._examples), Finish.RUNNING)
    lengths = [len(request.prompt_ids) for request in self._examples]
    new = max(request.limit - length for request, length in zip(self._examples, lengths))
    self.done = new == 0
    if not self.done:
      self._begin(bucket(max(lengths) + programs.plan.beams * new, _SMALLEST_ROOM), lengths)

  def advance(self, steps: int, ahead: bool = False) -> list[str]:
    """Up to `steps` further tokens of every beam. No text comes of it: hypotheses overtake each other to the end. ahead
    changes nothing: of a call only whether searches have ended is read."""
    with self._turn, interrupt_later():
      self._end_early()
      if not self.done:
        steps = min(steps, LOOP, _SHORT if self._watched else LOOP)
        self._search, emission = self._programs.search(self._search, steps)
        self._finish_B = self._programs.placement.fetch(emission.info.finish_B)
        self.done = not bool((self._finish_B == Finish.RUNNING).any())
        self._steps, self._spent_ms = self._steps + steps, self._elapsed()
    return [""] * len(self.requests)

  def close(self) -> list[str]:
    """Ends all searches with what they have found."""
    with self._turn:
      self._early, self.done = self._early or "cancelled", True
    return [""] * len(self.requests)

  def results(self, load_s: float) -> list[Result | None]:
    """By request its hypothesis; None where there are fewer, but for the first of a prompt."""
    found = live = None
    if self._search is not None:
      fetch = self._programs.placement.fetch
      found, live = fetch(hypotheses(self._search)), _live_texts(self._search, fetch)
    results, example = [], -1
    for row, request in enumerate(self.requests):
      example += request.sample == 0
      told = found is not None and self._tell(row, example, found, live[example])
      results.append(self._result(row, found, example, load_s) if told or request.sample == 0 else None)
    return results

  def _begin(self, slots: int, lengths: Sequence[int]) -> None:
    """Reads the prompts, but for their last tokens, and starts the search."""
    fields = fields_of(self._examples, self._programs, bucket(max(r.limit for r in self._examples)), held=0)
    reading = {**fields, "length_B": np.maximum(fields["length_B"] - 1, 0)}
    state = self._programs.read_prompts(self._programs.begin(slots, reading), [length - 1 for length in lengths])
    self._search = self._programs.spread(state, beam_fields(self._examples, fields), room_for(self._examples))

  @property
  def _watched(self) -> bool:
    return self._cancel is not None or any(r.settings.max_time is not None for r in self._examples)

  def _end_early(self) -> None:
    limits = [r.settings.max_time for r in self._examples if r.settings.max_time is not None]
    cancelled = self._cancel is not None and self._cancel.is_set()
    now, cancelled = self._lead.agree((self._elapsed(), cancelled))
    if cancelled:
      self._early, self.done = "cancelled", True
    elif limits and now >= 1e3 * min(limits):
      self._early, self.done = "time", True

  def _tell(self, row: int, example: int, found: Any, live: Sequence[np.ndarray]) -> bool:
    """Hands a request's hypothesis to its reader; whether there is one."""
    place, reader, number = self.requests[row].sample, self.readers[row], self._number(found, example)
    if place < number:
      ids = found.tokens_WN[example, place, : found.length_W[example, place]]
      self.reports[row].add(ids, jax.tree.map(lambda leaf: leaf[example, place], found.details))
      reader.feed(ids, int(found.finish_W[example, place]))
      return True
    if self._early is None or place - number >= len(live):
      return False
    reader.feed(live[place - number], Finish.RUNNING)
    reader.end(self._early)
    return True

  def _number(self, found: Any, example: int) -> int:
    """How many hypotheses an example has; none if its logits were not finite, whatever came before."""
    broken = self._finish_B[example] == Finish.ERROR
    return 0 if broken else int((found.score_W[example] > -np.inf).sum())

  def _result(self, row: int, found: Any, example: int, load_s: float) -> Result:
    request, reader, report = self.requests[row], self.readers[row], self.reports[row]
    if not reader.done:  # no hypothesis: nothing was to be written, or nothing could be
      reader.end("length" if request.limit <= len(request.prompt_ids) else self._early or "error")
    scored = found is not None and request.sample < self._number(found, example)
    score = float(found.score_W[example, request.sample]) if scored else None
    each = self._spent_ms / self._steps if self._steps else None
    timings = Timings(
      load_s=round(load_s, 3), compile_s=round(self._compiled_s(), 3), ttft_ms=self._spent_ms if each else None,
      tpot_ms=each, tokens_per_s=1e3 / each if each else None, prompt_tokens_per_s=None,
      prompt_tokens=len(request.read_ids), new_tokens=len(reader.token_ids),
    )  # fmt: skip
    truncated = request.at_limit if reader.finish_reason == "length" else request.truncated
    return Result(
      reader.text, request.read_ids, tuple(reader.token_ids), reader.finish_reason, reader.stop_reason, truncated,
      request.seed, request.settings, timings, request.sample, logprobs=report.logprobs(),
      score=score,
    )  # fmt: skip

  def _elapsed(self) -> float:
    """Milliseconds from the start, without compilation."""
    return (time.perf_counter() - self._start - self._compiled_s()) * 1e3


def _live_texts(search: Search, fetch: Callable) -> list[list[np.ndarray]]:
  """On the host, by row: new tokens of the texts that are still carried on, the best first."""
  fields = (search.sum_BW, search.context_BWL, search.prompt_B, search.length_B)
  rows = []
  for sum_W, context_WL, prompt, length in zip(*fetch(fields)):
    best = [w for w in np.argsort(-sum_W, kind="stable") if sum_W[w] > -np.inf]
    rows.append([context_WL[w, prompt:length] for w in best])
  return rows
