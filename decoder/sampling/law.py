"""A law on its way through filters: all logits, and apart from them the few largest, in order.

A filter nearly always keeps none but some of these few, and from then on it and all that follow work on the list, at a
hundredth of the price of passes over the vocabulary. Where what is kept reaches beyond the list, a filter works on all
logits. Both give the same set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from decoder.sampling.selection import FEW, head, only_if
from decoder.types import Array

Change = Callable[[Array, Array, Any, Array], Array]  # (logits_N, ids_N, state, chance) -> logits_N


class Law(NamedTuple):
  """top_C, ids_C: the largest logits of all as they stand, in the order they had at first: largest first, then lowest
  id; what was removed is −inf. few: nothing else is possible any more; logits_V is then out of date. floor: nothing
  that is not in the list is larger; −inf if nothing is there.
  """

  logits_V: Array
  top_C: Array
  ids_C: Array
  few: Array
  floor: Array


class Part(NamedTuple):
  """What a filter leaves of the list; few: and of everything."""

  top_C: Array
  few: Array


def opened(logits_V: Array) -> Law:
  """The law of these logits."""
  logits_V = jnp.where(logits_V == 0, 0.0, logits_V)  # a partial sort puts +0 before −0; they are one value
  top_C, ids_C = head(logits_V)
  # Not top_C[-1]: where a partial sort is followed by another slice, XLA sorts everything.
  floor = jnp.min(top_C) if logits_V.shape[0] > FEW else jnp.float32(-jnp.inf)
  return Law(logits_V, top_C, ids_C.astype(jnp.int32), floor == -jnp.inf, floor)


def closed(law: Law) -> Array:
  """The logits of what is left; −inf for the rest."""

  def spread(logits_V: Array, top_C: Array, ids_C: Array) -> Array:
    # The largest: ids that fill up the list may come twice, with −inf.
    return jnp.full_like(logits_V, -jnp.inf).at[ids_C].max(top_C)

  return only_if(law.few, spread, law.logits_V, law.top_C, law.ids_C)


def widened(law: Law, needed: Array, change: Change, state: Any, chance: Array) -> Law:
  """The law after a change of all logits, where needed."""
  size = law.logits_V.shape[0]
  if size <= FEW:
    return law

  def widely(parts: tuple, ids_C: Array, state: Any, chance: Array) -> tuple:
    logits_V = change(parts[0], jnp.arange(size, dtype=jnp.int32), state, chance)
    top_C = logits_V[ids_C]
    return logits_V, Part(top_C, _possible(logits_V) == _possible(top_C))

  logits_V, part = only_if(
    needed & ~law.few, widely, (law.logits_V, Part(law.top_C, law.few)), law.ids_C, state, chance
  )
  return law._replace(logits_V=logits_V, top_C=part.top_C, few=part.few)


def mass(law: Law) -> tuple[Array, Array]:
  """The largest logit, and the sum of e^(logit − largest)."""

  def of(logits_N: Array) -> tuple[Array, Array]:
    peak = jnp.max(logits_N)
    return peak, jnp.sum(jnp.exp(logits_N - peak))

  return only_if(~law.few, lambda _, logits_V: of(logits_V), of(law.top_C), law.logits_V)


def head_of(law: Law, weight_C: Array, wanted: Array) -> tuple[Array, Array]:
  """Where in the list the shortest head that weighs ≥ `wanted` ends, and whether the list reaches so far; the end of
  the list if not. Where there is nothing else, it is rounding that keeps the whole from reaching it."""
  reached_C = jnp.cumsum(weight_C) >= wanted
  found = jnp.any(reached_C)
  return jnp.where(found, jnp.argmax(reached_C), reached_C.shape[0] - 1), found


def _possible(logits_N: Array) -> Array:
  return jnp.sum((logits_N > -jnp.inf).astype(jnp.float32))
