"""Several tokens a step: what comes next is guessed, and the model judges all guesses in one pass.

Reading eight tokens takes hardly longer than reading one, since either way every weight is read once. A step's pending
block is the token drawn last and the drafts after it; the model's logits at each say what may follow. At each position
in turn a token is drawn exactly as plain decoding draws it, with that position's key, until one is not the draft: it
is kept, what was guessed after it is forgotten. So the text is plain decoding's, seeds included, up to the rounding of
logits between block sizes. For drafts that are guessed without chance this accepts as often as any rule that keeps the
law can: with probability p(draft) = Σ min(p, q) (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023,
arXiv:2302.01318, with q all on the draft).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from decoder.sampling import Context, Drawn, LogitTransform, nothing
from decoder.strategies.autoregressive import Finish, State, draw_row, init
from decoder.types import NONE, Array, Emission, Info, Model, Params, Strategy

BLOCKS = (1, 2, 4, 8)  # tokens read at once: a step compiles one forward pass for each


class Drafts(NamedTuple):
  """tokens_BK: guesses of what follows, in order; count_B: how many of them there are. memory: the proposer's own."""

  tokens_BK: Array
  count_B: Array
  memory: Any


class Proposer(NamedTuple):
  """Where guesses come from.

  init: (state) -> memory, a pytree with rows. propose: (params, state, memory, size) -> Drafts, up to `size` a row;
  the state's context ends with the token drawn last. learn: (memory, drafted_B, accepted_B) -> memory, told after each
  judgement how many were guessed and how many of them kept.
  """

  init: Callable
  propose: Callable
  learn: Callable


@struct.dataclass
class Speculation(State):
  """A State whose pending block holds drafts, at positions from length_B on. memory: the proposer's. drafted_B,
  accepted_B: so far."""

  memory: Any = None
  drafted_B: Array | None = None
  accepted_B: Array | None = None


def speculation(state: State, proposer: Proposer, size: int) -> Speculation:
  """A State that goes on with up to `size` drafts a step; none are pending yet."""
  rows = state.length_B.shape[0]
  wide = (rows, 1 + size)
  fields = {name: getattr(state, name) for name in State.__dataclass_fields__}
  fields |= {"tokens_BT": jnp.zeros(wide, jnp.int32), "positions_BT": jnp.full(wide, NONE, jnp.int32)}
  zeros_B = jnp.zeros((rows,), jnp.int32)
  return Speculation(**fields, memory=proposer.init(state), drafted_B=zeros_B, accepted_B=jnp.zeros_like(zeros_B))


def speculative(
  model: Model,
  chain: LogitTransform,
  proposer: Proposer,
  size: int,
  vocab_size: int | None = None,
  inspect: Callable[[Drawn], Any] = nothing,
) -> Strategy:
  """Draws 1 … size + 1 tokens a row and step, by the law of `autoregressive` with the same arguments. size: most
  drafts, one less than a block of BLOCKS. ValueError for another."""
  if size + 1 not in BLOCKS[1:]:
    raise ValueError(f"size must be one of {', '.join(str(block - 1) for block in BLOCKS[1:])}, got {size!r}")

  def forward(params: Params, state: Speculation) -> tuple[Speculation, Array]:
    """Logits after the last token that is known and after each draft: [B, size + 1, V]."""
    features_BTD, cache = _read(model, params, state, size)
    last_B = jnp.argmax(jnp.where(state.positions_BT < state.length_B[:, None], state.positions_BT, NONE), axis=1)
    index_BJ = jnp.minimum(last_B[:, None] + jnp.arange(size + 1)[None], features_BTD.shape[1] - 1)
    features_BJD = jnp.take_along_axis(features_BTD, index_BJ[:, :, None], axis=1)
    logits_RV = model.head(params, features_BJD.reshape(-1, features_BJD.shape[-1])).astype(jnp.float32)
    return state.replace(cache=cache), logits_RV.reshape(*index_BJ.shape, -1)

  def draw(state: Speculation, raw_BJV: Array, params: Params = None) -> tuple[Speculation, Emission]:
    drafts_BK, drafted_B = _drafts(state, size)
    judged = jax.vmap(lambda *row: _judge(chain, inspect, vocab_size, *row))(
      raw_BJV, drafts_BK, drafted_B, state.settings, state.context_BL, state.length_B, state.prompt_B, state.ends_BE,
      state.limit_B, state.finish_B, state.key_B,
    )  # fmt: skip
    length_B = state.length_B + judged.count
    accepted_B = jnp.minimum(jnp.maximum(judged.count - 1, 0), drafted_B)
    state = state.replace(
      cache=state.cache.truncate(length_B - 1), settings=judged.settings, context_BL=judged.context_L,
      length_B=length_B, finish_B=judged.finish, memory=proposer.learn(state.memory, drafted_B, accepted_B),
      drafted_B=state.drafted_B + drafted_B, accepted_B=state.accepted_B + accepted_B,
    )  # fmt: skip
    emission = Emission(judged.tokens_J, judged.count, Info(judged.finish, judged.details))
    return _pending(proposer, params, state, size), emission

  return Strategy(init, forward, draw)


def _read(model: Model, params: Params, state: Speculation, size: int) -> tuple[Array, Any]:
  """The forward pass over a prompt's chunk, or over as many of the pending tokens as there are."""
  if state.tokens_BT.shape[1] != size + 1:
    return model.forward(params, state.tokens_BT, state.positions_BT, state.cache)

  def reading(block: int) -> Callable:
    def read(cache: Any) -> tuple[Array, Any]:
      features_BTD, cache = model.forward(params, state.tokens_BT[:, :block], state.positions_BT[:, :block], cache)
      return jnp.pad(features_BTD, ((0, 0), (0, size + 1 - block), (0, 0))), cache

    return read

  blocks = [block for block in BLOCKS if block <= size + 1]
  longest = jnp.max(jnp.where(state.positions_BT >= 0, jnp.arange(1, size + 2)[None], 0))
  return lax.switch(jnp.sum(longest > jnp.asarray(blocks[:-1])), [reading(block) for block in blocks], state.cache)


def _drafts(state: Speculation, size: int) -> tuple[Array, Array]:
  """The guesses that are pending; none while a prompt is."""
  if state.tokens_BT.shape[1] != size + 1:
    rows = state.length_B.shape[0]
    return jnp.zeros((rows, size), jnp.int32), jnp.zeros((rows,), jnp.int32)
  return state.tokens_BT[:, 1:], jnp.sum(state.positions_BT[:, 1:] >= state.length_B[:, None], axis=1, dtype=jnp.int32)


def _pending(proposer: Proposer, params: Params, state: Speculation, size: int) -> Speculation:
  """The state with the token drawn last and new guesses pending. A row's last token is never guessed: no more than
  remain to its limit but one, so that all fit and the one after them too."""
  drafts = proposer.propose(params, state, state.memory, size)
  count_B = jnp.clip(drafts.count_B, 0, jnp.maximum(state.limit_B - state.length_B - 1, 0))
  running_B = state.finish_B == Finish.RUNNING
  offset_T = jnp.arange(size + 1, dtype=jnp.int32)
  there_BT = running_B[:, None] & (offset_T[None] <= count_B[:, None])
  last_B1 = jnp.take_along_axis(state.context_BL, jnp.maximum(state.length_B - 1, 0)[:, None], axis=1)
  return state.replace(
    tokens_BT=jnp.concatenate([last_B1, drafts.tokens_BK], axis=1),
    positions_BT=jnp.where(there_BT, (state.length_B - 1)[:, None] + offset_T[None], NONE),
    memory=drafts.memory,
  )


def _kept(token: Array, draft: Array) -> Array:
  """Whether what comes after a guess may be judged by what was read after it."""
  return token == draft


class _Judged(NamedTuple):
  """Of one row. j: tokens drawn so far in this step; going: whether the next position is judged too."""

  j: Array
  going: Array
  tokens_J: Array
  details: Any
  settings: Any
  context_L: Array
  finish: Array

  @property
  def count(self) -> Array:
    return self.j


def _judge(
  chain: LogitTransform, inspect: Callable, vocab_size: int | None, raw_JV: Array, drafts_K: Array, drafted: Array,
  settings: Any, context_L: Array, length: Array, prompt: Array, ends_E: Array, limit: Array, finish: Array, key: Array,
) -> _Judged:  # fmt: skip
  """Draws tokens at one position after the other, as long as they are the drafts."""

  def drawn(j: Array, settings: Any, context_L: Array) -> tuple[Drawn, Any]:
    raw_V = raw_JV[j]
    offered_V = raw_V
    if vocab_size is not None and vocab_size < raw_V.shape[0]:
      offered_V = jnp.where(jnp.arange(raw_V.shape[0]) < vocab_size, raw_V, -jnp.inf)
    at = jax.random.fold_in(key, length + j)
    return draw_row(chain, raw_V, offered_V, settings, Context(context_L, length + j, prompt, ends_E, limit, at))

  def body(now: _Judged) -> _Judged:
    draw, after = drawn(now.j, now.settings, now.context_L)
    sound = jnp.isfinite(jnp.max(draw.raw_V)) & jnp.isfinite(jnp.max(draw.kept_V))
    stopped = jnp.any(draw.token == ends_E)
    full = length + now.j + 1 >= limit
    finish = jnp.where(stopped, Finish.STOP, jnp.where(full, Finish.LENGTH, Finish.RUNNING))
    finish = jnp.where(sound, finish, Finish.ERROR).astype(jnp.int8)
    guess = drafts_K[jnp.minimum(now.j, drafts_K.shape[0] - 1)]
    here = jnp.where(sound, length + now.j, context_L.shape[0])  # past the end: dropped
    return _Judged(
      now.j + sound,
      (finish == Finish.RUNNING) & (now.j < drafted) & _kept(draw.token, guess),
      now.tokens_J.at[now.j].set(draw.token),
      jax.tree.map(lambda all_, new: all_.at[now.j].set(new), now.details, inspect(draw)),
      jax.tree.map(lambda old, new: jnp.where(sound, new, old), now.settings, after),
      now.context_L.at[here].set(draw.token, mode="drop"),
      finish,
    )

  told = jax.eval_shape(lambda: inspect(drawn(jnp.int32(0), settings, context_L)[0]))
  room = raw_JV.shape[0]
  details = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), told)
  settings = jax.tree.map(jnp.asarray, settings)
  start = _Judged(jnp.int32(0), finish == 0, jnp.zeros((room,), jnp.int32), details, settings, context_L, finish)
  return lax.while_loop(lambda now: now.going, body, start)
