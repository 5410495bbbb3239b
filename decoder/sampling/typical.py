"""The typical set: found like the head of an order (`selection.py`), but order and weights are two things here."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from decoder.sampling.selection import FEW, head, only_if
from decoder.types import Array


class TypicalSet(NamedTuple):
  """off_N: how far each token's surprise is from the entropy. edge, border: that of the last token in the set, and
  its id."""

  off_N: Array
  edge: Array
  border: Array


def typical_set(logits_N: Array, ids_N: Array, share: Array) -> TypicalSet:
  """The smallest set that has this share of the mass: nearest to the entropy first, then lowest id."""
  x_N = logits_N - jnp.max(logits_N)
  weight_N = jnp.exp(x_N)
  mass = jnp.sum(weight_N)
  mean = jnp.sum(jnp.where(weight_N > 0, weight_N * x_N, 0.0)) / mass
  # |−log p − H|: the logarithm of the mass is in both and cancels. What is masked comes last of all.
  off_N = jnp.where(weight_N > 0, jnp.abs(x_N - mean), jnp.inf)
  if logits_N.shape[0] <= FEW:
    near_C, ids_C, weight_C = lax.sort((off_N, ids_N, weight_N), num_keys=2)
  else:
    near_C, ids_C = head(-off_N)  # of all, whose ids are their places
    near_C, ids_C, weight_C = -near_C, ids_C.astype(jnp.int32), weight_N[ids_C]
  reached_C = jnp.cumsum(weight_C) >= share * mass
  found = jnp.any(reached_C)
  last = jnp.where(found, jnp.argmax(reached_C), ids_C.shape[0] - 1)
  end = (near_C[last], ids_C[last])
  if logits_N.shape[0] > FEW:
    end = only_if(~found, lambda _, *x: _search(*x), end, off_N, weight_N, share * mass)
  return TypicalSet(off_N, *end)


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
