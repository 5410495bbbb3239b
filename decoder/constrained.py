"""Decoding driven from the host, for rows whose text must fit something: a mask a token.

What may come next depends on the token before, which the host knows only once it is drawn. So each step is two device
calls: `forward`, which needs no mask and takes nearly all the time, and `draw`; while the first runs, the host makes
the masks for the second.
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

  def __init__(self, programs: Programs, readers: Sequence[Reader]):
    self._programs, self._readers = programs, readers

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    self._programs.prepare_halves(state, lengths, held, loop=loop)

  def read(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Emission]:
    return self._draw(*self._programs.read_half(state, lengths, held))

  def loop(self, state: State, limit: int) -> tuple[State, Emission]:
    """One step, whatever the limit: the masks of the next depend on what it draws."""
    return self._draw(*self._programs.forward(state))

  def _draw(self, state: State, features_BD: Array) -> tuple[State, Emission]:
    masks_BW = self._programs.open_masks(state)
    for row, reader in enumerate(self._readers):
      if reader.constraint is not None and not reader.done:
        masks_BW[row] = reader.constraint.mask()
    return self._programs.draw(state, features_BD, masks_BW)


def driver(programs: Programs, readers: Sequence[Reader]) -> Any:
  """What reads prompts and makes steps for these rows: the programs themselves, unless one has a constraint."""
  return Constrained(programs, readers) if any(reader.constraint for reader in readers) else programs
