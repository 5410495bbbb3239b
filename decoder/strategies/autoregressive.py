"""One token a step: the plainest strategy, and the shape of all others.

A State holds the tokens that are not in the cache yet (`tokens_BT`): at first a prompt's last chunk, later the token
drawn last. `forward` reads them into the cache and judges what may follow, `draw` chooses it. So prefill and decode are
the same function at different T, and the head is paid for one token a row.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from decoder.cache import Cache
from decoder.sampling import Context, Drawn, LogitTransform, categorical, nothing
from decoder.types import NONE, Array, Emission, Info, Key, Model, Params, Strategy


class Finish(enum.IntEnum):
  """How a row stands."""

  RUNNING = 0
  STOP = 1  # an end id was drawn
  LENGTH = 2  # the row reached its limit
  ERROR = 3  # the model's logits were not finite, or every token was masked
  RELEASED = 4  # ended from outside: a stop string, a cancelled request


@struct.dataclass
class State:
  """Everything a decode loop threads; every leaf has a leading row axis.

  tokens_BT, positions_BT: pending tokens and where they go. context_BL: every token so far, pending ones included,
  valid before length_B, which is also the absolute position of the token to be drawn next. prompt_B: tokens of the
  prompt. limit_B: the length at which a row ends. ends_BE: ids that end it, NONE where there are fewer. key_B: one
  key a row, of its request. settings: the state of the sampling chain.
  """

  cache: Cache
  tokens_BT: Array
  positions_BT: Array
  context_BL: Array
  length_B: Array
  prompt_B: Array
  limit_B: Array
  ends_BE: Array
  finish_B: Array
  key_B: Array
  settings: Any


def autoregressive(
  model: Model,
  chain: LogitTransform,
  vocab_size: int | None = None,
  inspect: Callable[[Drawn], Any] = nothing,
) -> Strategy:
  """Draws one token a row and step, through `chain`.

  vocab_size: ids at or above it can never be drawn (embedding tables are often padded); None: all can. inspect: what
  to tell of each draw, a pure function for one row to a pytree of fixed shapes; it becomes `Emission.info.details`.
  The draw at position p of a row depends on its key, p and its own logits only: not on its slot, its neighbours, the
  chunks its prompt came in, or whether it is streamed.
  """

  # Traced once for all programs of this strategy; inlined, they are as if this were not there.
  draw_rows = jax.jit(jax.vmap(functools.partial(draw_row, chain)), inline=True)

  def forward(params: Params, state: State) -> tuple[State, Array]:
    features_BTD, cache = model.forward(params, state.tokens_BT, state.positions_BT, state.cache)
    return state.replace(cache=cache), last_logits(model, params, features_BTD, state.positions_BT)

  def draw(state: State, raw_BV: Array, allowed_BV: Array | None = None) -> tuple[State, Emission]:
    logits_BV = without_padding(raw_BV, vocab_size)
    if allowed_BV is not None:
      logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    at_B = jax.vmap(jax.random.fold_in)(state.key_B, state.length_B)
    context_B = Context(state.context_BL, state.length_B, state.prompt_B, state.ends_BE, state.limit_B, at_B)
    drawn_B, settings = draw_rows(raw_BV, logits_BV, state.settings, context_B)
    details = jax.tree.map(lambda x: x[:, None], jax.vmap(inspect)(drawn_B))
    return _emit(state.replace(settings=settings), drawn_B.token, sound(drawn_B), details)

  return Strategy(init, forward, draw)


def init(
  cache: Cache, context_BL: Array, length_B: Array, limit_B: Array, ends_BE: Array, key_B: Array, settings: Any
) -> State:
  """A State whose rows hold a prompt of `length_B` tokens in `context_BL`, nothing of it read yet.

  The pending block is empty; `pending` fills it. Rows of length 0 are finished from the start (padding of a batch).
  ValueError where shapes disagree: rows of all arguments must be equal.
  """
  rows = {cache.batch, *(x.shape[0] for x in (context_BL, length_B, limit_B, ends_BE, key_B))}
  if len(rows) > 1:
    raise ValueError(f"all fields of a State need the same number of rows, got {sorted(rows)}")
  one = (cache.batch, 1)
  finish_B = jnp.where(length_B == 0, Finish.RELEASED, jnp.where(length_B >= limit_B, Finish.LENGTH, Finish.RUNNING))
  return State(
    # Copies: a State is donated, and no buffer can be given away twice.
    cache.replace(extent_B=jnp.array(limit_B, copy=True)), jnp.zeros(one, jnp.int32), jnp.full(one, NONE, jnp.int32),
    context_BL, length_B, jnp.array(length_B, copy=True), limit_B, ends_BE, finish_B.astype(jnp.int8), key_B, settings,
  )  # fmt: skip


def pending(state: State, start_B: Array, size: int) -> State:
  """The state with tokens start … start + size − 1 of each row's context pending, as far as the row reaches; a
  negative start leaves padding in front, and a finished row has nothing pending."""
  positions_BT = start_B[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  there = (positions_BT >= 0) & (positions_BT < state.length_B[:, None]) & (state.finish_B == 0)[:, None]
  positions_BT = jnp.where(there, positions_BT, NONE)
  tokens_BT = jnp.take_along_axis(state.context_BL, jnp.maximum(positions_BT, 0), axis=1)
  return state.replace(tokens_BT=tokens_BT, positions_BT=positions_BT)


def last_logits(model: Model, params: Params, features_BTD: Array, positions_BT: Array) -> Array:
  """What may follow each row's last pending token; padding (NONE) comes after it and may not exceed it."""
  last_B = jnp.argmax(positions_BT, axis=1)
  features_BD = jnp.take_along_axis(features_BTD, last_B[:, None, None], axis=1)[:, 0]
  return model.head(params, features_BD).astype(jnp.float32)  # f32: probabilities of rare tokens


def release(state: State, rows_B: Array) -> State:
  """Ends rows (bool) from outside: they emit nothing more and leave no trace in the cache."""
  finish_B = jnp.where(rows_B & (state.finish_B == Finish.RUNNING), Finish.RELEASED, state.finish_B)
  positions_BT = jnp.where(rows_B[:, None], NONE, state.positions_BT)
  return state.replace(finish_B=finish_B.astype(jnp.int8), positions_BT=positions_BT)


def cut(state: State, slots: int) -> State:
  """The State in the first `slots` slots of its cache, to be moved and inserted elsewhere, with a context of one token
  more: the one that was drawn and is not in the cache yet."""
  return state.replace(cache=state.cache.trim(slots), context_BL=state.context_BL[:, : slots + 1])


def insert(state: State, rows_R: Array, other: State) -> State:
  """Row r of `other` replaces row rows_R[r] and goes on there as it would have gone on by itself; rows_R ≥ B are
  dropped. `other` may have room for fewer tokens, end ids and entries of its settings' lists. ValueError for more."""

  def put(x: Array, y: Array) -> Array:
    spare = [(0, room - size) for room, size in zip(x.shape, y.shape)][1:]
    if any(after < 0 for _, after in spare):
      raise ValueError(
        f"insert() wants rows of at most {x.shape[1:]} entries, got {y.shape[1:]}; make room for as many"
      )
    if any(after for _, after in spare):
      y = jnp.pad(y, [(0, 0), *spare], constant_values=NONE)
    return x.at[rows_R].set(y, mode="drop")

  mine, its = (one.replace(cache=None, context_BL=None) for one in (state, other))
  if other.context_BL.shape[1] > state.context_BL.shape[1]:
    raise ValueError(
      f"insert() wants rows of at most {state.context_BL.shape[1]} tokens, got {other.context_BL.shape[1]}"
    )
  context_BL = state.context_BL.at[rows_R, : other.context_BL.shape[1]].set(other.context_BL, mode="drop")
  return jax.tree.map(put, mine, its).replace(cache=state.cache.insert(rows_R, other.cache), context_BL=context_BL)


def vacate(state: State, rows_B: Array) -> State:
  """Releases rows (bool) and forgets what the cache holds of them, so that others need not look past it."""
  length_B = jnp.where(rows_B, 0, state.length_B)
  return release(state, rows_B).replace(cache=state.cache.truncate(length_B))


def without_padding(logits: Array, vocab_size: int | None) -> Array:
  """Logits [..., V], −inf at ids that no text has; None: all ids stand for something."""
  if vocab_size is None or vocab_size >= logits.shape[-1]:
    return logits
  ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  return jnp.where(ids < vocab_size, logits, -jnp.inf)


def sound(drawn: Drawn) -> Array:
  """Whether a draw, of a row or of each of several, means anything: the model's logits were finite, and masks and
  transforms left something to draw."""
  return jnp.isfinite(jnp.max(drawn.raw_V, axis=-1)) & jnp.isfinite(jnp.max(drawn.kept_V, axis=-1))


def finish_after(token: Array, is_sound: Array, length: Array, ends: Array, limit: Array) -> Array:
  """How a row, or each of several, stands after a token drawn at position `length`: int8, a `Finish`."""
  stopped = jnp.any(jnp.expand_dims(token, -1) == ends, axis=-1)
  finish = jnp.where(stopped, Finish.STOP, jnp.where(length + 1 >= limit, Finish.LENGTH, Finish.RUNNING))
  return jnp.where(is_sound, finish, Finish.ERROR).astype(jnp.int8)


def draw_row(
  chain: LogitTransform, raw_V: Array, logits_V: Array, settings: Any, context: Context,
  choose: Callable[[Key, Array], Array] = categorical,
) -> tuple[Drawn, Any]:  # fmt: skip
  """The draw, and the chain's state after it. choose: (key, logits_V) -> token, by the law of these logits."""
  kept_V = chain.update(logits_V, settings, context)
  token = choose(context.key, kept_V)
  return Drawn(raw_V, logits_V, kept_V, token, settings, context), chain.observe(settings, token, kept_V)


def _emit(state: State, token_B: Array, sound_B: Array, details: Any) -> tuple[State, Emission]:
  """Appends the drawn tokens to running rows and says what ended."""
  running_B = state.finish_B == Finish.RUNNING
  drawn_B = running_B & sound_B
  finish_B = finish_after(token_B, sound_B, state.length_B, state.ends_BE, state.limit_B)
  finish_B = jnp.where(running_B, finish_B, state.finish_B)
  rows = jnp.arange(token_B.shape[0])
  slot_B = jnp.where(drawn_B, state.length_B, state.context_BL.shape[1])  # past the end: dropped
  goes_on_B = finish_B == Finish.RUNNING
  state = state.replace(
    tokens_BT=token_B[:, None],
    positions_BT=jnp.where(goes_on_B, state.length_B, NONE)[:, None],
    context_BL=state.context_BL.at[rows, slot_B].set(token_B, mode="drop"),
    length_B=state.length_B + drawn_B,
    finish_B=finish_B,
  )
  return state, Emission(token_B[:, None], drawn_B.astype(jnp.int32), Info(finish_B, details))
