"""Changes to one row's logits before the draw: "optax for logits".

A LogitTransform is a triple of pure functions for one row, vmapped by the strategy. Its numbers live in its state, so
changing a setting compiles nothing; the order of a chain is structure. A token is removed by giving it −inf. Logits
are float32; ids ≥ the tokenizer's size and whatever was masked before already stand at −inf.

Sets are found without sorting the vocabulary: floats are mapped to integers of the same order, and the value at the
edge of the set is found by bisection on the bits, exactly. Ties at an edge go to the lowest ids.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.types import Array

_LANES = 128  # partial sums side by side, or XLA's CPU backend adds one number at a time


class Context(NamedTuple):
  """What a row has seen. tokens_L: prompt and output, valid before `length`. prompt: tokens of the prompt."""

  tokens_L: Array
  length: Array
  prompt: Array


class LogitTransform(NamedTuple):
  """init: () -> state, a pytree of scalars or arrays for one row.
  update: (logits_V, state, context) -> logits_V.
  observe: (state, token) -> state, once a drawn token is known.
  """

  init: Callable[[], Any]
  update: Callable[[Array, Any, Context], Array]
  observe: Callable[[Any, Array], Any] = lambda state, token: state


class _Update(NamedTuple):
  """Functions one after another. Equal and hashed by them, so that two chains of one order share a compilation."""

  links: tuple[Callable, ...]

  def __call__(self, logits_V: Array, state: tuple, context: Context) -> Array:
    for change, part in zip(self.links, state):
      logits_V = change(logits_V, part, context)
    return logits_V


class _Observe(NamedTuple):
  """Like `_Update`, for what is drawn."""

  links: tuple[Callable, ...]

  def __call__(self, state: tuple, token: Array) -> tuple:
    return tuple(note(part, token) for note, part in zip(self.links, state))


def chain(*transforms: LogitTransform) -> LogitTransform:
  """The transforms one after another, each on what the one before it left."""
  update, observe = _Update(tuple(t.update for t in transforms)), _Observe(tuple(t.observe for t in transforms))
  return LogitTransform(lambda: tuple(t.init() for t in transforms), update, observe)


def _keep(state: Any, token: Array) -> Any:
  return state


def repetition(value: float) -> LogitTransform:
  """Makes tokens of the prompt or output less likely, once each: x/value for x ≥ 0, x·value below (Keskar et al. 2019,
  arXiv:1909.05858, section 4.1, with the sign rule since adopted). 1 is off."""
  _check("repetition_penalty", value, 0 < value < 2.0**100, "a number above 0 (1 is off)")
  return LogitTransform(lambda: np.float32(value), _repetition, _keep)


def temperature(value: float) -> LogitTransform:
  """Divides by `value`; 0 leaves the largest logit alone, the lowest id where several are largest.

  Raises ValueError for negative or non-finite values.
  """
  most = 2.0**126  # a reciprocal beyond it flushes to 0, and a masked token's −inf · 0 is NaN
  _check("temperature", value, 0 <= value <= most, "a finite number ≥ 0 (0 takes the most probable token)")
  return LogitTransform(lambda: np.float32(value), _temperature, _keep)


def top_k(value: int | None) -> LogitTransform:
  """Keeps exactly the `value` largest (Fan et al. 2018, arXiv:1805.04833). None, 0 and −1 keep all; so does ≥ V."""
  value = 0 if value is None else value
  _check("top_k", value, value % 1 == 0 and value >= -1, "an integer ≥ 1, or None, 0 or −1 for off")
  return LogitTransform(lambda: np.int32(min(value, np.iinfo(np.int32).max)), _top_k, _keep)


def top_p(value: float | None) -> LogitTransform:
  """Keeps the smallest set, most probable first, whose mass is ≥ `value` (Holtzman et al. 2020, arXiv:1904.09751).

  None and 1 keep all. 0 is refused: temperature=0 is how to ask for the most probable token.
  """
  value = 1.0 if value is None else value
  hint = "a number in (0, 1]" + ("; for the most probable token use temperature=0" if value == 0 else "")
  _check("top_p", value, 0 < value <= 1, hint)
  return LogitTransform(lambda: np.float32(value), _top_p, _keep)


def min_p(value: float | None) -> LogitTransform:
  """Keeps tokens at least `value` times as probable as the most probable (Nguyen et al. 2024, arXiv:2407.01082).

  None and 0 keep all.
  """
  value = 0.0 if value is None else value
  _check("min_p", value, 0 <= value <= 1, "a number in [0, 1]")
  return LogitTransform(lambda: np.float32(value), _min_p, _keep)


def _check(name: str, value: Any, good: bool, want: str) -> None:
  if isinstance(value, bool) or not np.isfinite(value) or not good:
    raise ValueError(f"{name} must be {want}, got {value!r}")


def _repetition(logits_V: Array, value: Array, context: Context) -> Array:
  def penalise(logits_V: Array) -> Array:
    size = logits_V.shape[0]
    ids_L = jnp.where(jnp.arange(context.tokens_L.shape[0]) < context.length, context.tokens_L, size)
    seen_V = jnp.zeros(size, bool).at[ids_L].set(True, mode="drop")
    return jnp.where(seen_V, jnp.where(logits_V < 0, logits_V * value, logits_V / value), logits_V)

  return only_if(value != 1, penalise, logits_V)


def _temperature(logits_V: Array, value: Array, context: Context) -> Array:
  # Below the smallest normal float32 a quotient may flush to 0/0; the limit is the maximum alone.
  greedy = value < np.finfo(np.float32).tiny

  def best(x_V: Array) -> Array:
    # The maximum itself, so that NaN, and −inf where all is masked, are still seen after it.
    return jnp.where(jnp.arange(x_V.shape[0]) == largest(x_V), jnp.max(x_V), -jnp.inf)

  cooled_V = only_if(~greedy, lambda x_V: (x_V - jnp.max(x_V)) / value, logits_V)
  return only_if(greedy, best, cooled_V)


def _top_k(logits_V: Array, k: Array, context: Context) -> Array:
  size = logits_V.shape[0]
  on = (k > 0) & (k < size)
  return only_if(on, lambda x_V: _head_of_order(x_V, jnp.ones_like(x_V), k.astype(jnp.float32)), logits_V)


def _top_p(logits_V: Array, p: Array, context: Context) -> Array:
  def nucleus(logits_V: Array) -> Array:
    weight_V = jnp.exp(logits_V - jnp.max(logits_V))
    # A sum of float32 weights is uncertain in its last bits: a mass that close to p counts as having reached it.
    return _head_of_order(logits_V, weight_V, p * _total(weight_V) * np.float32(1 - 2**-21))

  return only_if(p < 1, nucleus, logits_V)


def _min_p(logits_V: Array, p: Array, context: Context) -> Array:
  def above(logits_V: Array) -> Array:
    edge = jnp.log(p)  # p · p_max, on logits; the allowance is the rounding of the logarithm
    return jnp.where(logits_V - jnp.max(logits_V) >= edge * np.float32(1 + 2**-22), logits_V, -jnp.inf)

  return only_if(p > 0, above, logits_V)


def only_if(needed: Array, change: Callable[[Array], Array], x: Array) -> Array:
  """`change(x)` where needed, else x.

  Under vmap a `cond` computes both branches for every row; a loop that runs at most once is skipped as a whole when
  no row needs it, which is what makes an unused setting free.
  """

  def once(carry: tuple[Array, Array]) -> tuple[Array, Array]:
    return jnp.zeros_like(carry[0]), change(carry[1])

  return lax.while_loop(lambda carry: carry[0], once, (needed, x))[1]


def largest(x_V: Array) -> Array:
  """The lowest id of the largest value. Two plain reductions: XLA's CPU argmax is one slow one."""
  ids_V = jnp.arange(x_V.shape[0], dtype=jnp.int32)
  return jnp.min(jnp.where(x_V == jnp.max(x_V), ids_V, x_V.shape[0] - 1))


def _head_of_order(logits_V: Array, weight_V: Array, wanted: Array) -> Array:
  """Keeps the shortest head of the order "largest logit first, then lowest id" whose weights sum to ≥ `wanted`."""
  order_V = _ordered_bits(logits_V)

  def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds  # the head down to `low` weighs enough; none above `high` does
    middle = low + (high - low) // 2 + (high - low) % 2
    enough = _total(jnp.where(order_V >= middle, weight_V, 0.0)) >= wanted
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

  edge, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (jnp.min(order_V), jnp.max(order_V)))
  tied_V = order_V == edge
  missing = wanted - _total(jnp.where(order_V > edge, weight_V, 0.0))
  each = jnp.max(jnp.where(tied_V, weight_V, 0.0))  # tied logits weigh the same
  number = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0, each, 1.0)), 1.0)
  crowded = _total(tied_V.astype(jnp.float32)) > number
  lowest = lambda x_V: jnp.where(tied_V & (jnp.cumsum(tied_V) > number), -jnp.inf, x_V)  # noqa: E731
  return only_if(crowded, lowest, jnp.where(order_V >= edge, logits_V, -jnp.inf))


def _ordered_bits(x: Array) -> Array:
  """uint32 that compare as the float32 do; +0 and −0 are one value."""
  bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  sign = np.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _total(x_V: Array) -> Array:
  """The sum, by lanes."""
  spare = -x_V.shape[0] % _LANES
  return jnp.pad(x_V, (0, spare)).reshape(-1, _LANES).sum(axis=0).sum()
