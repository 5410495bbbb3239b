"""Where does a token's entry live while a model is trained? Nowhere for long: a text is read at once, whole.

What is written replaces the buffer, and there is one block, so that no loop has a length known only at run time:
gradients pass, as they do not through `Contiguous`, whose loop over filled blocks cannot be run backwards.
"""

import jax.numpy as jnp
from flax import struct

from decoder.cache.layouts import Contiguous
from decoder.types import NONE, Array


@struct.dataclass
class Whole(Contiguous):
  """A text of T tokens in T slots, in the order it is given. It is claimed and written once, all of it."""

  in_order = False  # a kernel has no gradient

  @classmethod
  def allocate(cls, batch: int, capacity: int, block: int = 1) -> "Whole":
    """Room for nothing yet: `claim` takes what the text needs."""
    return cls(jnp.full((batch, 1), NONE, jnp.int32), capacity, block)

  def claim(self, positions_BT: Array) -> "Whole":
    return self.replace(positions_BS=positions_BT, block=positions_BT.shape[1])

  def write(self, buffer: Array, values_BTKH: Array, positions_BT: Array) -> Array:
    return values_BTKH.swapaxes(1, 2)

  def blocks(self, positions_BT: Array, window: int | None) -> tuple[int, int]:
    """The one block that there is; the numbers are Python's, so the loop has a known length."""
    return 0, 1
