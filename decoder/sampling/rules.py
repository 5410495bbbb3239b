"""Other libraries' rules where they differ from ours, mostly in which of several equals are kept. Presets use them, and
so may an order of one's own. The rules are those of the cases C20 … C25, and of the libraries' sources."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from decoder.sampling.law import Law, Part
from decoder.sampling.masks import bad_words
from decoder.sampling.selection import keep_number, only_if
from decoder.sampling.temperature import temperature
from decoder.sampling.transforms import Filter, LogitTransform, check
from decoder.sampling.truncation import (
  REACHED,
  SLACK,
  XTC_TAG,
  below_one,
  first_positive,
  head_of_mass,
  head_of_number,
  log_law,
  narrow_p,
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
  return LogitTransform(lambda: state, Filter(positive, _top_k_with_ties, _narrow_k_with_ties))


def top_p_from_below(value: float | None) -> LogitTransform:
  """Like top_p, but the highest ids of equals stay: the least probable go while the mass of what goes is ≤ 1 − p,
  lowest id first (transformers, vLLM). 0 keeps one token."""
  state = _share("top_p", 1.0 if value is None else value, 0)
  return LogitTransform(lambda: state, Filter(below_one, _top_p_from_below, _narrow_p_from_below))


def top_p_with_ties(value: float | None) -> LogitTransform:
  """Like top_p, but keeps all that equal the last kept; 0 is off (MLX)."""
  state = _share("top_p", value or 1.0, 0)
  return LogitTransform(lambda: state, Filter(below_one, _top_p_with_ties, _narrow_p_with_ties))


def top_p_or_one(value: float | None) -> LogitTransform:
  """Like top_p; 0 keeps one token (llama.cpp)."""
  state = _share("top_p", 1.0 if value is None else value, 0)
  return LogitTransform(lambda: state, Filter(below_one, _top_p_or_one, narrow_p))


def typical_with_ties(value: float | None) -> LogitTransform:
  """Like typical, but keeps all that are as far from the entropy as the last kept (transformers)."""
  state = _share("typical_p", 1.0 if value is None else value, 2.0**-100)
  return LogitTransform(lambda: state, Filter(below_one, _typical_with_ties))


def typical_beyond(value: float | None) -> LogitTransform:
  """Like typical, but the set's mass must exceed `value` (llama.cpp)."""
  state = _share("typical_p", 1.0 if value is None else value, 2.0**-100)
  return LogitTransform(lambda: state, Filter(below_one, _typical_beyond))


def xtc_above(probability: float, threshold: float = 0.1) -> LogitTransform:
  """Like xtc, but for tokens of probability above the threshold, and all that equal the least probable of them stay
  (MLX)."""
  return xtc(probability, threshold)._replace(update=Filter(first_positive, _xtc_above, tag=XTC_TAG))


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


def _with_ties(logits_N: Array, kept_N: Array) -> Array:
  """What equals the least that was kept comes back."""
  edge = jnp.min(jnp.where(kept_N > -jnp.inf, kept_N, jnp.inf))
  return jnp.where(logits_N >= edge, logits_N, -jnp.inf)


def _first_with_ties(law: Law, last: Array, found: Array) -> Part:
  """The list up to its entry `last`, and what equals that."""
  edge = law.top_C[last]
  return Part(jnp.where(law.top_C >= edge, law.top_C, -jnp.inf), law.few | (found & (law.floor < edge)))


def _top_k_with_ties(logits_N: Array, ids_N: Array, k: Array, chance: Array) -> Array:
  def keep(x_N: Array, k: Array) -> Array:
    return _with_ties(x_N, keep_number(x_N, k))

  return only_if(k < logits_N.shape[0], keep, logits_N, k.astype(jnp.float32))


def _narrow_k_with_ties(law: Law, k: Array, chance: Array) -> Part:
  return _first_with_ties(law, *head_of_number(law, k))


def _top_p_from_below(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  return nucleus(logits_N[::-1], p)[::-1]


def _narrow_p_from_below(law: Law, p: Array, chance: Array) -> Part:
  last, found = head_of_mass(law, p)
  edge, place_C = law.top_C[last], jnp.arange(law.top_C.shape[0])
  tied_C = law.top_C == edge
  number = jnp.sum(tied_C & (place_C <= last))
  kept_C = (law.top_C > edge) | (tied_C & (jnp.cumsum(tied_C[::-1])[::-1] <= number))
  return Part(jnp.where(kept_C, law.top_C, -jnp.inf), law.few | (found & (law.floor < edge)))


def _top_p_with_ties(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  return _with_ties(logits_N, nucleus(logits_N, p))


def _narrow_p_with_ties(law: Law, p: Array, chance: Array) -> Part:
  return _first_with_ties(law, *head_of_mass(law, p))


def _top_p_or_one(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  return nucleus(logits_N, p)


def _typical_with_ties(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  off_N, edge, _ = typical_set(logits_N, ids_N, p * REACHED)
  return jnp.where(off_N <= edge, logits_N, -jnp.inf)


def _typical_beyond(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  off_N, edge, border = typical_set(logits_N, ids_N, p / REACHED)
  return jnp.where((off_N < edge) | ((off_N == edge) & (ids_N <= border)), logits_N, -jnp.inf)


def _xtc_above(logits_N: Array, ids_N: Array, state: tuple, chance: Array) -> Array:
  probability, threshold = state
  strong_N = log_law(logits_N)[0] > jnp.log(threshold) + SLACK
  least = jnp.min(jnp.where(strong_N, logits_N, jnp.inf))
  return jnp.where((chance < probability) & (logits_N > least), -jnp.inf, logits_N)
