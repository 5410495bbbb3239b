"""Other libraries' rules where they differ from ours, mostly in which of several equals are kept. Presets use them, and
so may an order of one's own. The rules are those of the cases C20 … C25, and of the libraries' sources."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from decoder.sampling.masks import bad_words
from decoder.sampling.selection import keep_head, only_if
from decoder.sampling.temperature import temperature
from decoder.sampling.transforms import Context, LogitTransform, Skipped, check
from decoder.sampling.truncation import (
  REACHED,
  SLACK,
  XTC_TAG,
  below_one,
  first_positive,
  log_law,
  nucleus,
  positive,
  whole_k,
  xtc,
)
from decoder.sampling.typical import typical_set
from decoder.types import Array


def top_k_with_ties(value: int | None) -> LogitTransform:
  """Like top_k, but keeps all that equal the k-th (transformers, vLLM)."""
  state = whole_k(value)
  return LogitTransform(lambda: state, Skipped(positive, _top_k_with_ties))


def top_p_from_below(value: float | None) -> LogitTransform:
  """Like top_p, but the highest ids of equals stay: the least probable go while the mass of what goes is ≤ 1 − p,
  lowest id first (transformers, vLLM). 0 keeps one token."""
  state = _share("top_p", 1.0 if value is None else value, 0)
  return LogitTransform(lambda: state, Skipped(below_one, _top_p_from_below))


def top_p_with_ties(value: float | None) -> LogitTransform:
  """Like top_p, but keeps all that equal the last kept; 0 is off (MLX)."""
  state = _share("top_p", value or 1.0, 0)
  return LogitTransform(lambda: state, Skipped(below_one, _top_p_with_ties))


def top_p_or_one(value: float | None) -> LogitTransform:
  """Like top_p; 0 keeps one token (llama.cpp)."""
  state = _share("top_p", 1.0 if value is None else value, 0)
  return LogitTransform(lambda: state, Skipped(below_one, _top_p_or_one))


def typical_with_ties(value: float | None) -> LogitTransform:
  """Like typical, but keeps all that are as far from the entropy as the last kept (transformers)."""
  state = _share("typical_p", 1.0 if value is None else value, 2.0**-100)
  return LogitTransform(lambda: state, Skipped(below_one, _typical_with_ties))


def typical_beyond(value: float | None) -> LogitTransform:
  """Like typical, but the set's mass must exceed `value` (llama.cpp)."""
  state = _share("typical_p", 1.0 if value is None else value, 2.0**-100)
  return LogitTransform(lambda: state, Skipped(below_one, _typical_beyond))


def xtc_above(probability: float, threshold: float = 0.1) -> LogitTransform:
  """Like xtc, but for tokens of probability above the threshold, and all that equal the least probable of them stay
  (MLX)."""
  return xtc(probability, threshold)._replace(update=Skipped(first_positive, _xtc_above, XTC_TAG))


def temperature_clamped(value: float) -> LogitTransform:
  """Like temperature, but below 10⁻⁵ it is 0, and from there on at least 0.01 (vLLM)."""
  check("temperature", value, lambda x: x >= 0, "a finite number ≥ 0 (0 takes the most probable token)")
  return temperature(0.0 if value < 1e-5 else max(value, 0.01))


def bad_words_in_output(sequences: Sequence[Sequence[int]]) -> LogitTransform:
  """Like bad_words, but the words must be wholly in the output (vLLM)."""
  return bad_words(sequences, "output")


def _share(name: str, value: float, least: float) -> np.float32:
  check(name, value, lambda p: least <= p <= 1, f"a number in {'[0' if least == 0 else '(0'}, 1]")
  return np.float32(value)


def _with_ties(logits_V: Array, kept_V: Array) -> Array:
  """What equals the least that was kept comes back."""
  edge = jnp.min(jnp.where(kept_V > -jnp.inf, kept_V, jnp.inf))
  return jnp.where(logits_V >= edge, logits_V, -jnp.inf)


def _top_k_with_ties(logits_V: Array, k: Array, context: Context) -> Array:
  def keep(x_V: Array, k: Array) -> Array:
    return _with_ties(x_V, keep_head(x_V, jnp.ones_like, k.astype(jnp.float32)))

  return only_if(k < logits_V.shape[0], keep, logits_V, k)


def _top_p_from_below(logits_V: Array, p: Array, context: Context) -> Array:
  return nucleus(logits_V[::-1], p)[::-1]


def _top_p_with_ties(logits_V: Array, p: Array, context: Context) -> Array:
  return _with_ties(logits_V, nucleus(logits_V, p))


def _top_p_or_one(logits_V: Array, p: Array, context: Context) -> Array:
  return nucleus(logits_V, p)


def _typical_with_ties(logits_V: Array, p: Array, context: Context) -> Array:
  off_V, edge, _ = typical_set(logits_V, p * REACHED)
  return jnp.where(off_V <= edge, logits_V, -jnp.inf)


def _typical_beyond(logits_V: Array, p: Array, context: Context) -> Array:
  off_V, edge, border = typical_set(logits_V, p / REACHED)
  first_V = jnp.arange(logits_V.shape[0]) <= border
  return jnp.where((off_V < edge) | ((off_V == edge) & first_V), logits_V, -jnp.inf)


def _xtc_above(logits_V: Array, state: tuple, context: Context) -> Array:
  probability, threshold = state
  strong_V = log_law(logits_V)[0] > jnp.log(threshold) + SLACK
  least = jnp.min(jnp.where(strong_V, logits_V, jnp.inf))
  acts = jax.random.uniform(context.key) < probability
  return jnp.where(acts & (logits_V > least), -jnp.inf, logits_V)
