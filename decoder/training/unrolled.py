"""Attention of a head that is trained on its own guesses: each pass over a text is one guess further ahead.

While it drafts, the head's first guess follows tokens whose features the model has found; its second follows one whose
features it guessed itself, and so on. In pass s each token stands s − 1 guesses behind the last one read: of the
passes before it sees one key each, and of the first all up to there (the training-time test of EAGLE-3,
arXiv:2503.01840, section 3). One `Unrolled` serves a head in place of its cache, over all passes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from decoder.ops import attention
from decoder.types import Array


@struct.dataclass
class Unrolled:
  """Keys and values of one layer over whole texts, a pair a pass. As a cache and as its only entry."""

  positions_BT: Array
  passes: tuple[tuple[Array, Array], ...] = ()

  @property
  def extent_B(self) -> Array:
    return jnp.full(self.positions_BT.shape[:1], self.positions_BT.shape[1], jnp.int32)

  def claim(self, positions_BT: Array) -> "Unrolled":
    return self

  def layer(self, index: int) -> "Unrolled":
    return self

  def with_layer(self, index: int, entry: "Unrolled") -> "Unrolled":
    return entry

  def append(self, positions_BT: Array, k_BTKH: Array, v_BTKH: Array, rotate: Callable | None = None) -> "Unrolled":
    """The keys and values of a further pass over the same tokens."""
    k_BTKH = k_BTKH if rotate is None else rotate(k_BTKH, positions_BT)
    return self.replace(passes=(*self.passes, (k_BTKH, v_BTKH)))

  def attend(self, query: attention.Query) -> tuple[Array, "Unrolled"]:
    """What each token of the last pass sees: [B, T, N, H]."""
    q_BTNH = query.q_BTNH if query.rotate is None else query.rotate(query.q_BTNH, query.positions_BT)
    behind, kv_heads = len(self.passes) - 1, self.passes[0][0].shape[2]
    q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], kv_heads, -1, q_BTNH.shape[-1])
    first_BSKH, values_BSKH = self.passes[0]
    scores = [jnp.einsum("btkgh,bskh->btkgs", q_BTKGH, first_BSKH)]
    q_B1, kv_B1 = self.positions_BT[:, :, None], self.positions_BT[:, None, :]
    seen = [(kv_B1 >= 0) & (kv_B1 <= q_B1 - behind)]
    own = []
    for back, (k_BTKH, v_BTKH) in enumerate(reversed(self.passes[1:])):
      scores.append(jnp.einsum("btkgh,btkh->btkg", q_BTKGH, _later(k_BTKH, back))[..., None])
      seen.append((self.positions_BT >= back)[..., None])
      own.append(_later(v_BTKH, back))
    scores, seen = jnp.concatenate(scores, axis=-1) * query.scale, jnp.concatenate(seen, axis=-1)[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    size = values_BSKH.shape[1]
    out = jnp.einsum("btkgs,bskh->btkgh", weights[..., :size], values_BSKH)
    for number, v_BTKH in enumerate(own):
      out += weights[..., size + number, None] * v_BTKH[:, :, :, None]
    return out.reshape(q_BTNH.shape), self


def _later(x_BTKH: Array, tokens: int) -> Array:
  """Each token's entry moved to the one so many tokens later."""
  return jnp.pad(x_BTKH, ((0, 0), (tokens, 0), (0, 0), (0, 0)))[:, : x_BTKH.shape[1]]
