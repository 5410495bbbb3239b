"""Guesses from a companion: it goes on from the text by itself, one token at a time, for as many as seem worth it.

Each guess is drawn from the companion's law after the row's own chain, so that the settings of a request shape both
laws, and it is judged by both (Leviathan et al. 2023, arXiv:2211.17192). Whether a further guess is made depends on how
sure the companion is there, before it is drawn: were it to depend on what was drawn, the law would not be the model's
any more. What the companion remembers of its guesses is forgotten before they are judged: it reads what is judged with
the model's features, as it read the prompt.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.sampling import Context, LogitTransform
from decoder.strategies.accompanied import Companion
from decoder.strategies.autoregressive import Finish, State, without_padding
from decoder.strategies.judging import draft
from decoder.strategies.speculative import BLOCKS, CHANCE, COSTS, Drafts, Proposer, adapted, worth
from decoder.types import NONE, Array, Params

_HOPE = 0.02  # see `adapted`


class _Guessing(NamedTuple):
  """j: guesses so far; count_B: how many each row makes, as far as that is known; reach_B: the chance that all so far
  are kept, by the companion's own word; token_B: the last token; settings: of each row's chain, as they would be after
  it."""

  j: Array
  count_B: Array
  reach_B: Array
  token_B: Array
  memory: Any
  settings: Any
  context_BL: Array
  tokens_BK: Array
  laws_BKV: Array


def drafted(
  companion: Companion, chain: LogitTransform, vocab_size: int | None, each: float, costs: Sequence[float] = COSTS
) -> Proposer:
  """For a model that is `accompanied` by this companion and draws through this chain. Each row guesses as long as a
  further token is worth its cost, by how sure the companion is; none, where too few were kept so far.

  each: what a guess costs, and costs: a step over 1, 2, 4 and 8 tokens, in steps over one.
  """
  least = each + (costs[-1] - costs[0]) / (BLOCKS[-1] - BLOCKS[0])  # what a further token costs, in steps over one

  def init() -> np.ndarray:
    return np.float32(CHANCE)

  def propose(params: Params, state: State, size: int) -> tuple[State, Drafts]:
    pays_B = jax.vmap(lambda chance: worth(chance, size, costs, each))(state.settings.memory) > 0
    count_B = jnp.where(pays_B & (state.finish_B == Finish.RUNNING), size, 0)
    count_B = jnp.clip(count_B, 0, jnp.maximum(state.limit_B - state.length_B - 1, 0))
    rows, last_B = state.length_B.shape[0], state.length_B - 1

    def guess(now: _Guessing) -> _Guessing:
      position_B = jnp.where(now.j < now.count_B, last_B + now.j, NONE)
      raw_BV, sure_B, memory = companion.guess(params, now.token_B, position_B, now.memory)
      reach_B = now.reach_B * sure_B
      count_B = jnp.where(reach_B < least, jnp.minimum(now.count_B, now.j), now.count_B)
      going_B = now.j < count_B
      # If the next is kept no oftener than those so far, is it worth being looked for?
      count_B = jnp.where(reach_B * state.settings.memory < least, jnp.minimum(count_B, now.j + 1), count_B)
      at_B = jax.vmap(jax.random.fold_in)(state.key_B, state.length_B + now.j)
      context_B = Context(now.context_BL, state.length_B + now.j, state.prompt_B, state.ends_BE, state.limit_B, at_B)
      law_BV = jax.vmap(chain.update)(without_padding(raw_BV, vocab_size), now.settings, context_B)
      token_B, log_BV = jax.vmap(draft)(at_B, law_BV)
      settings = jax.vmap(chain.observe)(now.settings, token_B, law_BV)
      slot_B = jnp.where(going_B, state.length_B + now.j, now.context_BL.shape[1])  # past the end: dropped
      context_BL = now.context_BL.at[jnp.arange(rows), slot_B].set(token_B, mode="drop")
      return _Guessing(
        now.j + 1, count_B, reach_B, token_B, memory, settings, context_BL, now.tokens_BK.at[:, now.j].set(token_B),
        now.laws_BKV.at[:, now.j].set(log_BV),
      )  # fmt: skip

    size_V = jax.eval_shape(companion.guess, params, last_B, last_B, state.cache.memory)[0].shape[-1]
    start = _Guessing(
      jnp.int32(0), count_B, jnp.ones(rows), state.tokens_BT[:, -1], state.cache.memory, state.settings.settings,
      state.context_BL, jnp.zeros((rows, size), jnp.int32), jnp.zeros((rows, size, size_V), jnp.float32),
    )  # fmt: skip
    done = lax.while_loop(lambda now: now.j < jnp.max(now.count_B), guess, start)
    cache = state.cache.replace(memory=done.memory.truncate(last_B))
    return state.replace(cache=cache), Drafts(done.tokens_BK, done.count_B, done.laws_BKV)

  return Proposer(init, propose, functools.partial(adapted, hope=_HOPE))
