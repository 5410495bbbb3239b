"""How guesses are judged: a token is drawn after one guess after the other, as long as it is what was guessed next.

Guesses may be a chain or a tree of them: all that differs is which guess a drawn token leads to. And they may be made
without chance, when tokens are drawn exactly as plain decoding draws them, or drawn from a law of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from decoder.sampling import Context, Drawn, LogitTransform, categorical
from decoder.sampling.selection import only_if
from decoder.strategies.autoregressive import Finish, State, draw_row, finish_after, sound, without_padding
from decoder.types import NONE, Array, Emission, Info, Key

_STRETCH = 256  # ids
_ACCEPT, _DRAFT = np.uint32(2**31 + 11), np.uint32(2**31 + 12)  # folded into a position's key; see `Context`


@struct.dataclass
class Drafting:
  """In place of a row's settings: those of its chain, the proposer's memory; steps, guesses and kept ones so far."""

  settings: Any
  memory: Any
  steps: Array
  drafted: Array
  accepted: Array


def drafting(chain: LogitTransform, init: Callable[[], Any]) -> LogitTransform:
  """The chain, with Drafting as its state: what plain decoding draws a prompt's first token through. init: gives the
  memory of a row."""

  def start() -> Drafting:
    return Drafting(chain.init(), init(), *(np.int32(0) for _ in range(3)))

  def update(logits_V: Array, state: Drafting, context: Context) -> Array:
    return chain.update(logits_V, state.settings, context)

  def observe(state: Drafting, token: Array, logits_V: Array) -> Drafting:
    return state.replace(settings=chain.observe(state.settings, token, logits_V))

  return LogitTransform(start, update, observe)


class Row(NamedTuple):
  """What a draw depends on besides logits, of a row or of each of several: fields of a State, the chain's settings."""

  settings: Any
  context_L: Array
  length: Array
  prompt: Array
  ends_E: Array
  limit: Array
  finish: Array
  key: Array


def rows_of(state: State) -> Row:
  return Row(
    state.settings.settings, state.context_BL, state.length_B, state.prompt_B, state.ends_BE, state.limit_B,
    state.finish_B, state.key_B,
  )  # fmt: skip


class Judged(NamedTuple):
  """Of one row. count: tokens drawn in this step so far; node: of the block of tokens read, the one after which is
  drawn next, NONE where that is over; path_J: the nodes so far, NONE after them. The rest as after the last draw."""

  count: Array
  node: Array
  path_J: Array
  tokens_J: Array
  details: Any
  settings: Any
  context_L: Array
  finish: Array


def judge(
  chain: LogitTransform,
  inspect: Callable[[Drawn], Any],
  vocab_size: int | None,
  raw_JV: Array,
  row: Row,
  follow: Callable[[Array, Array], Array],
  most: int,
  choose: Callable[[Array, Key, Array], Array] | None = None,
  allowed_JV: Array | None = None,
) -> Judged:
  """Draws up to `most` tokens of a row.

  raw_JV: the model's logits after each token of the block, node 0 being the row's last token. follow: (node, token) ->
  the node of the guess that this token is, after that node, NONE for none. choose: (node, key, logits_V) -> token; None
  draws as plain decoding does. allowed_JV: what may be drawn after each node.
  """
  end = row.context_L.shape[0]

  def drawn(node: Array, count: Array, settings: Any, context_L: Array) -> tuple[Drawn, Any]:
    def chosen(key: Key, kept_V: Array) -> Array:
      return categorical(key, kept_V) if choose is None else choose(node, key, kept_V)

    length = row.length + count
    context = Context(context_L, length, row.prompt, row.ends_E, row.limit, jax.random.fold_in(row.key, length))
    logits_V = without_padding(raw_JV[node], vocab_size)
    if allowed_JV is not None:
      logits_V = jnp.where(allowed_JV[node], logits_V, -jnp.inf)
    return draw_row(chain, raw_JV[node], logits_V, settings, context, chosen)

  def body(now: Judged) -> Judged:
    draw, after = drawn(now.node, now.count, now.settings, now.context_L)
    is_sound = sound(draw)
    finish = finish_after(draw.token, is_sound, row.length + now.count, row.ends_E, row.limit)
    following = jnp.where(now.count + 1 < most, follow(now.node, draw.token), NONE)
    return Judged(
      now.count + is_sound,
      jnp.where(finish == Finish.RUNNING, following, NONE),
      now.path_J.at[now.count].set(now.node),
      now.tokens_J.at[now.count].set(draw.token),
      jax.tree.map(lambda all_, new: all_.at[now.count].set(new), now.details, inspect(draw)),
      jax.tree.map(lambda old, new: jnp.where(is_sound, new, old), now.settings, after),
      now.context_L.at[jnp.where(is_sound, row.length + now.count, end)].set(draw.token, mode="drop"),
      finish,
    )

  told = jax.eval_shape(lambda: inspect(drawn(jnp.int32(0), jnp.int32(0), row.settings, row.context_L)[0]))
  details = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), told)
  start = Judged(
    jnp.int32(0), jnp.where(row.finish == Finish.RUNNING, 0, NONE), jnp.full((most,), NONE, jnp.int32),
    jnp.zeros((most,), jnp.int32), details, row.settings, row.context_L, row.finish,
  )  # fmt: skip
  return lax.while_loop(lambda now: now.node >= 0, body, start)


def advanced(
  state: State, judged_B: Judged, cache: Any, drafted_B: Array, learn: Callable[[Any, Array, Array], Any]
) -> tuple[State, Emission]:
  """The state after what was judged, its last token pending, and what it emits. cache: with the kept tokens alone.
  drafted_B: how many were guessed; learn: as in Proposer."""
  length_B = state.length_B + judged_B.count
  accepted_B = jnp.minimum(jnp.maximum(judged_B.count - 1, 0), drafted_B)
  so_far = state.settings
  settings = Drafting(
    judged_B.settings, jax.vmap(learn)(so_far.memory, drafted_B, accepted_B), so_far.steps + (judged_B.count > 0),
    so_far.drafted + drafted_B, so_far.accepted + accepted_B,
  )  # fmt: skip
  last_B1 = jnp.take_along_axis(judged_B.context_L, jnp.maximum(length_B - 1, 0)[:, None], axis=1)
  state = state.replace(
    cache=cache, tokens_BT=last_B1,
    positions_BT=jnp.where(judged_B.finish == Finish.RUNNING, length_B - 1, NONE)[:, None],
    settings=settings, context_BL=judged_B.context_L, length_B=length_B, finish_B=judged_B.finish,
  )  # fmt: skip
  return state, Emission(judged_B.tokens_J, judged_B.count, Info(judged_B.finish, judged_B.details))


def draft(key: Key, logits_V: Array) -> tuple[Array, Array]:
  """A guess (int32) by the law of these logits, with the key of its position, and that law as log-probs. By inversion,
  since a guess may differ where rounding does: first which stretch of ids, then which of them, so no running sum is
  longer than a stretch."""
  weight_SW, upto_S, log_total = _weighed(logits_V)
  reached = jax.random.uniform(draft_key(key)) * upto_S[-1]
  stretch = jnp.minimum(jnp.sum(upto_S <= reached), jnp.argmax(upto_S))  # the last that adds anything
  weight_W = weight_SW[stretch]
  before = upto_S[stretch] - jnp.sum(weight_W)
  within = jnp.minimum(jnp.sum(jnp.cumsum(weight_W) + before <= reached), _STRETCH - 1)
  # Rounding at a border may reach what has no chance: the most probable of the stretch instead.
  within = jnp.where(weight_W[within] > 0, within, jnp.argmax(weight_W))
  return (stretch * _STRETCH + within).astype(jnp.int32), logits_V - log_total


def draft_key(key: Key) -> Key:
  """The key that a guess is drawn with, where `key` is that of its position: what is drawn if it is not kept must not
  depend on it."""
  return jax.random.fold_in(key, _DRAFT)


def after_guess(law_V: Array, guess: Array, judged: Array, key: Key, kept_V: Array) -> Array:
  """A token by the law p of kept_V which, where the guess is judged, is as often as can be the guess, drawn from the
  law q of law_V, log-probs: it is kept with chance min(1, p/q), else replaced by a draw from what p has more than q."""
  weight_SW, upto_S, log_total = _weighed(kept_V)
  chance = jax.random.uniform(jax.random.fold_in(key, _ACCEPT))
  is_kept = judged & (jnp.log(chance) < kept_V[guess] - log_total - law_V[guess])

  def drawn(
    _: Array, judged: Array, words: Array, kept_V: Array, weight_SW: Array, total: Array, law_V: Array
  ) -> Array:
    rest_V = only_if(judged, _more, kept_V, weight_SW.ravel()[: law_V.shape[0]] / total, law_V)
    return categorical(jax.random.wrap_key_data(words), rest_V)

  return only_if(~is_kept, drawn, guess, judged, jax.random.key_data(key), kept_V, weight_SW, upto_S[-1], law_V)


def _weighed(logits_V: Array) -> tuple[Array, Array, Array]:
  """What some logits weigh, relative to the largest, in stretches of ids; the sums of all stretches up to each; and the
  logarithm of what they weigh in all. XLA's CPU backend takes eight times as long to sum a vocabulary at once."""
  most = jnp.max(logits_V)
  weight_V = jnp.exp(logits_V - most)
  weight_SW = jnp.pad(weight_V, (0, -weight_V.shape[0] % _STRETCH)).reshape(-1, _STRETCH)
  upto_S = jnp.cumsum(jnp.sum(weight_SW, axis=1))
  return weight_SW, upto_S, most + jnp.log(upto_S[-1])


def _more(kept_V: Array, p_V: Array, log_q_V: Array) -> Array:
  """Logits of what p has more than q; kept_V, those of p, where in rounding that is nothing."""
  more_V = jnp.maximum(p_V - jnp.exp(log_q_V), 0.0)
  return jnp.where(jnp.any(more_V > 0), jnp.log(more_V), kept_V)
