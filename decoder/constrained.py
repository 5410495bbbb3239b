"""Decoding together with the host, for rows whose text must fit something: a mask a token.

What may come next depends on the token before, which the host knows only once it is drawn. The forward pass over that
token needs no mask and takes nearly all the time: meanwhile the host makes the masks for the next draw, and where what
follows is guessed, those after each guess.

`Asked` has many steps in one call, in which the program tells and asks the host through a channel; where there is none
(on accelerators, and without a compiler), `Constrained` makes two calls a step.
"""

import concurrent.futures
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decoder.ops.kernels import build
from decoder.ops.kernels.channel import Channel
from decoder.programs import Programs
from decoder.reader import Reader
from decoder.strategies import State, told_width
from decoder.types import Array, Emission


class Constrained:
  """In place of `Programs`, with the same verbs. readers: of the rows; those without a constraint, and those that have
  ended, may draw anything."""

  runs_ahead = False

  def __init__(self, programs: Programs, readers: Sequence[Reader]):
    self._programs, self._readers = programs, readers
    self._logits: Array | None = None  # of what may come next
    self._goes_on = True

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    self._goes_on = loop
    self._programs.prepare_halves(state, lengths, held, loop=loop)

  def read(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Emission]:
    state, logits_BV = self._programs.read_half(state, lengths, held)
    masks_BW = self._programs.open_masks(state.length_B.shape[0])
    for row, reader in self._bound():
      masks_BW[row] = reader.constraint.mask()
    return self._forward(*self._programs.draw(state, logits_BV, masks_BW))

  def loop(self, state: State, limit: int) -> tuple[State, Emission]:
    """One step, whatever the limit: the masks of the next depend on what it draws."""
    masks_BJW = self._programs.open_masks(state.length_B.shape[0], self._programs.block)
    guesses = self._programs.guesses(state)
    for row, reader in self._bound():
      masks_JW = reader.constraint.masks(guesses[row])
      masks_BJW[row, : len(masks_JW)] = masks_JW
    return self._forward(*self._programs.draw_further(state, self._logits, masks_BJW))

  def _bound(self) -> Iterator[tuple[int, Reader]]:
    """Rows whose next token must fit, and their readers."""
    return ((n, one) for n, one in enumerate(self._readers) if one.constraint is not None and not one.done)

  def _forward(self, state: State, emission: Emission) -> tuple[State, Emission]:
    """Gives out what comes before the next draw."""
    if self._goes_on:
      state, self._logits = self._programs.forward(state)
    return state, emission


class Asked(Constrained):
  """The same, in one call for many steps."""

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    self._goes_on = False  # no forward in advance
    self._programs.prepare_asking(state, lengths, held, loop=loop)

  def loop(self, state: State, limit: int) -> tuple[State, Emission]:
    with Channel() as channel, concurrent.futures.ThreadPoolExecutor(1) as other:
      try:  # in a thread of its own, since giving a call out may be waiting for its end
        running = other.submit(self._programs.loop_asking, state, limit, channel.number)
        self._answer(channel, running, state.length_B.shape[0])
      finally:
        channel.close()
      return jax.block_until_ready(running.result())

  def _answer(self, channel: Channel, running: Any, rows: int) -> None:
    block, texts = self._programs.block, {row: _Text(reader) for row, reader in self._bound()}
    ended_B = np.zeros(rows, np.int8)
    ended_B[: len(self._readers)] = [reader.done for reader in self._readers]

    def failed() -> bool:
      return running.done() and running.exception() is not None

    while (told := channel.hear(rows, told_width(block), failed)) is not None:
      masks_BJW = self._programs.open_masks(rows, block)
      for row, text in texts.items():
        masks_JW = text.hear(*(leaf[row] for leaf in told))
        masks_BJW[row, : len(masks_JW)] = masks_JW
        ended_B[row] = text.done
      channel.answer(masks_BJW, ended_B)


class _Text:
  """A row's text, as far as the host has been told of it within a call."""

  def __init__(self, reader: Reader):
    self._fits = reader.constraint.copy()
    self._length = len(reader.request.prompt_ids) + reader.drawn

  @property
  def done(self) -> bool:
    return self._fits.done

  def hear(self, tokens_T: np.ndarray, positions_T: np.ndarray, length: int) -> np.ndarray:
    """Takes what was drawn since; the mask for what comes next, and after each of the guesses."""
    for token in tokens_T[(positions_T >= self._length) & (positions_T < length)]:
      if not self.done:  # what is drawn after the end, in the same step, is no text
        self._fits.commit([token])
    self._length = length
    return self._fits.masks(tokens_T[positions_T >= length])


def driver(programs: Programs, readers: Sequence[Reader]) -> Any:
  """What reads prompts and makes steps for these rows: the programs themselves, unless one has a constraint."""
  if not any(reader.constraint for reader in readers):
    return programs
  asks = programs.placement.alone and build.ready()
  return (Asked if asks else Constrained)(programs, readers)
