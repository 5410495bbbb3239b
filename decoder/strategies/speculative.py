"""Several tokens a step: what comes next is guessed, and the model judges all guesses in one pass.

Reading eight tokens takes hardly longer than reading one, since either way every weight is read once. A step guesses
what follows a row's last token, reads that token and the guesses, and has the model's logits after each. At each
position in turn a token is drawn exactly as plain decoding draws it, with that position's key, until one is not the
guess: it is kept, and what was guessed after it is forgotten. So the text is plain decoding's, seeds included, up to
the rounding of logits between block sizes. For guesses that are made without chance no rule that keeps the law accepts
more often: p(guess) = Σ min(p, q) with q all on the guess (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023,
arXiv:2302.01318).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from decoder.sampling import Context, Drawn, LogitTransform, nothing
from decoder.strategies.autoregressive import Finish, State, draw_row, finish_after, init, sound, without_padding
from decoder.types import NONE, Array, Emission, Info, Model, Params, Strategy

BLOCKS = (1, 2, 4, 8)  # tokens read at once: a step compiles one forward pass for each
SIZES = tuple(block - 1 for block in BLOCKS[1:])  # guesses that fill a block, with the token before them


class Drafts(NamedTuple):
  """tokens_BK: guesses of what follows, in order; count_B: how many of them there are."""

  tokens_BK: Array
  count_B: Array


class Proposer(NamedTuple):
  """Where guesses come from.

  init: () -> memory of one row, a pytree of scalars or arrays. propose: (params, state, size) -> (state, Drafts), up to
  `size` a row, of a state whose context ends with the token drawn last. learn: (memory, drafted, accepted) -> memory,
  for one row: how many were guessed, how many of them kept.
  """

  init: Callable[[], Any]
  propose: Callable[[Params, State, int], tuple[State, Drafts]]
  learn: Callable[[Any, Array, Array], Any]


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

  def forward(params: Params, state: State) -> tuple[State, Array]:
    """Logits after the row's last token and after each guess: [B, size + 1, V]."""
    state, drafts = proposer.propose(params, state, size)
    state = _pending(state, drafts, size)
    features_BJD, cache = _read(model, params, state, size)
    logits_RV = model.head(params, features_BJD.reshape(-1, features_BJD.shape[-1])).astype(jnp.float32)
    return state.replace(cache=cache), logits_RV.reshape(*features_BJD.shape[:2], -1)

  def draw(state: State, raw_BJV: Array, allowed_BJV: Array | None = None) -> tuple[State, Emission]:
    drafted_B = jnp.sum(state.positions_BT[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    judged = jax.vmap(lambda *row: _judge(chain, inspect, vocab_size, *row))(
      raw_BJV, allowed_BJV, state.tokens_BT[:, 1:], drafted_B, state.settings.settings, state.context_BL,
      state.length_B, state.prompt_B, state.ends_BE, state.limit_B, state.finish_B, state.key_B,
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
  chain: LogitTransform, inspect: Callable, vocab_size: int | None, raw_JV: Array, allowed_JV: Array | None,
  guesses_K: Array, drafted: Array, settings: Any, context_L: Array, length: Array, prompt: Array, ends_E: Array,
  limit: Array, finish: Array, key: Array,
) -> _Judged:  # fmt: skip
  """Draws tokens at one position after the other, as long as they are the guesses."""

  def drawn(j: Array, settings: Any, context_L: Array) -> tuple[Drawn, Any]:
    context = Context(context_L, length + j, prompt, ends_E, limit, jax.random.fold_in(key, length + j))
    logits_V = without_padding(raw_JV[j], vocab_size)
    if allowed_JV is not None:
      logits_V = jnp.where(allowed_JV[j], logits_V, -jnp.inf)
    return draw_row(chain, raw_JV[j], logits_V, settings, context)

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
