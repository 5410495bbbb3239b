"""The finished texts of a beam search: how they are kept, and which is the best. For one example; vmap."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from decoder.types import Array


@struct.dataclass
class Hypotheses:
  """Finished texts, the best first within each group of beams; leaves [W, …], or [B, W, …] of a batch.

  tokens_WN: new tokens, valid before length_W, an end included. logprobs_WN: what each added to the sum, 0 past the
  end. score_W: −inf where there is none. finish_W: STOP or LENGTH. details: of each token, leaves [W, N, …].
  """

  tokens_WN: Array
  logprobs_WN: Array
  length_W: Array
  score_W: Array
  finish_W: Array
  details: Any


def none_yet(beams: int, new: int) -> Hypotheses:
  """No hypotheses, with room for `new` tokens each, and nothing told of any."""
  zeros_W = jnp.zeros((beams,), jnp.int32)
  return Hypotheses(
    jnp.zeros((beams, new), jnp.int32), jnp.zeros((beams, new), jnp.float32), zeros_W,
    jnp.full((beams,), -jnp.inf), zeros_W.astype(jnp.int8), None,
  )  # fmt: skip


def merged(kept: Hypotheses, found: Hypotheses, groups: int) -> Hypotheses:
  """The best of both in each group; of equals those that were kept before."""
  beams = kept.score_W.shape[0]

  def of_group(x: Array) -> Array:
    return x.reshape(groups, beams // groups, *x.shape[1:])

  kept, found = jax.tree.map(of_group, (kept, found))
  both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), kept, found)
  _, index_GP = lax.top_k(both.score_W, beams // groups)

  def take(x: Array) -> Array:
    index = index_GP.reshape(*index_GP.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1).reshape(beams, *x.shape[2:])

  return jax.tree.map(take, both)


def ordered(found: Hypotheses) -> Hypotheses:
  """All of an example's, the best first, whatever their group; of equals the one of the lower beam."""
  order_W = jnp.argsort(-found.score_W, stable=True)
  return jax.tree.map(lambda x: x[order_W], found)
