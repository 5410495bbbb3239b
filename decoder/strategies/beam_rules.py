"""What a beam search is judged by: scores of hypotheses of different lengths, and when no better one can come.

All for one group of beams of one example, as data: another penalty or another rule of stopping compiles nothing.
"""

import enum

import jax.numpy as jnp
from flax import struct

from decoder.types import Array


class Early(enum.IntEnum):
  """When a group of beams has found enough.

  FULL: as many hypotheses as it has beams, times the patience (Kasai et al. 2022, arXiv:2204.05424). HEURISTIC: the
  worst of the best is no worse than the best live text would be if it ended now, which is not a bound for a penalty
  above 0. EXACT: it is no worse than anything that a live text can still become.
  """

  FULL = 0
  HEURISTIC = 1
  EXACT = 2


@struct.dataclass
class Rules:
  """One a row; scalars here, [B] in a State.

  alpha: of the length penalty. gnmt: whether a text of n tokens is divided by ((5 + n) / 6)^alpha (Wu et al. 2016,
  arXiv:1609.08144, equation 14) instead of n^alpha. early: an `Early`. patience: factor, of FULL. shortest: fewest new
  tokens of a hypothesis, its end included. sampled: whether candidates are drawn rather than the best. diversity: what
  a token loses for each beam of the groups before that took it at this step. forced_F: the first new tokens, NONE where
  free. root: node of the forest where continuations start, NONE for all.
  """

  alpha: Array
  gnmt: Array
  early: Array
  patience: Array
  shortest: Array
  sampled: Array
  diversity: Array
  forced_F: Array
  root: Array


def penalised(rules: Rules, total: Array, length: Array) -> Array:
  """The score of a sum of log-probs over `length` new tokens."""
  length = jnp.asarray(length, jnp.float32)
  base = jnp.where(rules.gnmt, (5.0 + length) / 6.0, length)
  return total / base**rules.alpha


def attainable(rules: Rules, best: Array, now: Array, most: Array) -> Array:
  """The best score that a live text of `now` tokens and log-prob `best` is held able to reach with up to `most` tokens.

  It loses nothing more where all that follows is certain, and the penalty is monotone in the length, so the exact bound
  is at the shortest or the longest text that it can become.
  """
  shortest = jnp.minimum(jnp.maximum(now + 1, rules.shortest), most)
  exact = jnp.maximum(penalised(rules, best, shortest), penalised(rules, best, most))
  return jnp.where(rules.early == Early.EXACT, exact, penalised(rules, best, now))


def enough(rules: Rules, count: Array, size: int, worst: Array, bound: Array) -> Array:
  """Whether a group of `size` beams may stop. count: hypotheses found. worst: score of the last of the best `size`,
  −inf where there are fewer. bound: `attainable`."""
  return jnp.where(rules.early == Early.FULL, count >= rules.patience * size, worst >= bound)
