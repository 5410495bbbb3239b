"""A model with a companion: a second network that reads every token that the model reads.

A draft model has a cache of its own, and a trained head is fed with the model's features: both must have read what the
model has read, forget what it forgets, and follow where its rows go. So their memory lies beside the model's cache as
one cache, and `accompanied` makes a Model of a Model: whatever reads a prompt or judges drafts feeds both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from decoder.cache import Cache, Codec
from decoder.types import NONE, Array, Model, Params


class Companion(NamedTuple):
  """Pure functions over a memory, which is a Cache or a Followed.

  allocate: (rows, capacity) -> an empty memory. read: (params, tokens_BT, positions_BT, features_BTD, memory) ->
  memory, after the model read those tokens and found those features. guess: (params, token_B, position_B, memory) ->
  (logits_BV, sure_B, memory), what may follow one token more, which the model has not read, and the chance of the most
  probable; its position is NONE where none is. Params are `Both`.
  """

  allocate: Callable[[int, int], Any]
  read: Callable[[Params, Array, Array, Array, Any], Any]
  guess: Callable[[Params, Array, Array, Any], tuple[Array, Array, Any]]


class Both(NamedTuple):
  """Parameters of a model and of its companion."""

  model: Params
  companion: Params


@struct.dataclass
class Accompanied:
  """A model's cache and its companion's memory, used as one cache. extent_B: as in Cache."""

  cache: Cache
  memory: Any
  extent_B: Array

  @classmethod
  def around(cls, cache: Cache, memory: Any) -> "Accompanied":
    """Of an empty cache and an empty memory."""
    return cls(cache, memory, jnp.array(cache.extent_B, copy=True))  # donated, and no buffer can be given away twice

  @property
  def capacity(self) -> int:
    return self.cache.capacity

  @property
  def batch(self) -> int:
    return self.extent_B.shape[0]

  @property
  def codec(self) -> Codec:
    return self.cache.codec

  @property
  def form(self) -> tuple:
    return self.cache.form

  def truncate(self, length_B: Array) -> "Accompanied":
    """Forgets positions ≥ length in both."""
    return self.replace(cache=self.cache.truncate(length_B), memory=self.memory.truncate(length_B))

  def select(self, rows_R: Array) -> "Accompanied":
    """Row r becomes row rows_R[r] in both."""
    cache, memory = self.cache.select(rows_R), self.memory.select(rows_R)
    return self.replace(cache=cache, memory=memory, extent_B=self.extent_B[rows_R])

  def insert(self, rows_R: Array, other: "Accompanied") -> "Accompanied":
    """Row r of `other` replaces row rows_R[r] in both; rows_R ≥ B are dropped."""
    extent_B = self.extent_B.at[rows_R].set(other.extent_B, mode="drop")
    cache, memory = self.cache.insert(rows_R, other.cache), self.memory.insert(rows_R, other.memory)
    return self.replace(cache=cache, memory=memory, extent_B=extent_B)


def accompanied(model: Model, companion: Companion) -> Model:
  """The model, its features and logits unchanged, whose companion reads along. It takes `Both` as parameters and an
  Accompanied as its cache."""

  def forward(params: Both, tokens_BT: Array, positions_BT: Array, cache: Accompanied) -> tuple[Array, Accompanied]:
    features_BTD, inner = model.forward(
      params.model, tokens_BT, positions_BT, cache.cache.replace(extent_B=cache.extent_B)
    )
    memory = companion.read(params, tokens_BT, positions_BT, features_BTD, cache.memory)
    return features_BTD, cache.replace(cache=inner, memory=memory)

  def head(params: Both, features_BD: Array) -> Array:
    return model.head(params.model, features_BD)

  return Model(forward, head)


def second_model(model: Model, allocate: Callable[[int, int], Cache]) -> Companion:
  """A model as the companion of another: a small one that drafts for a large one. Both have the same vocabulary."""

  def read(params: Both, tokens_BT: Array, positions_BT: Array, features_BTD: Array, cache: Cache) -> Cache:
    return model.forward(params.companion, tokens_BT, positions_BT, cache)[1]

  def guess(params: Both, token_B: Array, position_B: Array, cache: Cache) -> tuple[Array, Array, Cache]:
    features_BTD, cache = model.forward(params.companion, token_B[:, None], position_B[:, None], cache)
    logits_BV = model.head(params.companion, features_BTD[:, 0]).astype(jnp.float32)
    return logits_BV, _sure(logits_BV), cache

  return Companion(allocate, read, guess)


def _sure(logits_BV: Array) -> Array:
  return jnp.max(jax.nn.softmax(logits_BV), axis=1)


RECENT = 8  # tokens whose features are kept: as many as a block of drafts may have


@struct.dataclass
class Followed:
  """What a head that is fed with features remembers: a cache of its own, and the features of the last RECENT tokens.

  features_BWD[b, p % RECENT] are those of position p where positions_BW holds p there.
  """

  cache: Cache
  features_BWD: Array
  positions_BW: Array

  @classmethod
  def around(cls, cache: Cache, size: int, dtype: Any) -> "Followed":
    """An empty one, around an empty cache; size: of a token's features."""
    rows = cache.batch
    return cls(cache, jnp.zeros((rows, RECENT, size), dtype), jnp.full((rows, RECENT), NONE, jnp.int32))

  def truncate(self, length_B: Array) -> "Followed":
    kept_BW = jnp.where(self.positions_BW < length_B[:, None], self.positions_BW, NONE)
    return self.replace(cache=self.cache.truncate(length_B), positions_BW=kept_BW)

  def select(self, rows_R: Array) -> "Followed":
    return Followed(self.cache.select(rows_R), self.features_BWD[rows_R], self.positions_BW[rows_R])

  def insert(self, rows_R: Array, other: "Followed") -> "Followed":
    return Followed(
      self.cache.insert(rows_R, other.cache),
      self.features_BWD.at[rows_R].set(other.features_BWD, mode="drop"),
      self.positions_BW.at[rows_R].set(other.positions_BW, mode="drop"),
    )

  def noted(self, features_BTD: Array, positions_BT: Array) -> "Followed":
    """With the features of these tokens, as far as they are among a row's last RECENT."""
    newest_B1 = jnp.max(positions_BT, axis=1, keepdims=True)
    kept_BT = (positions_BT >= 0) & (positions_BT > newest_B1 - RECENT)
    slots_BT = jnp.where(kept_BT, positions_BT % RECENT, RECENT)  # past the end: dropped
    rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
    features_BWD = self.features_BWD.at[rows_B1, slots_BT].set(
      features_BTD.astype(self.features_BWD.dtype), mode="drop"
    )
    positions_BW = self.positions_BW.at[rows_B1, slots_BT].set(positions_BT, mode="drop")
    return self.replace(features_BWD=features_BWD, positions_BW=positions_BW)

  def before(self, positions_BT: Array, features_BTD: Array | None = None) -> Array:
    """For each token the features of the one before it: of this block, whose features are given, else remembered ones;
    zeros where there is none."""
    wanted_BT = jnp.maximum(positions_BT - 1, 0)
    slots_BT = wanted_BT % RECENT
    held_BT = jnp.take_along_axis(self.positions_BW, slots_BT, axis=1) == positions_BT - 1
    held_BT &= positions_BT > 0
    before_BTD = jnp.take_along_axis(self.features_BWD, slots_BT[..., None], axis=1)
    before_BTD = jnp.where(held_BT[..., None], before_BTD, 0)
    if features_BTD is None:
      return before_BTD
    shifted_BTD = jnp.pad(features_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    follows_BT = jnp.pad(positions_BT[:, 1:] == positions_BT[:, :-1] + 1, ((0, 0), (1, 0))) & (positions_BT > 0)
    return jnp.where(follows_BT[..., None], shifted_BTD.astype(before_BTD.dtype), before_BTD)


class Head(NamedTuple):
  """A network that says what follows from a token and the features of the one before it.

  allocate: (rows, capacity) -> Cache. forward: (params, tokens_BT, features_BTD, positions_BT, cache) -> (features_BTD,
  cache), what it takes the model's features of these tokens to be. logits: (params, features_BD) -> logits_BR of the
  tokens that it drafts; spread: (params, logits_BR) -> logits_BV, where those are not all. Params are `Both`. size,
  dtype: of features.
  """

  allocate: Callable[[int, int], Cache]
  forward: Callable
  logits: Callable
  size: int
  dtype: Any
  spread: Callable[[Params, Array], Array] = lambda params, logits_BV: logits_BV


def feature_head(head: Head) -> Companion:
  """A trained head as a companion (Li et al. 2024, EAGLE, arXiv:2401.15077): it drafts from the model's features, and
  beyond the last token that the model has read from its own."""

  def allocate(rows: int, capacity: int) -> Followed:
    return Followed.around(head.allocate(rows, capacity), head.size, head.dtype)

  def read(params: Both, tokens_BT: Array, positions_BT: Array, features_BTD: Array, memory: Followed) -> Followed:
    before_BTD = memory.before(positions_BT, features_BTD)
    _, cache = head.forward(params, tokens_BT, before_BTD, positions_BT, memory.cache)
    return memory.replace(cache=cache).noted(features_BTD, positions_BT)

  def guess(params: Both, token_B: Array, position_B: Array, memory: Followed) -> tuple[Array, Array, Followed]:
    positions_B1 = position_B[:, None]
    features_B1D, cache = head.forward(
      params, token_B[:, None], memory.before(positions_B1), positions_B1, memory.cache
    )
    memory = memory.replace(cache=cache).noted(features_B1D, positions_B1)
    logits_BR = head.logits(params, features_B1D[:, 0]).astype(jnp.float32)
    return head.spread(params, logits_BR), _sure(logits_BR), memory

  return Companion(allocate, read, guess)
