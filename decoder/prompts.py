"""Prompts that are read apart from the drawing: once for all rows that begin with them, and told of where asked.

Each distinct prompt is a row of its own until its last token is read; then rows are forked by `cache.select`, each with
its own key, limit and settings. What a row draws is what it would draw after reading the prompt by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from decoder.programs import Programs
from decoder.reader import Request
from decoder.report import size_for
from decoder.strategies import State
from decoder.types import Array, Emission


class Apart:
  """In place of `Programs`, with its verbs; `begin` and `read` differ. told: after reading, for each request numpy
  leaves over its prompt's tokens but the first; None where nothing was asked."""

  def __init__(self, programs: Programs, requests: Sequence[Request]):
    self._programs, self.placement = programs, programs.placement
    homes = [_home(request) for request in requests]
    self._order = list(dict.fromkeys(homes))
    self._homes = [self._order.index(home) for home in homes]
    self._lengths = [len(ids) for ids, *_ in self._order]
    asked = [request.settings.logprobs or 0 for request in requests if request.settings.prompt_logprobs]
    self._number = size_for(max(asked)) if asked else None
    self.told: list[Any] = [None] * len(requests)
    self._parts: list[Any] = []  # what each chunk told
    self.loop, self.loop_asking, self.runs_ahead = programs.loop, programs.loop_asking, programs.runs_ahead
    self.forward, self.guesses, self.block = programs.forward, programs.guesses, programs.block
    self.draw, self.draw_further, self.open_masks = programs.draw, programs.draw_further, programs.open_masks

  def begin(self, capacity: int, fields: dict[str, Any], cache: Any = None) -> State:
    """A State of one row for each distinct prompt; the rows of `fields` come once they are read."""
    self._fields = {**fields, "held_B": fields["length_B"]}
    self._rows_R = np.zeros(fields["length_B"].shape, np.int32)
    self._rows_R[: len(self._homes)] = self._homes
    rows = self._programs.rows(len(self._order))
    firsts = [self._homes.index(home) for home in range(len(self._order))]
    chosen = np.array(firsts + firsts[:1] * (rows - len(firsts)))
    fields = jax.tree.map(lambda leaf: leaf[chosen], fields)
    fields["length_B"][len(firsts) :] = 0  # padding of the batch
    # A row at its limit reads nothing, but here the prompt is wanted even where nothing is drawn.
    fields["limit_B"] = np.maximum(fields["limit_B"], fields["length_B"] + 1)
    return self._programs.begin(capacity, fields, cache)

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    forked = self._prepare_reading(state, held)
    if loop:
      self._programs.prepare_loop(forked)

  def prepare_halves(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    forked = self._prepare_reading(state, held)
    if loop:
      self._programs.prepare_further(forked)

  def prepare_asking(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    forked = self._prepare_reading(state, held)
    if loop:
      self._programs.prepare_loop_asking(forked)

  def chunks(self, lengths: Sequence[int], held: int = 0) -> range:
    return self._programs.chunks(self._lengths, held)

  def read_chunk(self, state: State, lengths: Sequence[int], held: int, chunk: int) -> State:
    if self._number is None:
      return self._programs.read_chunk(state, self._lengths, held, chunk)
    return self._tell_chunk(state, chunk)[0]

  def read(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Emission]:
    state, logits_BV = self.read_half(state, lengths, held)
    return self.draw(state, logits_BV, self.open_masks(state.length_B.shape[0]))

  def read_half(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Array]:
    if self._number is None:
      state, logits_BV = self._programs.read_half(state, self._lengths, held)
    else:
      state, logits_BV = self._tell_chunk(state, 0)
      told_B = told_rows(self._programs.placement.fetch, self._parts, self._lengths)
      self.told = [told_B[home] for home in self._homes]
    return self._programs.fork(state, logits_BV, self._rows_R, self._fields)

  def _tell_chunk(self, state: State, chunk: int) -> tuple[State, Array]:
    state, logits_BV, told = self._programs.tell_chunk(state, self._lengths, self._number, chunk)
    self._parts.append(told)
    return state, logits_BV

  def _prepare_reading(self, state: State, held: int) -> State:
    """Compiles all but what comes after the first draw; the shape of the State then."""
    logits_BV = self._programs.prepare_reading(state, self._lengths, held, self._number)
    forked, logits_BV = self._programs.prepare_fork(state, logits_BV, self._rows_R, self._fields)
    self._programs.prepare_draw(forked, logits_BV)
    return forked


def told_rows(fetch: Callable, parts: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
  """From what the chunks told, the last one aligned to the prompts' ends: for each row numpy leaves over its tokens but
  the first. fetch: a `Placement`'s."""
  told = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *fetch(list(parts)))
  # A row's first position stands `length` columns before the end; nothing comes after its last.
  longest = told.sound_BT.shape[1]
  spans = [slice(longest - length, longest - 1) for length in lengths]
  return [jax.tree.map(lambda leaf, b=b, span=span: leaf[b, span], told) for b, span in enumerate(spans)]


def reading(programs: Programs, requests: Sequence[Request]) -> Any:
  """What reads these requests' prompts: the programs themselves, unless prompts are shared or to be told of."""
  distinct = {_home(request) for request in requests}
  apart = len(distinct) < len(requests) or any(request.settings.prompt_logprobs for request in requests)
  return Apart(programs, requests) if apart else programs


def _home(request: Request) -> tuple:
  """Requests that share it hold the same in their caches after the prompt; length-dependent rope reads the limit."""
  scale = request.settings.guidance_scale
  return request.prompt_ids, request.source_ids, request.limit, request.negative_ids, scale
