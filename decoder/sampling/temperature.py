"""How flat the law is: the temperature, fixed or by the law's own entropy. Temperature 0 takes the largest logit."""

import jax.numpy as jnp
import numpy as np

from decoder.sampling.selection import largest, only_if
from decoder.sampling.transforms import Context, LogitTransform, Skipped, check
from decoder.types import Array

_MOST = 2.0**126  # a reciprocal beyond it flushes to 0, and a masked token's −inf · 0 is NaN


def temperature(value: float) -> LogitTransform:
  """Divides by `value`; 0 leaves the largest logit alone, the lowest id where several are largest.

  Raises ValueError for negative or non-finite values.
  """
  hint = "a finite number ≥ 0 (0 takes the most probable token)"
  check("temperature", value, lambda x: 0 <= x <= _MOST, hint)
  return LogitTransform(lambda: np.float32(value), _temperature)


def replaced_temperature() -> LogitTransform:
  """A temperature that changes nothing, because another transform sees to it."""
  return LogitTransform(lambda: np.float32(np.inf), _temperature)


def dynamic_temperature(value: float, spread: float, exponent: float = 1.0) -> LogitTransform:
  """A temperature from value − spread (not below 0), where one token has all mass, to value + spread, where all that
  are left are equally probable: it grows with the entropy's share of its maximum, to the power `exponent`.

  As in llama.cpp (kalomaze 2023); Zhang et al. 2024 (arXiv:2403.14541) is a relative. A spread of 0 is off: it then
  divides by nothing.
  """
  check("temperature", value, lambda x: 0 <= x <= _MOST, "a finite number ≥ 0")
  check("dynatemp_range", spread, lambda x: 0 <= x <= _MOST / 2, "a finite number ≥ 0 (0 is off)")
  check("dynatemp_exponent", exponent, lambda x: 0 < x <= 100, "a number in (0, 100]")
  low, high = max(0.0, value - spread), value + spread
  state = (np.bool_(spread > 0), np.float32(low), np.float32(high), np.float32(exponent))
  return LogitTransform(lambda: state, Skipped(_on, _dynamic_temperature))


def _on(state: tuple) -> Array:
  return state[0]


def _temperature(logits_V: Array, value: Array, context: Context) -> Array:
  # Below the smallest normal float32 a quotient may flush to 0/0; the limit is the maximum alone.
  greedy, warm = value < np.finfo(np.float32).tiny, value < np.inf

  def best(x_V: Array) -> Array:
    # The maximum itself, so that NaN, and −inf where all is masked, are still seen after it.
    return jnp.where(jnp.arange(x_V.shape[0]) == largest(x_V), jnp.max(x_V), -jnp.inf)

  cooled_V = only_if(warm & ~greedy, lambda x_V, value: (x_V - jnp.max(x_V)) / value, logits_V, value)
  return only_if(greedy, best, cooled_V)


def _dynamic_temperature(logits_V: Array, state: tuple, context: Context) -> Array:
  _, low, high, exponent = state
  x_V = logits_V - jnp.max(logits_V)
  weight_V = jnp.exp(x_V)
  total = jnp.sum(weight_V)
  entropy = jnp.log(total) - jnp.sum(jnp.where(weight_V > 0, weight_V * x_V, 0.0)) / total
  most = jnp.log(jnp.sum((logits_V > -jnp.inf).astype(jnp.float32)))
  share = jnp.where(most > 0, jnp.clip(entropy / most, 0.0, 1.0), 0.0)
  return _temperature(logits_V, low + (high - low) * share**exponent, context)
