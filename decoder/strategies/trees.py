"""Several guesses for each of the next tokens: a tree of them, read in one pass, of which one path is kept.

A companion guesses a chain of most probable tokens, and beside each of them the next probable ones, where the text may
leave the chain (as in SpecInfer, Miao et al. 2023, arXiv:2305.09781, and EAGLE). All are read at once, each seeing the
text and what it follows. No guess is made by chance, so each token is drawn exactly as plain decoding draws it, and the
path goes on as long as a guess is what was drawn: the text is plain decoding's, seeds included, up to the rounding of
logits between block sizes, and a guess is kept with chance Σ p over all guesses beside it.

The companion reads what was kept in the step after, with the features that the model found.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoder.sampling import Context, Drawn, LogitTransform, nothing
from decoder.strategies.accompanied import Both, Companion
from decoder.strategies.autoregressive import Finish, State, init, without_padding
from decoder.strategies.judging import Judged, Row, advanced, judge, rows_of
from decoder.types import NONE, Array, Emission, Model, Strategy


class Tree(NamedTuple):
  """Node 0 is a row's last token. parents: of each node, which come before it, NONE for node 0; depths: tokens after
  node 0."""

  parents: tuple[int, ...]
  depths: tuple[int, ...]

  @property
  def visible(self) -> np.ndarray:
    """[J, J]: which nodes each node sees: itself, and what it follows."""
    seen = np.eye(len(self.parents), dtype=bool)
    for node, parent in enumerate(self.parents[1:], 1):
      seen[node] |= seen[parent]
    return seen


def comb(widths: Sequence[int]) -> Tree:
  """A chain of as many tokens as there are widths, each with so many alternatives, itself counted."""
  parents, depths, last = [NONE], [0], 0
  for depth, width in enumerate(widths, 1):
    start = len(parents)
    parents += [last] * width
    depths += [depth] * width
    last = start
  return Tree(tuple(parents), tuple(depths))


@struct.dataclass
class Unread:
  """What a companion has still to read, in each row: features_TD of the last `count` tokens that are in the cache."""

  features_TD: Array
  count: Array


def unread(widths: Sequence[int], size: int, dtype: Any) -> Callable[[], Unread]:
  """The memory of a row, to begin with: nothing. size, dtype: of a token's features."""
  return lambda: Unread(np.zeros((len(widths) + 1, size), dtype), np.int32(0))


class Judgement(NamedTuple):
  """Of each node of the tree: the model's logits after it, and its features."""

  raw_BJV: Array
  features_BJD: Array


def branching(
  model: Model,
  companion: Companion,
  chain: LogitTransform,
  widths: Sequence[int],
  vocab_size: int | None = None,
  inspect: Callable[[Drawn], Any] = nothing,
) -> Strategy:
  """Draws 1 … depth + 1 tokens a row and step, as `speculative` does, after a tree of guesses.

  model: alone; the State's cache is an Accompanied, its parameters are Both, its settings Drafting with the memory of
  `unread`. widths: see `comb`. ValueError for widths that are no numbers from 1.
  """
  if not widths or not all(isinstance(width, int) and width >= 1 for width in widths):
    raise ValueError(f"a tree wants the number of guesses for each of the next tokens, from 1, got {widths!r}")
  tree = comb(widths)
  depth_J, visible_JJ = np.array(tree.depths, np.int32), tree.visible

  def forward(params: Both, state: State) -> tuple[State, Judgement]:
    """Logits and features of every node."""
    rows, last_B = state.length_B.shape[0], state.length_B - 1
    memory = _read_kept(companion, params, state)
    guesses_BK, memory = _guesses(companion, chain, widths, vocab_size, params, state, memory)
    tokens_BJ = jnp.concatenate([state.tokens_BT, guesses_BK], axis=1)
    positions_BJ = last_B[:, None] + depth_J[None]
    there_BJ = (state.positions_BT >= 0) & (positions_BJ < state.limit_B[:, None] - 1)
    there_BJ |= (state.positions_BT >= 0) & (depth_J == 0)[None]
    positions_BJ = jnp.where(there_BJ, positions_BJ, NONE)
    visible_BJJ = jnp.broadcast_to(visible_JJ, (rows, *visible_JJ.shape))
    inner = state.cache.cache.replace(extent_B=state.cache.extent_B).branch(visible_BJJ)
    features_BJD, inner = model.forward(params.model, tokens_BJ, positions_BJ, inner)
    raw_RV = model.head(params.model, features_BJD.reshape(-1, features_BJD.shape[-1])).astype(jnp.float32)
    cache = state.cache.replace(cache=inner, memory=memory)
    state = state.replace(cache=cache, tokens_BT=tokens_BJ, positions_BT=positions_BJ)
    return state, Judgement(raw_RV.reshape(*tokens_BJ.shape, -1), features_BJD)

  def draw(state: State, judgement: Judgement, allowed_BJV: Array | None = None) -> tuple[State, Emission]:
    def judged(raw_JV: Array, allowed_JV: Array | None, tokens_J: Array, positions_J: Array, row: Row) -> Judged:
      def follow(node: Array, token: Array) -> Array:
        mine_J = (jnp.asarray(tree.parents) == node) & (tokens_J == token) & (positions_J >= 0)
        return jnp.where(jnp.any(mine_J), jnp.argmax(mine_J), NONE)

      return judge(chain, inspect, vocab_size, raw_JV, row, follow, len(widths) + 1, allowed_JV=allowed_JV)

    judged_B = jax.vmap(judged)(judgement.raw_BJV, allowed_BJV, state.tokens_BT, state.positions_BT, rows_of(state))
    path_BT, chosen_BT = judged_B.path_J, jnp.maximum(judged_B.path_J, 0)
    cache = state.cache.replace(cache=state.cache.cache.keep(path_BT))
    features_BTD = jnp.take_along_axis(judgement.features_BJD, chosen_BT[..., None], axis=1)
    drafted_B = jnp.sum(state.positions_BT[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    state, emission = advanced(state, judged_B, cache, drafted_B, lambda memory, drafted, accepted: memory)
    kept = Unread(features_BTD, jnp.sum(path_BT >= 0, axis=1, dtype=jnp.int32))
    return state.replace(settings=state.settings.replace(memory=kept)), emission

  return Strategy(init, forward, draw)


def _read_kept(companion: Companion, params: Both, state: State) -> Any:
  """The companion's memory, with what the step before has kept."""
  features_BTD, count_B = state.settings.memory.features_TD, state.settings.memory.count
  offset_T = jnp.arange(features_BTD.shape[1], dtype=jnp.int32)
  first_B1 = (state.length_B - 1 - count_B)[:, None]
  positions_BT = jnp.where(offset_T[None] < count_B[:, None], first_B1 + offset_T[None], NONE)
  tokens_BT = jnp.take_along_axis(state.context_BL, jnp.maximum(positions_BT, 0), axis=1)
  return companion.read(params, tokens_BT, positions_BT, features_BTD, state.cache.memory)


def _guesses(
  companion: Companion, chain: LogitTransform, widths: Sequence[int], vocab_size: int | None, params: Both,
  state: State, memory: Any,
) -> tuple[Array, Any]:  # fmt: skip
  """tokens_BK of all nodes but the first: at each depth the most probable after the chain of most probable ones; and
  the companion's memory, without them."""
  rows = jnp.arange(state.length_B.shape[0])
  token_B, context_BL, settings, guesses = state.tokens_BT[:, 0], state.context_BL, state.settings.settings, []
  for depth, width in enumerate(widths):
    length_B = state.length_B + depth
    going_B = (state.finish_B == Finish.RUNNING) & (length_B < state.limit_B)
    raw_BV, _, memory = companion.guess(params, token_B, jnp.where(going_B, length_B - 1, NONE), memory)
    at_B = jax.vmap(jax.random.fold_in)(state.key_B, length_B)
    context_B = Context(context_BL, length_B, state.prompt_B, state.ends_BE, state.limit_B, at_B)
    law_BV = jax.vmap(chain.update)(without_padding(raw_BV, vocab_size), settings, context_B)
    best_BW = jax.lax.top_k(law_BV, min(width, law_BV.shape[1]))[1].astype(jnp.int32)
    best_BW = jnp.pad(best_BW, ((0, 0), (0, width - best_BW.shape[1])), constant_values=NONE)
    token_B = best_BW[:, 0]
    settings = jax.vmap(chain.observe)(settings, token_B, law_BV)
    context_BL = context_BL.at[rows, jnp.where(going_B, length_B, context_BL.shape[1])].set(token_B, mode="drop")
    guesses.append(best_BW)
  return jnp.concatenate(guesses, axis=1), memory.truncate(state.length_B - 1)
