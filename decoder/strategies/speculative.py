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
from flax import struct
from jax import lax

from decoder.sampling import Context, Drawn, LogitTransform, categorical, nothing
from decoder.sampling.selection import only_if
from decoder.strategies.autoregressive import Finish, State, draw_row, finish_after, init, sound, without_padding
from decoder.types import NONE, Array, Emission, Info, Key, Model, Params, Strategy

BLOCKS = (1, 2, 4, 8)  # tokens read at once: a step compiles one forward pass for each
_ACCEPT, _DRAFT = np.uint32(2**31 + 11), np.uint32(2**31 + 12)  # folded into a position's key; see `Context`
# What a step over 1, 2, 4 and 8 tokens costs, in steps over one: measured on CPU with weights of 8 bits.
COSTS = (1.0, 1.15, 1.3, 1.8)
SIZES = tuple(block - 1 for block in BLOCKS[1:])  # guesses that fill a block, with the token before them


class Drafts(NamedTuple):
  """tokens_BK: guesses of what follows, in order; count_B: how many of them there are. laws_BKV: the logits whose law
  each was drawn from, after the chain, with `draft_key`; None for guesses made without chance."""

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


_MEMORY = 0.8  # of acceptance: the share that stays after a step


def adapted(chance: Array, drafted: Array, accepted: Array) -> Array:
  """The chance that a guess is kept, as it went so far, after so many more guesses of which so many were kept."""
  seen = jnp.minimum(accepted + 1, drafted)  # those that were judged: the kept and the first that was not
  return chance + (1 - _MEMORY ** seen.astype(jnp.float32)) * (accepted / jnp.maximum(seen, 1) - chance)


def worth(chance: Array, size: int, costs: Sequence[float], each: float = 0.0) -> Array:
  """How many guesses, 0 … size, give most expected tokens, (1 − aⁿ⁺¹)/(1 − a), for their cost (Leviathan et al. 2023,
  arXiv:2211.17192, equation 1 and theorem 3.8), where each is kept with this chance a, whatever its shape.

  costs: of a step over 1, 2, 4 … tokens; each: of making a guess; in steps over one token.
  """
  sizes = np.array([block - 1 for block in BLOCKS if block <= size + 1])
  a = jnp.clip(chance, 0.05, 0.98)
  gain = (1 - a ** (sizes + 1)) / (1 - a) / (jnp.asarray(costs[: len(sizes)]) + each * sizes)
  return jnp.asarray(sizes)[jnp.argmax(gain)]


@struct.dataclass
class Drafting:
  """In place of a row's settings: those of its chain, the proposer's memory; steps, guesses and kept ones so far."""

  settings: Any
  memory: Any
  steps: Array
  drafted: Array
  accepted: Array


def drafting(chain: LogitTransform, proposer: Proposer) -> LogitTransform:
  """The chain, with Drafting as its state: what plain decoding draws a prompt's first token through."""

  def start() -> Drafting:
    return Drafting(chain.init(), proposer.init(), *(np.int32(0) for _ in range(3)))

  def update(logits_V: Array, state: Drafting, context: Context) -> Array:
    return chain.update(logits_V, state.settings, context)

  def observe(state: Drafting, token: Array, logits_V: Array) -> Drafting:
    return state.replace(settings=chain.observe(state.settings, token, logits_V))

  return LogitTransform(start, update, observe)


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
    features_BJD, cache = _read(model, params, state, size)
    logits_RV = model.head(params, features_BJD.reshape(-1, features_BJD.shape[-1])).astype(jnp.float32)
    return state.replace(cache=cache), Judgement(logits_RV.reshape(*features_BJD.shape[:2], -1), drafts.laws_BKV)

  def draw(state: State, judgement: Judgement) -> tuple[State, Emission]:
    drafted_B = jnp.sum(state.positions_BT[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    judged = jax.vmap(lambda *row: _judge(chain, inspect, vocab_size, *row))(
      judgement, state.tokens_BT[:, 1:], drafted_B, state.settings.settings, state.context_BL, state.length_B,
      state.prompt_B, state.ends_BE, state.limit_B, state.finish_B, state.key_B,
    )  # fmt: skip
    count_B, length_B = judged.j, state.length_B + judged.j
    accepted_B = jnp.minimum(jnp.maximum(count_B - 1, 0), drafted_B)
    so_far = state.settings
    settings = Drafting(
      judged.settings, jax.vmap(proposer.learn)(so_far.memory, drafted_B, accepted_B), so_far.steps + (count_B > 0),
      so_far.drafted + drafted_B, so_far.accepted + accepted_B,
    )  # fmt: skip
    last_B1 = jnp.take_along_axis(judged.context_L, jnp.maximum(length_B - 1, 0)[:, None], axis=1)
    state = state.replace(
      cache=state.cache.truncate(length_B - 1), tokens_BT=last_B1,
      positions_BT=jnp.where(judged.finish == Finish.RUNNING, length_B - 1, NONE)[:, None],
      settings=settings, context_BL=judged.context_L, length_B=length_B, finish_B=judged.finish,
    )  # fmt: skip
    return state, Emission(judged.tokens_J, count_B, Info(judged.finish, judged.details))

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
  """The forward pass over as many tokens as the row with most has pending: a step without guesses is a plain one."""

  def reading(block: int) -> Callable:
    def read(cache: Any) -> tuple[Array, Any]:
      features_BTD, cache = model.forward(params, state.tokens_BT[:, :block], state.positions_BT[:, :block], cache)
      return jnp.pad(features_BTD, ((0, 0), (0, size + 1 - block), (0, 0))), cache

    return read

  blocks = [block for block in BLOCKS if block <= size + 1]
  longest = jnp.max(jnp.sum(state.positions_BT >= 0, axis=1))
  return lax.switch(jnp.sum(longest > jnp.asarray(blocks[:-1])), [reading(block) for block in blocks], state.cache)


def _kept(token: Array, guess: Array) -> Array:
  """Whether what the model says after a guess may be believed."""
  return token == guess


def draft_key(key: Key) -> Key:
  """The key that a guess is drawn with, where `key` is that of its position: what is drawn if it is not kept must not
  depend on it."""
  return jax.random.fold_in(key, _DRAFT)


def _after_guess(law_V: Array, guess: Array, judged: Array, key: Key, kept_V: Array) -> Array:
  """A token by the law p of kept_V which, where the guess is judged, is as often as can be the guess, drawn from the
  law q of law_V."""
  p_V, q_V = _log_law(kept_V), _log_law(law_V)
  chance = jax.random.uniform(jax.random.fold_in(key, _ACCEPT))
  is_kept = judged & (jnp.log(chance) < p_V[guess] - q_V[guess])
  other = categorical(key, only_if(judged & ~is_kept, _more, kept_V, p_V, q_V))
  return jnp.where(is_kept, guess, other)


def _more(kept_V: Array, p_V: Array, q_V: Array) -> Array:
  """Logits of what p has more than q, both in logarithms; those of p where, in rounding, that is nothing."""
  more_V = jnp.maximum(jnp.exp(p_V) - jnp.exp(q_V), 0.0)
  return jnp.where(jnp.any(more_V > 0), jnp.log(more_V), kept_V)


def _log_law(logits_V: Array) -> Array:
  return logits_V - jax.nn.logsumexp(logits_V)


class _Judged(NamedTuple):
  """Of one row. j: tokens drawn in this step so far; going: whether the next position is judged too."""

  j: Array
  going: Array
  tokens_J: Array
  details: Any
  settings: Any
  context_L: Array
  finish: Array


def _judge(
  chain: LogitTransform, inspect: Callable, vocab_size: int | None, judgement: Judgement, guesses_K: Array,
  drafted: Array, settings: Any, context_L: Array, length: Array, prompt: Array, ends_E: Array, limit: Array,
  finish: Array, key: Array,
) -> _Judged:  # fmt: skip
  """Draws tokens at one position after the other, as long as they are the guesses."""
  raw_JV, laws_KV = judgement

  def drawn(j: Array, settings: Any, context_L: Array) -> tuple[Drawn, Any]:
    def choose(key: Key, kept_V: Array) -> Array:
      if laws_KV is None:
        return categorical(key, kept_V)
      at = jnp.minimum(j, guesses_K.shape[0] - 1)
      return _after_guess(laws_KV[at], guesses_K[at], j < drafted, key, kept_V)

    context = Context(context_L, length + j, prompt, ends_E, limit, jax.random.fold_in(key, length + j))
    return draw_row(chain, raw_JV[j], without_padding(raw_JV[j], vocab_size), settings, context, choose)

  def body(now: _Judged) -> _Judged:
    draw, after = drawn(now.j, now.settings, now.context_L)
    is_sound = sound(draw)
    finish = finish_after(draw.token, is_sound, length + now.j, ends_E, limit)
    guess = guesses_K[jnp.minimum(now.j, guesses_K.shape[0] - 1)]
    here = jnp.where(is_sound, length + now.j, context_L.shape[0])  # past the end: dropped
    return _Judged(
      now.j + is_sound,
      (finish == Finish.RUNNING) & (now.j < drafted) & _kept(draw.token, guess),
      now.tokens_J.at[now.j].set(draw.token),
      jax.tree.map(lambda all_, new: all_.at[now.j].set(new), now.details, inspect(draw)),
      jax.tree.map(lambda old, new: jnp.where(is_sound, new, old), now.settings, after),
      now.context_L.at[here].set(draw.token, mode="drop"),
      finish,
    )

  told = jax.eval_shape(lambda: inspect(drawn(jnp.int32(0), settings, context_L)[0]))
  room = raw_JV.shape[0]
  details = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), told)
  start = _Judged(jnp.int32(0), finish == 0, jnp.zeros((room,), jnp.int32), details, settings, context_L, finish)
  return lax.while_loop(lambda now: now.going, body, start)
