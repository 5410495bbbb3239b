"""Filters: which tokens may be drawn at all. Each works on the law that the one before it left, renormalised.

Ties at the edge of a set of a given size or mass go to the lowest ids; a filter by a threshold treats equals alike,
and always leaves the most probable token. Other libraries' rules for ties are in `rules.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from decoder.sampling.selection import keep_head, only_if
from decoder.sampling.transforms import Context, LogitTransform, Skipped, check
from decoder.sampling.typical import typical_set
from decoder.types import Array

# A sum of float32 weights is uncertain in its last bits: a mass that close to p counts as having reached it.
REACHED = np.float32(1 - 2**-21)
SLACK = np.float32(1e-6)  # of thresholds on probabilities: the rounding of a float32 softmax
XTC_TAG = 2**31  # tags lie beyond all token ids, which are folded into keys too


def top_k(value: int | None) -> LogitTransform:
  """Keeps exactly the `value` largest (Fan et al. 2018, arXiv:1805.04833). None, 0 and −1 keep all; so does ≥ V."""
  state = whole_k(value)
  return LogitTransform(lambda: state, Skipped(positive, _top_k))


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
  return LogitTransform(lambda: np.float32(value), Skipped(below_one, _top_p))


def min_p(value: float | None) -> LogitTransform:
  """Keeps tokens at least `value` times as probable as the most probable (Nguyen et al. 2024, arXiv:2407.01082).

  None and 0 keep all.
  """
  value = 0.0 if value is None else value
  check("min_p", value, lambda p: 0 <= p <= 1, "a number in [0, 1]")
  return LogitTransform(lambda: np.float32(value), Skipped(positive, _min_p))


def typical(value: float | None) -> LogitTransform:
  """Keeps the smallest set whose mass is ≥ `value`, those first whose surprise −log p is nearest to the law's entropy
  (Meister et al. 2022, arXiv:2202.00666). None and 1 keep all."""
  value = 1.0 if value is None else value
  check("typical_p", value, lambda p: 0 < p <= 1, "a number in (0, 1]")
  return LogitTransform(lambda: np.float32(value), Skipped(below_one, _typical))


def epsilon(value: float | None) -> LogitTransform:
  """Keeps tokens of probability ≥ `value` (Hewitt et al. 2022, arXiv:2210.15191). None and 0 keep all."""
  value = 0.0 if value is None else value
  check("epsilon_cutoff", value, lambda p: 0 <= p < 1, "a number in [0, 1)")
  return LogitTransform(lambda: np.float32(value), Skipped(positive, _epsilon))


def eta(value: float | None) -> LogitTransform:
  """Keeps tokens of probability ≥ min(value, √value · e^−H), H the law's entropy (Hewitt et al. 2022,
  arXiv:2210.15191). None and 0 keep all."""
  value = 0.0 if value is None else value
  check("eta_cutoff", value, lambda p: 0 <= p < 1, "a number in [0, 1)")
  return LogitTransform(lambda: np.float32(value), Skipped(positive, _eta))


def top_n_sigma(value: float | None) -> LogitTransform:
  """Keeps logits within `value` standard deviations of the largest (Tang et al. 2024, arXiv:2411.07641). The
  deviation is that of the logits which are not masked. None and 0 keep all."""
  value = 0.0 if value is None else value
  check("top_n_sigma", value, lambda n: 0 <= n < 2.0**100, "a number ≥ 0 (0 is off)")
  return LogitTransform(lambda: np.float32(value), Skipped(positive, _top_n_sigma))


def xtc(probability: float, threshold: float = 0.1) -> LogitTransform:
  """Exclude top choices: at random steps, of the tokens of probability ≥ `threshold` only the least probable stays
  (p-e-w 2024, text-generation-webui 6335). `probability` is that of a step to be so; 0 is off. Random."""
  check("xtc_probability", probability, lambda p: 0 <= p <= 1, "a number in [0, 1]")
  check("xtc_threshold", threshold, lambda p: 0 < p <= 1, "a number in (0, 1]")
  state = (np.float32(probability), np.float32(threshold))
  return LogitTransform(lambda: state, Skipped(first_positive, _xtc, XTC_TAG))


def positive(state: Array) -> Array:
  return state > 0


def first_positive(state: tuple) -> Array:
  return state[0] > 0


def below_one(state: Array) -> Array:
  return state < 1


def _top_k(logits_V: Array, k: Array, context: Context) -> Array:
  short = k < logits_V.shape[0]
  return only_if(short, lambda x_V, k: keep_head(x_V, jnp.ones_like, k.astype(jnp.float32)), logits_V, k)


def _top_p(logits_V: Array, p: Array, context: Context) -> Array:
  return nucleus(logits_V, p)


def _min_p(logits_V: Array, p: Array, context: Context) -> Array:
  edge = jnp.log(p)  # p · p_max, on logits; the allowance is the rounding of the logarithm
  return jnp.where(logits_V - jnp.max(logits_V) >= edge * np.float32(1 + 2**-22), logits_V, -jnp.inf)


def _typical(logits_V: Array, p: Array, context: Context) -> Array:
  off_V, edge, border = typical_set(logits_V, p * REACHED)
  first_V = jnp.arange(logits_V.shape[0]) <= border
  return jnp.where((off_V < edge) | ((off_V == edge) & first_V), logits_V, -jnp.inf)


def _epsilon(logits_V: Array, p: Array, context: Context) -> Array:
  return keep_above(logits_V, log_law(logits_V)[0], jnp.log(p))


def _eta(logits_V: Array, p: Array, context: Context) -> Array:
  log_V, entropy = log_law(logits_V)
  return keep_above(logits_V, log_V, jnp.minimum(jnp.log(p), 0.5 * jnp.log(p) - entropy))


def _top_n_sigma(logits_V: Array, n: Array, context: Context) -> Array:
  there_V = logits_V > -jnp.inf
  below_V = jnp.where(there_V, jnp.max(logits_V) - logits_V, 0.0)  # one size whatever the logits' own
  count = jnp.maximum(jnp.sum(there_V.astype(jnp.float32)), 1.0)
  mean = jnp.sum(below_V) / count
  sigma = jnp.sqrt(jnp.sum(jnp.where(there_V, (below_V - mean) ** 2, 0.0)) / count)
  return jnp.where((below_V <= n * sigma * (1 + SLACK)) | (below_V <= 0), logits_V, -jnp.inf)


def _xtc(logits_V: Array, state: tuple, context: Context) -> Array:
  probability, threshold = state
  strong_V = log_law(logits_V)[0] >= jnp.log(threshold) - SLACK
  least = jnp.min(jnp.where(strong_V, logits_V, jnp.inf))
  ids_V = jnp.arange(logits_V.shape[0])
  spared = jnp.min(jnp.where(strong_V & (logits_V == least), ids_V, logits_V.shape[0]))
  acts = jax.random.uniform(context.key) < probability
  return jnp.where(acts & strong_V & (ids_V != spared), -jnp.inf, logits_V)


def nucleus(logits_V: Array, p: Array) -> Array:
  """The head of the order that has mass p."""
  peak = jnp.max(logits_V)
  mass = jnp.sum(jnp.exp(logits_V - peak))
  return keep_head(logits_V, lambda x: jnp.exp(x - peak), p * mass * REACHED)


def keep_above(logits_V: Array, log_V: Array, edge: Array) -> Array:
  """Tokens of log-probability ≥ edge, up to rounding, and the most probable in any case."""
  return jnp.where((log_V >= edge - SLACK) | (logits_V == jnp.max(logits_V)), logits_V, -jnp.inf)


def log_law(logits_V: Array) -> tuple[Array, Array]:
  """Log-probabilities and their entropy, in nats."""
  x_V = logits_V - jnp.max(logits_V)
  weight_V = jnp.exp(x_V)
  mass = jnp.sum(weight_V)
  mean = jnp.sum(jnp.where(weight_V > 0, weight_V * x_V, 0.0)) / mass
  return x_V - jnp.log(mass), jnp.log(mass) - mean
