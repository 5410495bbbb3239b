"""The typical set: found like the head of an order (`selection.py`), but order and weights are two things here."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from decoder.sampling.selection import FEW, head, only_if
from decoder.types import Array


class TypicalSet(NamedTuple):
  """off_V: how far each token's surprise is from the entropy. edge, border: that of the last token in the set, and
  its id."""

  off_V: Array
  edge: Array
  border: Array


def typical_set(logits_V: Array, share: Array) -> TypicalSet:
  """The smallest set that has this share of the mass: nearest to the entropy first, then lowest id."""
  size = logits_V.shape[0]
  x_V = logits_V - jnp.max(logits_V)
  weight_V = jnp.exp(x_V)
  mass = jnp.sum(weight_V)
  mean = jnp.sum(jnp.where(weight_V > 0, weight_V * x_V, 0.0)) / mass
  # |−log p − H|: the logarithm of the mass is in both and cancels. What is masked comes last of all.
  off_V = jnp.where(weight_V > 0, jnp.abs(x_V - mean), jnp.inf)
  near_C, ids_C = head(-off_V)
  reached_C = jnp.cumsum(weight_V[ids_C]) >= share * mass
  found = jnp.any(reached_C)
  last = jnp.where(found, jnp.argmax(reached_C), ids_C.shape[0] - 1)
  end = (-near_C[last], ids_C[last].astype(jnp.int32))
  wide = ~found & (size > FEW)
  return TypicalSet(off_V, *only_if(wide, lambda _, *x: _search(*x), end, off_V, weight_V, share * mass))


def _search(off_V: Array, weight_V: Array, wanted: Array) -> tuple[Array, Array]:
  """The end of the set by bisection on the bits of `off_V`, which order as the numbers do: none is negative."""
  bits_V = lax.bitcast_convert_type(off_V, jnp.int32)

  def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds  # what is at most `high` off weighs enough
    middle = low + (high - low) // 2
    enough = jnp.sum(jnp.where(bits_V <= middle, weight_V, 0.0)) >= wanted
    return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

  edge, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (jnp.min(bits_V), jnp.max(bits_V)))
  tied_V = bits_V == edge
  missing = wanted - jnp.sum(jnp.where(bits_V < edge, weight_V, 0.0))
  before_V = jnp.cumsum(jnp.where(tied_V, weight_V, 0.0)) - weight_V
  border = jnp.max(jnp.where(tied_V & (before_V < missing), jnp.arange(off_V.shape[0], dtype=jnp.int32), 0))
  return lax.bitcast_convert_type(edge, jnp.float32), border
