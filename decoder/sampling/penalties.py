"""Penalties on tokens that were used before. Stateless: what was used is in the context, so that rolling back is a
shorter length.

A scope says where: 'all', the prompt and the output; 'output'; or a number, the last so many tokens of both.
"""

import numbers

import jax.numpy as jnp
import numpy as np

from decoder.sampling.transforms import Context, LogitTransform, Skipped, check
from decoder.types import Array

Scope = str | int


def repetition(value: float, scope: Scope = "all") -> LogitTransform:
  """Makes tokens of the prompt or output less likely, once each: x/value for x ≥ 0, x·value below (Keskar et al. 2019,
  arXiv:1909.05858, section 4.1, with the sign rule since adopted). 1 is off."""
  check("repetition_penalty", value, lambda x: 0 < x < 2.0**100, "a number above 0 (1 is off)")
  state = (np.float32(value), encoded("repetition_scope", scope))
  return LogitTransform(lambda: state, Skipped(not_one, _repetition))


def presence(value: float, scope: Scope = "output") -> LogitTransform:
  """Subtracts `value` from the logits of tokens in the scope, once each (the API of OpenAI, 2020). 0 is off."""
  check("presence_penalty", value, lambda x: abs(x) < 2.0**100, "a number (0 is off)")
  state = (np.float32(value), encoded("penalty_scope", scope))
  return LogitTransform(lambda: state, Skipped(not_zero, _presence))


def frequency(value: float, scope: Scope = "output") -> LogitTransform:
  """Subtracts `value` from a token's logit for each time it is in the scope (the API of OpenAI, 2020). 0 is off."""
  check("frequency_penalty", value, lambda x: abs(x) < 2.0**100, "a number (0 is off)")
  state = (np.float32(value), encoded("penalty_scope", scope))
  return LogitTransform(lambda: state, Skipped(not_zero, _frequency))


def encoded(name: str, scope: Scope) -> np.int32:
  """A scope as a number: 0 all, −1 the output, else a window. ValueError that names the setting."""
  whole = isinstance(scope, numbers.Integral) and not isinstance(scope, bool)
  if scope not in ("all", "output") and not (whole and 1 <= scope < 2**31):
    raise ValueError(f"{name} must be 'all', 'output' or a number of tokens ≥ 1, got {scope!r}")
  return np.int32({"all": 0, "output": -1}.get(scope, scope))


def begin(scope: Array, context: Context) -> Array:
  """The position at which a scope begins."""
  window = jnp.maximum(context.length - scope, 0)
  return jnp.where(scope > 0, window, jnp.where(scope < 0, context.prompt, 0))


def not_one(state: tuple) -> Array:
  return state[0] != 1


def not_zero(state: tuple) -> Array:
  return state[0] != 0


def _within(scope: Array, context: Context, size: int) -> Array:
  """The ids of the scope's tokens; `size` outside it."""
  at_L = jnp.arange(context.tokens_L.shape[0])
  within_L = (at_L >= begin(scope, context)) & (at_L < context.length)
  return jnp.where(within_L, context.tokens_L, size)


# Changes are written to the tokens' own places, since a pass over the vocabulary costs more than one over the context.


def _repetition(logits_V: Array, state: tuple, context: Context) -> Array:
  value, scope = state
  ids_L = _within(scope, context, logits_V.shape[0])
  x_L = jnp.take(logits_V, ids_L, mode="clip")
  return logits_V.at[ids_L].set(jnp.where(x_L < 0, x_L * value, x_L / value), mode="drop")


def _presence(logits_V: Array, state: tuple, context: Context) -> Array:
  value, scope = state
  ids_L = _within(scope, context, logits_V.shape[0])
  return logits_V.at[ids_L].set(jnp.take(logits_V, ids_L, mode="clip") - value, mode="drop")


def _frequency(logits_V: Array, state: tuple, context: Context) -> Array:
  value, scope = state
  ids_L = _within(scope, context, logits_V.shape[0])
  count_V = jnp.zeros_like(logits_V).at[ids_L].add(1.0, mode="drop")
  x_L, count_L = (jnp.take(of_V, ids_L, mode="clip") for of_V in (logits_V, count_V))
  return logits_V.at[ids_L].set(x_L - value * count_L, mode="drop")
