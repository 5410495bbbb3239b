"""Decoding driven from the host, for rows whose text must fit something: a mask a token.

What may come next depends on the token before, which the host knows only once it is drawn. So each step is two device
calls: `draw`, and the `forward` of what was drawn, which needs no mask and takes nearly all the time. Both are on their
way before the host looks at the token; while the second runs, it makes the masks for the next draw.
"""

from collections.abc import Sequence
from typing import Any

from decoder.programs import Programs
from decoder.reader import Reader
from decoder.strategies import State
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


def driver(programs: Programs, readers: Sequence[Reader]) -> Any:
  """What reads prompts and makes steps for these rows: the programs themselves, unless one has a constraint."""
  return Constrained(programs, readers) if any(reader.constraint for reader in readers) else programs
