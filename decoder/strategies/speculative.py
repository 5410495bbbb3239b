"""Several tokens a step: what comes next is guessed, and the model judges all guesses in one pass.

Reading eight tokens takes hardly longer than reading one, since either way every weight is read once. A step guesses
what follows a row's last token, reads that token and the guesses, and has the model's logits after each. At each
position in turn a token is drawn by the law of plain decoding, until one is not the guess: it is kept, and what was
guessed after it is forgotten.

Guesses made without chance: the token is drawn exactly as plain decoding draws it, with that position's key. So the
text is plain decoding's, seeds included, up to the rounding of logits between block sizes, and no rule that keeps the
law accepts more often: p(guess) = Σ min(p, q) with q all on the guess. Guesses drawn from a law q: kept with chance
min(1, p/q), else the token is drawn from what p has more than q (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1;
Chen et al. 2023, arXiv:2302.01318). Then the law is plain decoding's, not the text; p and q are laws after the chain.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.sampling import Drawn, LogitTransform, nothing
from decoder.strategies.autoregressive import State, init
from decoder.strategies.judging import Judged, Row, advanced, after_guess, judge, rows_of
from decoder.types import NONE, Array, Emission, Key, Model, Params, Strategy

BLOCKS = (1, 2, 4, 8)  # tokens read at once: a step compiles one forward pass for each
# What a step over 1, 2, 4 and 8 tokens costs, in steps over one: measured on CPU with float32 weights.
COSTS = (1.0, 1.08, 1.14, 1.31)
SIZES = tuple(block - 1 for block in BLOCKS[1:])  # guesses that fill a block, with the token before them


class Drafts(NamedTuple):
  """tokens_BK: guesses of what follows, in order; count_B: how many of them there are. laws_BKV: the law, in
  log-probs, that each was drawn from, after the chain, with `draft_key`; None for guesses made without chance."""

  tokens_BK: Array
  count_B: Array
  laws_BKV: Array | None = None


class Judgement(NamedTuple):
  """What a step's guesses are judged by. raw_BJV: the model's logits after the row's last token, and after each guess.
  laws_BKV: as in Drafts."""

  raw_BJV: Array
  laws_BKV: Array | None


class Proposer(NamedTuple):
  """Where guesses come from.

  init: () -> memory of one row, a pytree of scalars or arrays. propose: (params, state, size) -> (state, Drafts), up to
  `size` a row, of a state whose context ends with the token drawn last. learn: (memory, drafted, accepted) -> memory,
  for one row: how many were guessed, how many of them kept.
  """

  init: Callable[[], Any]
  propose: Callable[[Params, State, int], tuple[State, Drafts]]
  learn: Callable[[Any, Array, Array], Any]


CHANCE = 0.7  # that a guess is kept, before any was judged
_MEMORY = 0.8  # of the chance: the share that stays after a guess


def adapted(chance: Array, drafted: Array, accepted: Array, hope: float = 0.0) -> Array:
  """The chance that a guess is kept, as it went so far, after so many more guesses of which so many were kept. hope:
  the share by which it returns to what it was at first where none was made, so that a text which was hard to guess is
  tried again."""
  seen = jnp.minimum(accepted + 1, drafted)  # those that were judged: the kept and the first that was not
  learnt = chance + (1 - _MEMORY ** seen.astype(jnp.float32)) * (accepted / jnp.maximum(seen, 1) - chance)
  return jnp.where(drafted > 0, learnt, chance + hope * (CHANCE - chance))


def worth(chance: Array, size: int, costs: Sequence[float], each: float = 0.0) -> Array:
  """How many guesses, 0 … size, give most expected tokens, (1 − aⁿ⁺¹)/(1 − a), for their cost (Leviathan et al. 2023,
  arXiv:2211.17192, equation 1 and theorem 3.8), where each is kept with this chance a, whatever its shape.

  costs: of a step over 1, 2, 4 … tokens; each: of making a guess; in steps over one token.
  """
  sizes = np.array([block - 1 for block in BLOCKS if block <= size + 1])
  a = jnp.clip(chance, 0.05, 0.98)
  gain = (1 - a ** (sizes + 1)) / (1 - a) / (jnp.asarray(costs[: len(sizes)]) + each * sizes)
  return jnp.asarray(sizes)[jnp.argmax(gain)]


def speculative(
  model: Model,
  chain: LogitTransform,
  proposer: Proposer,
  size: int,
  vocab_size: int | None = None,
  inspect: Callable[[Drawn], Any] = nothing,
) -> Strategy:
  """Draws 1 … size + 1 tokens a row and step, by the law of `autoregressive` with the same arguments.

  It goes on from a State that has read its prompt and drawn a token, with `Drafting` as its settings. size: most
  guesses, one of SIZES. ValueError for another.
  """
  if size not in SIZES:
    raise ValueError(f"size must be one of {', '.join(map(str, SIZES))}, got {size!r}")

  def forward(params: Params, state: State) -> tuple[State, Judgement]:
    """Logits after the row's last token and after each guess, with the laws of the guesses."""
    state, drafts = proposer.propose(params, state, size)
    state = _pending(state, drafts, size)
    raw_BJV, cache = _read(model, params, state, size)
    return state.replace(cache=cache), Judgement(raw_BJV, drafts.laws_BKV)

  def draw(state: State, judgement: Judgement, allowed_BJV: Array | None = None) -> tuple[State, Emission]:
    drafted_B = jnp.sum(state.positions_BT[:, 1:] >= 0, axis=1, dtype=jnp.int32)

    def judged(judgement: Judgement, allowed_JV: Array | None, guesses_K: Array, drafted: Array, row: Row) -> Judged:
      raw_JV, laws_KV = judgement

      def follow(node: Array, token: Array) -> Array:
        guess = guesses_K[jnp.minimum(node, size - 1)]
        return jnp.where((node < drafted) & _kept(token, guess), node + 1, NONE)

      def choose(node: Array, key: Key, kept_V: Array) -> Array:
        at = jnp.minimum(node, size - 1)
        return after_guess(laws_KV[at], guesses_K[at], node < drafted, key, kept_V)

      return judge(
        chain, inspect, vocab_size, raw_JV, row, follow, size + 1, None if laws_KV is None else choose, allowed_JV
      )

    judged_B = jax.vmap(judged)(judgement, allowed_BJV, state.tokens_BT[:, 1:], drafted_B, rows_of(state))
    cache = state.cache.truncate(state.length_B + judged_B.count - 1)
    return advanced(state, judged_B, cache, drafted_B, proposer.learn)

  return Strategy(init, forward, draw)


def _pending(state: State, drafts: Drafts, size: int) -> State:
  """The state with its last token and the guesses pending: no more of them than remain to the limit but one, so that
  all fit, and the token after them."""
  count_B = jnp.clip(drafts.count_B, 0, jnp.maximum(state.limit_B - state.length_B - 1, 0))
  offset_J = jnp.arange(size + 1, dtype=jnp.int32)
  there_BJ = (state.positions_BT >= 0) & (offset_J[None] <= count_B[:, None])
  return state.replace(
    tokens_BT=jnp.concatenate([state.tokens_BT, drafts.tokens_BK], axis=1),
    positions_BT=jnp.where(there_BJ, state.positions_BT + offset_J[None], NONE),
  )


def _read(model: Model, params: Params, state: State, size: int) -> tuple[Array, Any]:
  """Logits after as many tokens as the row with most has pending: a step without guesses is a plain one.

  One of several loops that run at most once, where a `switch` would do: it would copy the cache.
  """
  blocks = [block for block in BLOCKS if block <= size + 1]
  longest = jnp.max(jnp.sum(state.positions_BT >= 0, axis=1))
  chosen = jnp.sum(longest > jnp.asarray(blocks[:-1]))
  pending = (state.tokens_BT, state.positions_BT)  # in the carry: what does not change in a loop XLA does before it

  def judged(tokens_BT: Array, positions_BT: Array, cache: Any) -> tuple[Array, Any]:
    features_BTD, cache = model.forward(params, tokens_BT, positions_BT, cache)
    raw_RV = model.head(params, features_BTD.reshape(-1, features_BTD.shape[-1])).astype(jnp.float32)
    return raw_RV.reshape(*tokens_BT.shape, -1), cache

  one = jax.eval_shape(judged, *(x[:, :1] for x in pending), state.cache)[0]
  raw_BJV = jnp.zeros((one.shape[0], size + 1, one.shape[2]), one.dtype)
  carry = (jnp.bool_(True), raw_BJV, pending, state.cache)
  for number, block in enumerate(blocks):

    def read(carry: tuple, block: int = block) -> tuple:
      _, raw_BJV, pending, cache = carry
      raw_BTV, cache = judged(*(x[:, :block] for x in pending), cache)
      return jnp.bool_(False), raw_BJV.at[:, :block].set(raw_BTV), pending, cache

    carry = lax.while_loop(lambda carry, number=number: carry[0] & (chosen == number), read, carry)
  return carry[1], carry[3]


def _kept(token: Array, guess: Array) -> Array:
  """Whether what the model says after a guess may be believed."""
  return token == guess
