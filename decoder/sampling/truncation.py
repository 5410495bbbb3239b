"""Filters: which tokens may be drawn at all. Each works on the law that the one before it left, renormalised.

Ties at the edge of a set of a given size or mass go to the lowest ids; a filter by a threshold treats equals alike,
and always leaves the most probable token. Other libraries' rules for ties are in `rules.py`.
"""

import jax.numpy as jnp
import numpy as np

from decoder.sampling.law import Law, Part, head_of, mass
from decoder.sampling.selection import keep_head, keep_number, only_if
from decoder.sampling.transforms import Filter, LogitTransform, check
from decoder.sampling.typical import typical_set
from decoder.types import Array

# A sum of float32 weights is uncertain in its last bits: a mass that close to p counts as having reached it.
REACHED = np.float32(1 - 2**-21)
SLACK = np.float32(1e-6)  # of thresholds on probabilities: the rounding of a float32 softmax
XTC_TAG = 2**31  # tags lie beyond all token ids, which are folded into keys too


def top_k(value: int | None) -> LogitTransform:
  """Keeps exactly the `value` largest (Fan et al. 2018, arXiv:1805.04833). None, 0 and −1 keep all; so does ≥ V."""
  state = whole_k(value)
  return LogitTransform(lambda: state, Filter(positive, _top_k, _narrow_k))


def whole_k(value: int | None) -> np.int32:
  """The state of a top-k, checked; not positive: off."""
  value = 0 if value is None else value
  check("top_k", value, lambda k: k % 1 == 0 and k >= -1, "an integer ≥ 1, or None, 0 or −1 for off")
  return np.int32(min(value, np.iinfo(np.int32).max))


def top_p(value: float | None) -> LogitTransform:
  """Keeps the smallest set, most probable first, whose mass is ≥ `value` (Holtzman et al. 2020, arXiv:1904.09751).

  None and 1 keep all. 0 is refused: temperature=0 is how to ask for the most probable token.
  """
  value = 1.0 if value is None else value
  hint = "a number in (0, 1]" + ("; for the most probable token use temperature=0" if value == 0 else "")
  check("top_p", value, lambda p: 0 < p <= 1, hint)
  return LogitTransform(lambda: np.float32(value), Filter(below_one, _top_p, narrow_p))


def min_p(value: float | None) -> LogitTransform:
  """Keeps tokens at least `value` times as probable as the most probable (Nguyen et al. 2024, arXiv:2407.01082).

  None and 0 keep all.
  """
  value = 0.0 if value is None else value
  check("min_p", value, lambda p: 0 <= p <= 1, "a number in [0, 1]")
  return LogitTransform(lambda: np.float32(value), Filter(positive, _min_p, _narrow_min_p))


def typical(value: float | None) -> LogitTransform:
  """Keeps the smallest set whose mass is ≥ `value`, those first whose surprise −log p is nearest to the law's entropy
  (Meister et al. 2022, arXiv:2202.00666). None and 1 keep all."""
  value = 1.0 if value is None else value
  check("typical_p", value, lambda p: 0 < p <= 1, "a number in (0, 1]")
  return LogitTransform(lambda: np.float32(value), Filter(below_one, _typical))


def epsilon(value: float | None) -> LogitTransform:
  """Keeps tokens of probability ≥ `value` (Hewitt et al. 2022, arXiv:2210.15191). None and 0 keep all."""
  value = 0.0 if value is None else value
  check("epsilon_cutoff", value, lambda p: 0 <= p < 1, "a number in [0, 1)")
  return LogitTransform(lambda: np.float32(value), Filter(positive, _epsilon))


def eta(value: float | None) -> LogitTransform:
  """Keeps tokens of probability ≥ min(value, √value · e^−H), H the law's entropy (Hewitt et al. 2022,
  arXiv:2210.15191). None and 0 keep all."""
  value = 0.0 if value is None else value
  check("eta_cutoff", value, lambda p: 0 <= p < 1, "a number in [0, 1)")
  return LogitTransform(lambda: np.float32(value), Filter(positive, _eta))


def top_n_sigma(value: float | None) -> LogitTransform:
  """Keeps logits within `value` standard deviations of the largest (Tang et al. 2024, arXiv:2411.07641). The
  deviation is that of the logits which are not masked. None and 0 keep all."""
  value = 0.0 if value is None else value
  check("top_n_sigma", value, lambda n: 0 <= n < 2.0**100, "a number ≥ 0 (0 is off)")
  return LogitTransform(lambda: np.float32(value), Filter(positive, _top_n_sigma))


def xtc(probability: float, threshold: float = 0.1) -> LogitTransform:
  """Exclude top choices: at random steps, of the tokens of probability ≥ `threshold` only the least probable stays
  (p-e-w 2024, text-generation-webui 6335). `probability` is that of a step to be so; 0 is off. Random."""
  check("xtc_probability", probability, lambda p: 0 <= p <= 1, "a number in [0, 1]")
  check("xtc_threshold", threshold, lambda p: 0 < p <= 1, "a number in (0, 1]")
  state = (np.float32(probability), np.float32(threshold))
  return LogitTransform(lambda: state, Filter(first_positive, _xtc, tag=XTC_TAG))


def positive(state: Array) -> Array:
  return state > 0


def first_positive(state: tuple) -> Array:
  return state[0] > 0


def below_one(state: Array) -> Array:
  return state < 1


def _top_k(logits_N: Array, ids_N: Array, k: Array, chance: Array) -> Array:
  return only_if(k < logits_N.shape[0], keep_number, logits_N, k.astype(jnp.float32))


def _narrow_k(law: Law, k: Array, chance: Array) -> Part:
  return first_of(law, *head_of_number(law, k))


def _top_p(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  return nucleus(logits_N, p)


def _min_p(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  return jnp.where(logits_N >= _least(jnp.max(logits_N), p), logits_N, -jnp.inf)


def _narrow_min_p(law: Law, p: Array, chance: Array) -> Part:
  edge = _least(jnp.max(law.top_C), p)
  return Part(jnp.where(law.top_C >= edge, law.top_C, -jnp.inf), law.few | (law.floor < edge))


def _least(peak: Array, p: Array) -> Array:
  """p · p_max, on logits; the allowance is the rounding of the logarithm."""
  return peak + jnp.log(p) * np.float32(1 + 2**-22)


def _typical(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  off_N, edge, border = typical_set(logits_N, ids_N, p * REACHED)
  return jnp.where((off_N < edge) | ((off_N == edge) & (ids_N <= border)), logits_N, -jnp.inf)


def _epsilon(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  return keep_above(logits_N, log_law(logits_N)[0], jnp.log(p))


def _eta(logits_N: Array, ids_N: Array, p: Array, chance: Array) -> Array:
  log_N, entropy = log_law(logits_N)
  return keep_above(logits_N, log_N, jnp.minimum(jnp.log(p), 0.5 * jnp.log(p) - entropy))


def _top_n_sigma(logits_N: Array, ids_N: Array, n: Array, chance: Array) -> Array:
  there_N = logits_N > -jnp.inf
  below_N = jnp.where(there_N, jnp.max(logits_N) - logits_N, 0.0)  # one size whatever the logits' own
  count = jnp.maximum(jnp.sum(there_N.astype(jnp.float32)), 1.0)
  mean = jnp.sum(below_N) / count
  sigma = jnp.sqrt(jnp.sum(jnp.where(there_N, (below_N - mean) ** 2, 0.0)) / count)
  return jnp.where((below_N <= n * sigma * (1 + SLACK)) | (below_N <= 0), logits_N, -jnp.inf)


def _xtc(logits_N: Array, ids_N: Array, state: tuple, chance: Array) -> Array:
  probability, threshold = state
  strong_N = log_law(logits_N)[0] >= jnp.log(threshold) - SLACK
  least = jnp.min(jnp.where(strong_N, logits_N, jnp.inf))
  spared = jnp.min(jnp.where(strong_N & (logits_N == least), ids_N, np.iinfo(np.int32).max))
  return jnp.where((chance < probability) & strong_N & (ids_N != spared), -jnp.inf, logits_N)


def nucleus(logits_N: Array, p: Array) -> Array:
  """The head of the order that has mass p."""
  weight_N = jnp.exp(logits_N - jnp.max(logits_N))
  return keep_head(logits_N, weight_N, p * jnp.sum(weight_N) * REACHED)


def head_of_number(law: Law, k: Array) -> tuple[Array, Array]:
  """`law.head_of` k tokens."""
  return head_of(law, (law.top_C > -jnp.inf).astype(jnp.float32), k.astype(jnp.float32))


def head_of_mass(law: Law, p: Array) -> tuple[Array, Array]:
  """`law.head_of` the mass p."""
  peak, total = mass(law)
  return head_of(law, jnp.exp(law.top_C - peak), p * total * REACHED)


def narrow_p(law: Law, p: Array, chance: Array) -> Part:
  """The head of the list that has mass p."""
  return first_of(law, *head_of_mass(law, p))


def first_of(law: Law, last: Array, found: Array) -> Part:
  """The list up to its entry `last`."""
  return Part(jnp.where(jnp.arange(law.top_C.shape[0]) <= last, law.top_C, -jnp.inf), law.few | found)


def keep_above(logits_N: Array, log_N: Array, edge: Array) -> Array:
  """Tokens of log-probability ≥ edge, up to rounding, and the most probable in any case."""
  return jnp.where((log_N >= edge - SLACK) | (logits_N == jnp.max(logits_N)), logits_N, -jnp.inf)


def log_law(logits_N: Array) -> tuple[Array, Array]:
  """Log-probabilities and their entropy, in nats."""
  x_N = logits_N - jnp.max(logits_N)
  weight_N = jnp.exp(x_N)
  total = jnp.sum(weight_N)
  mean = jnp.sum(jnp.where(weight_N > 0, weight_N * x_N, 0.0)) / total
  return x_N - jnp.log(total), jnp.log(total) - mean
