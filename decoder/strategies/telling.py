"""Log-probs of tokens that are given rather than drawn: prompts, and continuations to be scored.

The head runs over every position, but over slices of them, so that the logits of a long prompt never exist at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decoder.sampling import Logprobs, logprobs
from decoder.strategies.autoregressive import State, last_logits
from decoder.types import Array, Model, Params

SLICE = 2**24  # most logits at once: 64 MiB in float32


class Told(NamedTuple):
  """Of each position of a block [B, T, ...]: the raw log-prob of the token after it, and whether all logits there
  were finite. Positions without a token, or with none after it, tell nothing of meaning."""

  logprobs: Logprobs
  sound_BT: Array


def forward_telling(model: Model, number: int) -> Callable[[Params, State], tuple[State, Array, Told]]:
  """The forward half of a step, which also tells of the tokens it reads, with `number` alternatives."""

  def forward(params: Params, state: State) -> tuple[State, Array, Told]:
    features_BTD, cache = model.forward(params, state.tokens_BT, state.positions_BT, state.cache)
    after_BT = jnp.clip(state.positions_BT + 1, 0, state.context_BL.shape[1] - 1)
    next_BT = jnp.take_along_axis(state.context_BL, after_BT, axis=1)
    told = _tell(model, params, features_BTD, next_BT, number)
    return state.replace(cache=cache), last_logits(model, params, features_BTD, state.positions_BT), told

  return forward


def _tell(model: Model, params: Params, features_BTD: Array, next_BT: Array, number: int) -> Told:
  def tell(slice_: tuple[Array, Array]) -> Told:
    features_RD, next_R = slice_
    logits_RV = model.head(params, features_RD).astype(jnp.float32)  # f32: log-probs of rare tokens
    sound_R = jnp.isfinite(jnp.max(logits_RV, axis=-1))
    return Told(jax.vmap(lambda logits_V, token: logprobs(logits_V, token, number))(logits_RV, next_R), sound_R)

  batch, tokens, width = features_BTD.shape
  vocabulary = jax.eval_shape(model.head, params, features_BTD[:, 0]).shape[-1]
  rows = batch * tokens
  size = min(rows, max(1, SLICE // vocabulary))
  slices = -(-rows // size)
  features_RD = jnp.pad(features_BTD.reshape(rows, width), ((0, slices * size - rows), (0, 0)))
  next_R = jnp.pad(next_BT.reshape(rows), (0, slices * size - rows))
  told = lax.map(tell, (features_RD.reshape(slices, size, width), next_R.reshape(slices, size)))

  def unslice(x: Array) -> Array:
    return x.reshape(slices * size, *x.shape[2:])[:rows].reshape(batch, tokens, *x.shape[2:])

  return jax.tree.map(unslice, told)
