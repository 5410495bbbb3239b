"""Finding the head of a vocabulary's order without sorting the vocabulary.

The set that top-k or top-p keeps is nearly always among the few largest logits, which a partial sort yields at a tenth
of the price of a pass over everything. Where it is not, floats are mapped to integers of the same order and the value
at the edge is found by bisection on the bits. Both are exact; what is skipped depends on the data, not on a setting.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.types import Array

FEW = 256  # largest logits looked at first; on CPU a partial sort of so many costs less than one argmax


def only_if(needed: Array, change: Callable, x: Any, *inputs: Array) -> Any:
  """`change(x, *inputs)` where needed (a scalar), else x; x is an array or a pytree of them.

  Under vmap a `cond` computes both branches for every row; a loop that runs at most once is skipped as a whole when
  no row needs it, which is what makes an unused setting free. What `change` works on must come in through x and
  inputs: XLA moves whatever else it computes out of the loop, and does it always.
  """

  def once(carry: tuple) -> tuple:
    needed, x, inputs = carry
    spent = tuple(jnp.zeros_like(one) for one in inputs)  # inputs that stay as they are would count as "whatever else"
    return jnp.zeros_like(needed), change(x, *inputs), spent

  return lax.while_loop(lambda carry: carry[0], once, (needed, x, inputs))[1]


def largest(x_V: Array) -> Array:
  """The lowest id of the largest value. Two plain reductions: XLA's CPU argmax is one slow one."""
  ids_V = jnp.arange(x_V.shape[0], dtype=jnp.int32)
  return jnp.min(jnp.where(x_V == jnp.max(x_V), ids_V, x_V.shape[0] - 1))


def keep_head(logits_V: Array, weigh: Callable[[Array], Array], wanted: Array) -> Array:
  """Keeps the shortest head of the order "largest logit first, then lowest id" whose weights sum to ≥ `wanted`; the
  rest becomes −inf. weigh: logits of any number -> their weights, monotone and not negative."""
  size = logits_V.shape[0]
  logits_V = jnp.where(logits_V == 0, 0.0, logits_V)  # a partial sort puts +0 before −0; they are one value
  top_C, ids_C = lax.top_k(logits_V, min(FEW, size))
  reached_C = jnp.cumsum(weigh(top_C)) >= wanted
  found = jnp.any(reached_C)
  last = jnp.argmax(reached_C)
  # The head ends with the token `border`, whose logit is `edge`.
  end = (top_C[last], ids_C[last].astype(jnp.int32))
  edge, border = only_if(~found & (size > FEW), lambda _, x_V: _search(x_V, weigh, wanted), end, logits_V)
  everything = ~found & (size <= FEW)  # rounding kept even the whole from reaching what was wanted
  ids_V = jnp.arange(size, dtype=jnp.int32)
  kept_V = (logits_V > edge) | ((logits_V == edge) & (ids_V <= border)) | everything
  return jnp.where(kept_V, logits_V, -jnp.inf)


def _search(logits_V: Array, weigh: Callable[[Array], Array], wanted: Array) -> tuple[Array, Array]:
  """The end of the head by bisection: the logit and the id of its last token."""
  order_V, weight_V = _ordered_bits(logits_V), weigh(logits_V)

  def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds  # the head down to `low` weighs enough; none above `high` does
    middle = low + (high - low) // 2 + (high - low) % 2
    enough = jnp.sum(jnp.where(order_V >= middle, weight_V, 0.0)) >= wanted
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

  edge, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (jnp.min(order_V), jnp.max(order_V)))
  tied_V = order_V == edge
  value = jnp.max(jnp.where(tied_V, logits_V, -jnp.inf))
  missing = wanted - jnp.sum(jnp.where(order_V > edge, weight_V, 0.0))
  each = weigh(value[None])[0]  # tied logits weigh the same
  number = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0, each, 1.0)), 1.0)
  ids_V = jnp.arange(logits_V.shape[0], dtype=jnp.int32)
  within_V = tied_V & (jnp.cumsum(tied_V) <= number)
  return value, jnp.max(jnp.where(within_V, ids_V, 0))


def _ordered_bits(x: Array) -> Array:
  """uint32 that compare as the float32 do; +0 and −0 are one value."""
  bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  sign = np.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)
