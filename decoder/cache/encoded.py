"""Where does what an encoder has read live? In rows of its own, written once; decoding only reads them.

One idea: `rows_B` says which row of the buffers each row of the batch reads, so texts that are written from one source
share what was read of it, and choosing rows anew changes this map and copies no keys or values. Beams need not even
that: they are queries of one row.
"""

from flax import struct

from decoder.cache.layouts import Contiguous
from decoder.types import Array


@struct.dataclass
class Encoded(Contiguous):
  """`Contiguous` slots for the tokens of a source. rows_B: None where each row reads its own."""

  rows_B: Array | None = None

  @property
  def in_order(self) -> bool:
    """Buffers may be read in place by row only where each row reads its own."""
    return self.rows_B is None

  @property
  def positions(self) -> Array:
    return self._chosen(self.positions_BS)

  def read(self, buffer: Array, block: Array) -> Array:
    return self._chosen(super().read(buffer, block))

  def read_positions(self, block: Array) -> Array:
    return self._chosen(super().read_positions(block))

  def select(self, rows_R: Array) -> "Encoded":
    """Row r reads what row rows_R[r] does; nothing is copied."""
    return self.replace(rows_B=self._chosen_rows(rows_R))

  def select_buffer(self, buffer: Array, rows_R: Array) -> Array:
    return buffer

  def insert(self, rows_R: Array, other: "Contiguous") -> "Encoded":
    """As in `Contiguous`. ValueError where rows share what was read: one of them cannot be replaced alone."""
    if self.rows_B is not None or other.rows_B is not None:
      raise ValueError("insert() wants caches whose rows read sources of their own; insert before select()")
    return super().insert(rows_R, other)

  def trim(self, slots: int) -> "Encoded":
    """Itself: what an encoder has read stays whole, however little has been written."""
    return self

  def trim_buffer(self, buffer: Array, slots: int) -> Array:
    return buffer

  def _chosen(self, x: Array) -> Array:
    return x if self.rows_B is None else x[self.rows_B]

  def _chosen_rows(self, rows_R: Array) -> Array:
    return rows_R if self.rows_B is None else self.rows_B[rows_R]
