"""Classifier-free guidance: a model that is pushed away from what it would write after another prompt.

Sanchez et al. 2023 (arXiv:2306.17806), equation 7: log-probs after the negative prompt + scale · (log-probs after the
prompt − those). `guided` makes a Model of a Model, so a strategy sees B rows and nothing of this. The cache it threads
has 2B: the second half reads the same new tokens, at positions that follow the negative prompt instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from decoder.cache import Cache, Codec
from decoder.types import NONE, Array, Model, Params

_FLOOR = -1e4  # a log-prob below it counts as it: the difference of two that are −inf would be NaN

_ROWS = ("extent_B", "prompt_B", "shift_B", "scale_B", "features_BD")  # of a GuidedCache, besides the cache


@struct.dataclass
class GuidedCache:
  """A cache of 2B rows: each row after its prompt, then each after its negative prompt.

  shift_B: prompt length − negative length, from a token's position to that in the second half. scale_B: 1 is off.
  features_BD: of the negative prompt's last token, float32. extent_B as in Cache.
  """

  cache: Cache
  extent_B: Array
  prompt_B: Array
  shift_B: Array
  scale_B: Array
  features_BD: Array

  @classmethod
  def around(cls, cache: Cache, features: int) -> "GuidedCache":
    """An empty one, from an empty cache of 2B rows; features: size of the model's."""
    rows = cache.batch // 2
    prompt_B, shift_B = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32)
    return cls(cache, cache.extent_B[:rows], prompt_B, shift_B, jnp.ones(rows), jnp.zeros((rows, features)))

  @property
  def capacity(self) -> int:
    return self.cache.capacity

  @property
  def batch(self) -> int:
    return self.shift_B.shape[0]

  @property
  def codec(self) -> Codec:
    return self.cache.codec

  @property
  def form(self) -> tuple:
    return self.cache.form

  def truncate(self, length_B: Array) -> "GuidedCache":
    """Forgets positions ≥ length and what was written there after the negative prompt, but nothing of that prompt."""
    second_B = jnp.maximum(length_B, self.prompt_B) - self.shift_B
    return self.replace(cache=self.cache.truncate(jnp.concatenate([length_B, second_B])))

  def select(self, rows_R: Array) -> "GuidedCache":
    """Row r becomes row rows_R[r], with its negative prompt."""
    both_E = jnp.concatenate([rows_R, rows_R + self.batch])
    return self.replace(cache=self.cache.select(both_E), **{name: getattr(self, name)[rows_R] for name in _ROWS})

  def insert(self, rows_R: Array, other: "GuidedCache") -> "GuidedCache":
    """Row r of `other` replaces row rows_R[r]; rows_R ≥ B are dropped."""
    there_R = rows_R < self.batch
    both = [jnp.where(there_R, rows_R + start, 2 * self.batch) for start in (0, self.batch)]
    changed = {n: getattr(self, n).at[rows_R].set(getattr(other, n), mode="drop") for n in _ROWS}
    return self.replace(cache=self.cache.insert(jnp.concatenate(both), other.cache), **changed)


def guided(model: Model, dtype: Any) -> Model:
  """The model under guidance, to be run with a GuidedCache. dtype: of the model's features.

  Each row follows its own scale and negative prompt (`read_negative`). A row of scale 1 is the model itself.
  """

  def forward(params: Params, tokens_BT: Array, positions_BT: Array, cache: GuidedCache) -> tuple[Array, GuidedCache]:
    written_BT = positions_BT >= cache.prompt_B[:, None]
    second_BT = jnp.where(written_BT, positions_BT - cache.shift_B[:, None], NONE)
    own_BTD, second_BTD, cache = _both(model, params, tokens_BT, positions_BT, second_BT, cache)
    second_BTD = jnp.where(written_BT[..., None], second_BTD, cache.features_BD[:, None])
    scale_BT1 = jnp.broadcast_to(cache.scale_B[:, None, None], (*positions_BT.shape, 1))
    return jnp.concatenate([own_BTD, second_BTD, scale_BT1], axis=-1), cache

  def head(params: Params, features_BD: Array) -> Array:
    rows, size = features_BD.shape[0], features_BD.shape[1] // 2
    halves_ED = jnp.concatenate([features_BD[:, :size], features_BD[:, size : 2 * size]]).astype(dtype)
    logits_EV = model.head(params, halves_ED).astype(jnp.float32)
    return _push(logits_EV[:rows], logits_EV[rows:], features_BD[:, -1:])

  return Model(forward, head)


def read_negative(
  model: Model, params: Params, cache: GuidedCache, tokens_BT: Array, start: Array, length_B: Array
) -> GuidedCache:
  """Reads tokens start … start + T − 1 of the negative prompts, which have `length_B` tokens, after those before.

  What the second half held from `start` on is forgotten. `cache.prompt_B` must be known.
  """
  positions_BT = start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
  positions_BT = jnp.where(positions_BT < length_B[:, None], positions_BT, NONE)
  everything_B = jnp.full_like(length_B, jnp.iinfo(jnp.int32).max)
  kept = cache.cache.truncate(jnp.concatenate([everything_B, jnp.full_like(length_B, start)]))
  cache = cache.replace(cache=kept, shift_B=cache.prompt_B - length_B)
  none_BT = jnp.full_like(positions_BT, NONE)
  _, second_BTD, cache = _both(model, params, tokens_BT, none_BT, positions_BT, cache)
  last_BT1 = (positions_BT == length_B[:, None] - 1)[..., None]
  features_BD = jnp.sum(jnp.where(last_BT1, second_BTD, 0), axis=1)
  features_BD = jnp.where(jnp.any(last_BT1, axis=1), features_BD, cache.features_BD)
  return cache.replace(features_BD=features_BD)


def _both(
  model: Model, params: Params, tokens_BT: Array, first_BT: Array, second_BT: Array, cache: GuidedCache
) -> tuple[Array, Array, GuidedCache]:
  """The same tokens at both halves' positions: features of each half, float32."""
  extent_E = jnp.concatenate([cache.extent_B, cache.extent_B - cache.shift_B])
  tokens_ET, positions_ET = jnp.concatenate([tokens_BT, tokens_BT]), jnp.concatenate([first_BT, second_BT])
  features_ETD, inner = model.forward(params, tokens_ET, positions_ET, cache.cache.replace(extent_B=extent_E))
  # f32 holds any compute type exactly, and the scale that travels with the features.
  first_BTD, second_BTD = jnp.split(features_ETD.astype(jnp.float32), 2)
  return first_BTD, second_BTD, cache.replace(cache=inner)


def _push(own_BV: Array, second_BV: Array, scale_B1: Array) -> Array:
  """Guided log-probs; where the scale is 1 the model's logits as they are. What the model itself excludes stays so."""
  own_log_BV = jnp.maximum(jax.nn.log_softmax(own_BV), _FLOOR)
  second_log_BV = jnp.maximum(jax.nn.log_softmax(second_BV), _FLOOR)
  pushed_BV = second_log_BV + scale_B1 * (own_log_BV - second_log_BV)
  return jnp.where((scale_B1 == 1) | (own_BV == -jnp.inf), own_BV, pushed_BV)
