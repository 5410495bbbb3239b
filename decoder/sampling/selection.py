"""Finding the head of a vocabulary's order without sorting the vocabulary.

What filters keep is nearly always among the few largest logits, which a partial sort of the best blocks yields for the
price of a few passes over everything (`law.py` works on them). Where it is not, floats are mapped to integers of the
same order and the value at the edge is found by bisection on the bits. Both are exact; what is skipped depends on the
data, not on a setting.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from decoder.ops.kernels import build
from decoder.types import Array

FEW = 256  # largest logits looked at first; on CPU a partial sort of so many costs less than one argmax
_BLOCK = 32  # logits a block of `head`: few enough blocks to sort, few enough logits in those that are chosen
_SIGN = np.uint32(1 << 31)


def only_if(needed: Array, change: Callable, x: Any, *inputs: Any) -> Any:
  """`change(x, *inputs)` where needed (a scalar), else x; x and inputs are arrays or pytrees of them.

  Under vmap a `cond` computes both branches for every row. This one stays a branch, which is taken when any row needs
  it; that is what makes an unused setting free. Whatever `change` has of a row must come in through x and inputs.
  """

  @jax.custom_batching.custom_vmap
  def chosen(needed: Array, x: Any, inputs: tuple) -> Any:
    return lax.cond(needed, lambda x, inputs: change(x, *inputs), lambda x, inputs: x, x, inputs)

  @chosen.def_vmap
  def _(rows: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
    def repeated(there: bool, leaf: Array) -> Array:
      return leaf if there else jnp.broadcast_to(leaf, (rows, *leaf.shape))

    def some(x: Any, needed_B: Array, *inputs: Any) -> Any:
      changed = jax.vmap(change)(x, *inputs)
      return changed if rows == 1 else jax.tree.map(jax.vmap(jnp.where), _like(x, needed_B), changed, x)

    needed_B, x, inputs = jax.tree.map(repeated, tuple(batched), arguments)
    after = only_if(jnp.any(needed_B), some, x, needed_B, *inputs)  # a branch under a further vmap, too
    return after, _like(after, True)

  return chosen(jnp.asarray(needed), x, inputs)


def _like(tree: Any, value: Any) -> Any:
  return jax.tree.map(lambda leaf: value, tree)


def largest(x_V: Array) -> Array:
  """The lowest id of the largest value. Two plain reductions: XLA's CPU argmax is one slow one."""
  ids_V = jnp.arange(x_V.shape[0], dtype=jnp.int32)
  return jnp.min(jnp.where(x_V == jnp.max(x_V), ids_V, x_V.shape[0] - 1))


def head(x_V: Array, number: int = FEW) -> tuple[Array, Array]:
  """The largest `number`, or all if there are fewer, and their ids (int32), as `lax.top_k` gives them: of equals, the
  lowest id first.

  Only blocks with the largest maxima can hold any of them, and so only these are sorted: half the time of a partial
  sort of the whole, or less for few.
  """
  size = x_V.shape[0]
  if size <= 2 * number * _BLOCK:
    return lax.top_k(x_V, min(number, size))
  blocks = jnp.pad(x_V, (0, -size % _BLOCK), constant_values=-jnp.inf).reshape(-1, _BLOCK)
  chosen_C = jnp.sort(lax.top_k(_whole(jnp.max(blocks, axis=1)), number)[1])  # in order, for the ids of equals to be
  top_C, place_C = lax.top_k(_whole(blocks[chosen_C]).reshape(-1), number)
  return top_C, jnp.minimum(chosen_C[place_C // _BLOCK] * _BLOCK + place_C % _BLOCK, size - 1)


def _whole(x: Array) -> Array:
  """On several devices, what the parts of a vocabulary come down to is sent to each at once. Divided, it would be
  sorted by one exchange after another."""
  return lax.with_sharding_constraint(x, PartitionSpec()) if build.partitioned() else x


def keep_head(logits_V: Array, weight_V: Array, wanted: Array) -> Array:
  """Keeps the shortest head of the order "largest logit first, then lowest id" whose weights sum to ≥ `wanted`; the
  rest becomes −inf. Weights grow with the logits and are not negative.

  Bisects for the weight of the head's last token, since then a pass reads one array, the weights, which are both what
  is compared and what is added; what weighs the same is left to `_end`.
  """
  anywhere_V = jnp.ones_like(weight_V, dtype=bool)
  each = _edge(weight_V, anywhere_V, lambda at_least_V: jnp.sum(jnp.where(at_least_V, weight_V, 0.0)) >= wanted)
  missing = wanted - jnp.sum(jnp.where(weight_V > each, weight_V, 0.0))
  number = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0, each, 1.0)), 1.0)
  return _until(logits_V, *_end(logits_V, weight_V == each, number))


def keep_number(logits_V: Array, number: Array) -> Array:
  """Keeps so many (float32, ≥ 1) of the same order."""
  return _until(logits_V, *_end(logits_V, jnp.ones_like(logits_V, dtype=bool), number))


def _until(logits_V: Array, edge: Array, border: Array) -> Array:
  ids_V = jnp.arange(logits_V.shape[0], dtype=jnp.int32)
  return jnp.where((logits_V > edge) | ((logits_V == edge) & (ids_V <= border)), logits_V, -jnp.inf)


def _end(logits_V: Array, among_V: Array, number: Array) -> tuple[Array, Array]:
  """The logit and the id of the last of the first `number` of those `among_V`: bisects for the logit, and counts ids
  among those of the same."""
  edge = _edge(logits_V, among_V, lambda at_least_V: _count(at_least_V & among_V) >= number)
  tied_V = logits_V == edge
  return edge, _place(tied_V, number - _count(among_V & (logits_V > edge)))


def _place(where_V: Array, number: Array) -> Array:
  """The index of the `number`-th true one (float32, ≥ 1); of the last where there are fewer. Counts by blocks, since a
  running sum over everything costs as much as twenty passes."""
  blocks = jnp.pad(where_V, (0, -where_V.shape[0] % _BLOCK)).reshape(-1, _BLOCK)
  number = jnp.minimum(number, _count(where_V))
  upto = jnp.cumsum(jnp.sum(blocks.astype(jnp.float32), axis=1))
  block = jnp.argmax(upto >= number)
  before = jnp.where(block > 0, upto[block - 1], 0.0)
  inside = jnp.cumsum(blocks[block].astype(jnp.float32))
  return (block * _BLOCK + jnp.argmax(before + inside >= number)).astype(jnp.int32)


def _edge(x_V: Array, among_V: Array, enough: Callable[[Array], Array]) -> Array:
  """The largest x, of those `among_V`, for which enough(x_V ≥ x); the smallest where there is none."""

  def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds  # those down to `low` are enough; those above `high` are not
    middle = low + (high - low) // 2 + (high - low) % 2
    there = enough(x_V >= _float(middle))
    return jnp.where(there, middle, low), jnp.where(there, high, middle - 1)

  smallest, largest = (
    _order(reduce(jnp.where(among_V, x_V, worst))) for reduce, worst in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
  )
  return _float(lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (smallest, largest))[0])


def _count(where_V: Array) -> Array:
  return jnp.sum(where_V.astype(jnp.float32))


def _order(x: Array) -> Array:
  """uint32 that compare as the float32 do; +0 and −0 are one value."""
  bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _float(order: Array) -> Array:
  """The float32 of an `_order`."""
  return lax.bitcast_convert_type(jnp.where(order >= _SIGN, order ^ _SIGN, ~order), jnp.float32)
