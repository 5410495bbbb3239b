"""Guesses from a companion: it goes on from the text by itself, one token at a time, for as many as seem worth it.

Each guess is drawn from the companion's law after the row's own chain, so that the settings of a request shape both
laws, and it is judged by both (Leviathan et al. 2023, arXiv:2211.17192). What the companion remembers of its guesses is
forgotten before they are judged: it reads what is judged with the model's features, as it read the prompt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.sampling import Context, LogitTransform, categorical
from decoder.strategies.accompanied import Companion
from decoder.strategies.autoregressive import Finish, State, without_padding
from decoder.strategies.judging import draft_key
from decoder.strategies.speculative import CHANCE, COSTS, Drafts, Proposer, adapted, worth
from decoder.types import NONE, Array, Params


class _Guessing(NamedTuple):
  """j: guesses so far; token_B: the last token; settings: of each row's chain, as they would be after it."""

  j: Array
  token_B: Array
  memory: Any
  settings: Any
  context_BL: Array
  tokens_BK: Array
  laws_BKV: Array


def drafted(
  companion: Companion, chain: LogitTransform, vocab_size: int | None, each: float, costs: Sequence[float] = COSTS
) -> Proposer:
  """For a model that is `accompanied` by this companion and draws through this chain. Each row guesses as many tokens
  as promise most for their cost, by how many were kept so far.

  each: what a guess costs, and costs: a step over 1, 2, 4 and 8 tokens, in steps over one.
  """

  def init() -> np.ndarray:
    return np.float32(CHANCE)

  def propose(params: Params, state: State, size: int) -> tuple[State, Drafts]:
    count_B = jax.vmap(lambda chance: worth(chance, size, costs, each))(state.settings.memory)
    count_B = jnp.where(state.finish_B == Finish.RUNNING, count_B, 0)
    count_B = jnp.clip(count_B, 0, jnp.maximum(state.limit_B - state.length_B - 1, 0))
    rows, last_B = state.length_B.shape[0], state.length_B - 1

    def guess(now: _Guessing) -> _Guessing:
      going_B = now.j < count_B
      position_B = jnp.where(going_B, last_B + now.j, NONE)
      raw_BV, memory = companion.guess(params, now.token_B, position_B, now.memory)
      at_B = jax.vmap(jax.random.fold_in)(state.key_B, state.length_B + now.j)
      context_B = Context(now.context_BL, state.length_B + now.j, state.prompt_B, state.ends_BE, state.limit_B, at_B)
      law_BV = jax.vmap(chain.update)(without_padding(raw_BV, vocab_size), now.settings, context_B)
      token_B = jax.vmap(lambda key, law_V: categorical(draft_key(key), law_V))(at_B, law_BV)
      settings = jax.vmap(chain.observe)(now.settings, token_B, law_BV)
      slot_B = jnp.where(going_B, state.length_B + now.j, now.context_BL.shape[1])  # past the end: dropped
      context_BL = now.context_BL.at[jnp.arange(rows), slot_B].set(token_B, mode="drop")
      return _Guessing(
        now.j + 1, token_B, memory, settings, context_BL, now.tokens_BK.at[:, now.j].set(token_B),
        now.laws_BKV.at[:, now.j].set(law_BV),
      )  # fmt: skip

    size_V = jax.eval_shape(companion.guess, params, last_B, last_B, state.cache.memory)[0].shape[-1]
    start = _Guessing(
      jnp.int32(0), state.tokens_BT[:, -1], state.cache.memory, state.settings.settings, state.context_BL,
      jnp.zeros((rows, size), jnp.int32), jnp.zeros((rows, size, size_V), jnp.float32),
    )  # fmt: skip
    done = lax.while_loop(lambda now: now.j < jnp.max(count_B), guess, start)
    cache = state.cache.replace(memory=done.memory.truncate(last_B))
    return state.replace(cache=cache), Drafts(done.tokens_BK, count_B, done.laws_BKV)

  return Proposer(init, propose, adapted)
