"""Guesses from the text itself: what followed, the last time that the last few tokens stood there (Saxena 2023, prompt
lookup decoding; Yang et al. 2023, arXiv:2304.04487). Summaries, corrections, code and answers that quote repeat much.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoder.strategies.speculative import COSTS, Drafts, Proposer, adapted, worth
from decoder.types import Array

LONGEST = 8  # tokens compared: more tell no more


def lookup(least: int = 2, costs: tuple[float, ...] = COSTS) -> Proposer:
  """Guesses what followed the latest of the longest matches of at least `least` tokens. How many are guessed is the
  row's own choice: the number whose expected tokens for its cost are most, (1 − aⁿ⁺¹)/(1 − a)/costs (Leviathan et al.,
  equation 1), by the chance `a` that one is kept, as it went so far and as the match's length promises."""

  def init() -> np.ndarray:
    return np.float32(0.6)

  def propose(params: Any, state: Any, size: int) -> tuple[Any, Drafts]:
    def row(context_L: Array, length: Array, chance: Array) -> Drafts:
      tokens_K, matched, there = followers(context_L, length, size)
      count = jnp.minimum(best_size(chance, matched, size, costs), there)
      return Drafts(tokens_K, jnp.where(matched >= least, count, 0))

    return state, jax.vmap(row)(state.context_BL, state.length_B, state.settings.memory)

  return Proposer(init, propose, adapted)


def followers(context_L: Array, length: Array, size: int) -> tuple[Array, Array, Array]:
  """What came after the latest place at which the most of the last tokens stood before: (tokens_K, how many matched, at
  most LONGEST, how many of tokens_K there are)."""
  places = jnp.arange(context_L.shape[0])
  padded = jnp.concatenate([jnp.full((LONGEST,), -1, context_L.dtype), context_L])
  # before_L[l]: how many tokens before place l are those before `length`.
  before_L = jnp.zeros_like(places)
  alike_L = (places > 0) & (places < length)
  for back in range(1, LONGEST + 1):
    mine = padded[jnp.maximum(length - back, -LONGEST) + LONGEST]
    alike_L &= (padded[LONGEST - back : padded.shape[0] - back] == mine) & (mine >= 0)
    before_L = before_L + alike_L
  matched = jnp.max(before_L)
  place = context_L.shape[0] - 1 - jnp.argmax(jnp.flip(before_L))  # the latest of the best
  tokens_K = context_L[jnp.minimum(place + jnp.arange(size), context_L.shape[0] - 1)]
  return tokens_K, matched, jnp.where(matched > 0, jnp.minimum(length - place, size), 0)


def best_size(chance: Array, matched: Array, size: int, costs: tuple[float, ...]) -> Array:
  """The number of guesses with the most expected tokens for their cost."""
  return worth(1 - (1 - chance) * 2 / (1 + jnp.minimum(matched, LONGEST) / 2), size, costs)
