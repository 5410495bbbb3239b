"""Against saying the same again: DRY and no-repeat-n-gram. Both ask how far the row's end agrees with what stood
before each earlier token; what would make the agreement longer is made less likely, or forbidden."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.sampling.masks import padded_ids
from decoder.sampling.penalties import Scope, begin, encoded
from decoder.sampling.transforms import Context, LogitTransform, Skipped, check
from decoder.sampling.truncation import first_positive, positive
from decoder.types import NONE, Array

_LARGEST = 88.7  # e to it is still a float32


def dry(
  multiplier: float, base: float = 1.75, allowed: int = 2, scope: Scope = "all", breakers: Sequence[int] = ()
) -> LogitTransform:
  """Subtracts multiplier · base^(m − allowed) from the logit of a token that would continue a repetition of m ≥ allowed
  tokens, m being the longest (p-e-w 2024, text-generation-webui 5677). A repetition does not reach over `breakers`,
  token ids. A multiplier of 0 is off."""
  check("dry_multiplier", multiplier, lambda x: 0 <= x < 2.0**100, "a number ≥ 0 (0 is off)")
  check("dry_base", base, lambda x: 1 <= x <= 1e6, "a number ≥ 1")
  check("dry_allowed_length", allowed, lambda x: x % 1 == 0 and 1 <= x < 2**20, "an integer ≥ 1")
  # Beyond this length the power is no longer a float32; a base of 1 does not ask for the length at all.
  longest = allowed + int(min(_LARGEST / np.log(base), 2**20)) if base > 1 else allowed
  numbers = (np.float32(multiplier), np.float32(base), np.int32(allowed), np.int32(longest))
  state = (*numbers, encoded("dry_scope", scope), padded_ids("dry_breakers", breakers))
  return LogitTransform(lambda: state, Skipped(first_positive, _dry))


def no_repeat_ngram(size: int | None) -> LogitTransform:
  """Forbids tokens that would complete an n-gram of this size for the second time, prompt included (Paulus et al.
  2017, arXiv:1705.04304, section 2.5). None and 0 are off."""
  size = 0 if size is None else size
  check("no_repeat_ngram_size", size, lambda n: n % 1 == 0 and 0 <= n < 2**20, "an integer ≥ 1, or None or 0 for off")
  return LogitTransform(lambda: np.int32(size), Skipped(positive, _no_repeat_ngram))


def _agreement(context: Context, start: Array, most: Array, breakers_N: Array) -> Array:
  """For each token from `start` on, how many before it equal the row's last ones, one for one, at most `most` and
  none a breaker; −1 for tokens outside."""
  tokens_L, length = context.tokens_L, context.length
  at_L = jnp.arange(tokens_L.shape[0])
  within_L = (at_L >= start) & (at_L < length)

  def going(carry: tuple) -> Array:
    number, agree_L, _ = carry
    return (number < most) & (number < length - start) & jnp.any(agree_L)

  def longer(carry: tuple) -> tuple:
    number, agree_L, agreed_L = carry
    last = tokens_L[length - 1 - number]
    before_L = at_L - 1 - number
    same_L = (jnp.take(tokens_L, before_L, mode="clip") == last) & (before_L >= start)
    agree_L &= same_L & ~jnp.any(breakers_N == last)
    return number + 1, agree_L, agreed_L + agree_L

  first = (jnp.zeros_like(length), within_L, jnp.where(within_L, 0, -1))
  return lax.while_loop(going, longer, first)[2]


def _dry(logits_V: Array, state: tuple, context: Context) -> Array:
  multiplier, base, allowed, longest, scope, breakers_N = state
  agreed_L = _agreement(context, begin(scope, context), longest, breakers_N)
  power_L = base ** jnp.maximum(agreed_L - allowed, 0).astype(jnp.float32)
  ids_L = jnp.where(agreed_L >= allowed, context.tokens_L, logits_V.shape[0])
  highest = np.finfo(np.float32).max  # so that the product of a large power stays a number
  left_L = jnp.take(logits_V, ids_L, mode="clip") - jnp.minimum(multiplier * power_L, highest)
  return logits_V.at[ids_L].min(left_L, mode="drop")


def _no_repeat_ngram(logits_V: Array, n: Array, context: Context) -> Array:
  agreed_L = _agreement(context, jnp.zeros_like(n), n - 1, jnp.full(1, NONE))
  ids_L = jnp.where(agreed_L >= n - 1, context.tokens_L, logits_V.shape[0])
  return logits_V.at[ids_L].set(-jnp.inf, mode="drop")
