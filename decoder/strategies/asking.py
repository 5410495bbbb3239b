"""Strategies whose every draw asks the host what may be drawn, from within one running program.

The host is told before the forward pass, of what was drawn last and of what is guessed to follow, and thinks meanwhile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decoder.ops.kernels import channel
from decoder.strategies.autoregressive import Finish, State, pending, release
from decoder.strategies.speculative import Drafts, Proposer
from decoder.types import NONE, Array, Emission, Params, Strategy


def asking(strategy: Strategy, number: Array, unpack: Callable[[Array], Array]) -> Strategy:
  """One that tells of the tokens pending, and whose draws are `answered`."""

  def forward(params: Params, state: State) -> tuple[State, Array]:
    told_BT = channel.tell(number, state.tokens_BT, state.positions_BT, state.length_B)
    return strategy.forward(params, state.replace(tokens_BT=told_BT))

  return answered(strategy._replace(forward=forward), number, unpack)


def answered(strategy: Strategy, number: Array, unpack: Callable[[Array], Array]) -> Strategy:
  """One whose draws wait for masks and for the rows that the host has ended. number: of an open `channel.Channel`.
  unpack: masks, [B, W] or [B, J, W] as the logits are, to what `draw` takes."""

  def draw(state: State, judged: Any) -> tuple[State, Emission]:
    logits = jax.tree.leaves(judged)[0]  # alone, or the first of what guesses are judged by
    masks, ended_B = channel.ask(number, logits)
    return strategy.draw(release(state, ended_B), judged, unpack(masks))

  return strategy._replace(draw=draw)


def announced(proposer: Proposer, number: Array) -> Proposer:
  """One that tells of the tokens that the last step may have drawn, and of its guesses."""

  def propose(params: Any, state: State, size: int) -> tuple[State, Drafts]:
    state, drafts = proposer.propose(params, state, size)
    drawn = pending(state, state.length_B - (size + 1), size + 1)
    offset_K = jnp.arange(size, dtype=jnp.int32)
    there_BK = (state.finish_B == Finish.RUNNING)[:, None] & (offset_K[None] < drafts.count_B[:, None])
    ahead_BK = jnp.where(there_BK, state.length_B[:, None] + offset_K[None], NONE)
    told_BT = channel.tell(
      number, jnp.concatenate([drawn.tokens_BT, drafts.tokens_BK], axis=1),
      jnp.concatenate([drawn.positions_BT, ahead_BK], axis=1), state.length_B,
    )  # fmt: skip
    # The last token as it was told: all that is read depends on it, so that nobody is asked before being told.
    last_B1, tokens_BK = told_BT[:, size : size + 1], told_BT[:, size + 1 :]
    return state.replace(tokens_BT=last_B1), drafts._replace(tokens_BK=tokens_BK)

  return proposer._replace(propose=propose)


def told_width(block: int) -> int:
  """Tokens a row that are told of, where a step draws up to `block` of them: those, and the guesses of the next."""
  return 2 * block - 1
