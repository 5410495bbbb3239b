"""Decoding together with the host, for rows whose text must fit something: a mask a token.

What may come next depends on the token before, which the host knows only once it is drawn. The forward pass over that
token needs no mask and takes nearly all the time: meanwhile the host makes the masks for the next draw.

`Asked` has many steps in one call, in which the program tells and asks the host through a channel; where there is none
(on accelerators, and without a compiler), `Constrained` makes two calls a step.
"""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from decoder.ops.kernels import build
from decoder.ops.kernels.channel import Channel
from decoder.programs import Programs
from decoder.reader import Reader
from decoder.strategies import Finish, State
from decoder.text.constraints import Constraint
from decoder.types import Array, Emission


class Constrained:
  """In place of `Programs`, with the same verbs. readers: of the rows; those without a constraint, and those that have
  ended, may draw anything."""

  runs_ahead = False

  def __init__(self, programs: Programs, readers: Sequence[Reader]):
    self._programs, self._readers = programs, readers
    self._logits_BV: Array | None = None  # of what may come next
    self._goes_on = True

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    self._goes_on = loop
    self._programs.prepare_halves(state, lengths, held, loop=loop)

  def read(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Emission]:
    state, self._logits_BV = self._programs.read_half(state, lengths, held)
    return self._draw(state)

  def loop(self, state: State, limit: int) -> tuple[State, Emission]:
    """One step, whatever the limit: the masks of the next depend on what it draws."""
    return self._draw(state)

  def _draw(self, state: State) -> tuple[State, Emission]:
    masks_BW = self._programs.open_masks(state)
    for row, reader in enumerate(self._readers):
      if reader.constraint is not None and not reader.done:
        masks_BW[row] = reader.constraint.mask()
    state, emission = self._programs.draw(state, self._logits_BV, masks_BW)
    if self._goes_on:
      state, self._logits_BV = self._programs.forward(state)
    return state, emission


class Asked(Constrained):
  """The same, in one call for many steps."""

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    self._goes_on = False  # no forward in advance
    self._programs.prepare_asking(state, lengths, held, loop=loop)

  def loop(self, state: State, limit: int) -> tuple[State, Emission]:
    texts = [None if reader.done else reader.constraint and reader.constraint.copy() for reader in self._readers]
    with Channel() as channel, concurrent.futures.ThreadPoolExecutor(1) as other:
      try:  # in a thread of its own, since giving a call out may be waiting for its end
        running = other.submit(self._programs.loop_asking, state, limit, channel.number)
        self._answer(channel, running, texts, state.length_B.shape[0])
      finally:
        channel.close()
      state, emission = jax.block_until_ready(running.result())
    for reader, text in zip(self._readers, texts):
      if text is not None and text.error is not None:
        reader.constraint.error = text.error
    return state, emission

  def _answer(self, channel: Channel, running: Any, texts: Sequence[Constraint | None], rows: int) -> None:
    """texts: as far as rows have come; advanced by what is told."""
    ended_B = np.zeros(rows, np.int8)
    ended_B[: len(texts)] = [reader.done for reader in self._readers]
    masks_BW, known = self._programs.open_masks_for(rows), True  # the readers have read what is told first
    while (told := channel.hear(rows, lambda: running.done() and running.exception() is not None)) is not None:
      for row, text in enumerate(texts):
        if text is None:
          continue
        if not known and told.finish_B[row] == Finish.RUNNING:
          text.commit([int(told.tokens_B[row])])
          ended_B[row] = text.done
        masks_BW[row] = text.mask()
      channel.answer(masks_BW, ended_B)
      known = False


def driver(programs: Programs, readers: Sequence[Reader]) -> Any:
  """What reads prompts and makes steps for these rows: the programs themselves, unless one has a constraint."""
  if not any(reader.constraint for reader in readers):
    return programs
  return (Asked if build.ready() else Constrained)(programs, readers)
