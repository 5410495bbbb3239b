"""Changes to one row's logits before the draw: "optax for logits".

A LogitTransform is a triple of pure functions for one row, vmapped by the strategy. Its numbers live in its state, so
changing a setting compiles nothing; the order of a chain is structure. A token is removed by giving it −inf. Logits
are float32; ids ≥ the tokenizer's size and whatever was masked before already stand at −inf.
Ties at the edge of a set go to the lowest ids.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from decoder.sampling.selection import keep_head, largest, only_if
from decoder.types import Array


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
    return [logits_V, *self.steps(logits_V, state, context)][-1]

  def steps(self, logits_V: Array, state: tuple, context: Context) -> Iterator[Array]:
    """What each link leaves, one after another."""
    for change, name, part in zip(self.links, self.names, state):
      changed_V = change(logits_V, part, context)
      if jnp.shape(changed_V) != logits_V.shape:
        raise ValueError(f"transform {name} must give logits of shape {logits_V.shape}, got {jnp.shape(changed_V)}")
      logits_V = jnp.asarray(changed_V, logits_V.dtype)
      yield logits_V

  @property
  def names(self) -> tuple[str, ...]:
    """What the links are called."""
    return tuple(getattr(change, "__name__", str(change)).strip("_") for change in self.links)


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
  return only_if(on, lambda x_V: keep_head(x_V, jnp.ones_like, k.astype(jnp.float32)), logits_V)


def _top_p(logits_V: Array, p: Array, context: Context) -> Array:
  def nucleus(logits_V: Array) -> Array:
    peak = jnp.max(logits_V)
    mass = jnp.sum(jnp.exp(logits_V - peak))
    # A sum of float32 weights is uncertain in its last bits: a mass that close to p counts as having reached it.
    return keep_head(logits_V, lambda x: jnp.exp(x - peak), p * mass * np.float32(1 - 2**-21))

  return only_if(p < 1, nucleus, logits_V)


def _min_p(logits_V: Array, p: Array, context: Context) -> Array:
  def above(logits_V: Array) -> Array:
    edge = jnp.log(p)  # p · p_max, on logits; the allowance is the rounding of the logarithm
    return jnp.where(logits_V - jnp.max(logits_V) >= edge * np.float32(1 + 2**-22), logits_V, -jnp.inf)

  return only_if(p > 0, above, logits_V)
