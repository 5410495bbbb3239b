"""What encoder–decoder transformers share: two stacks, the second of which looks at what the first has read.

A family is a `Recipe`: its sizes, and the objects in which it differs from others (norm, arrangement, positions). The
decoder is a Model like any other. What its layers look at is written to the cache once, by `encode`, as keys and values
of the group CROSS; whoever decodes asks that group from a position after everything, so it sees all of it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from decoder.cache import CROSS, Cache, LayerSpec
from decoder.models import blocks
from decoder.ops.attention import Query, attend_both_ways
from decoder.ops.linear import linear, linears
from decoder.ops.norm import Normed
from decoder.types import NONE, Array

_AFTER_ALL = np.iinfo(np.int32).max  # the position from which everything is seen


def norm_first(norm: nn.Module, part: Callable, x: Array) -> Array:
  """x + part(norm(x)) (Xiong et al. 2020, arXiv:2002.04745). part: (x, residual) -> part(x) + residual."""
  return part(norm(x), x)


def norm_last(norm: nn.Module, part: Callable, x: Array) -> Array:
  """norm(x + part(x)), as in Vaswani et al. 2017 (arXiv:1706.03762)."""
  return norm(part(x, x))


@dataclasses.dataclass(frozen=True)
class Stack:
  """One of the two. norm, mlp, positions, relative: make a module, given its name; those that may be None are left out
  then. positions: added to token vectors; relative: added to the scores of self-attention. arrange: `norm_first` or
  `norm_last`. scale: of scores."""

  layers: int
  width: int
  heads: int
  head_dim: int
  scale: float
  bias: bool
  mlp: Callable
  norm: Callable
  arrange: Callable
  positions: Callable | None = None
  relative: Callable | None = None
  embed_norm: Callable | None = None
  last_norm: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
  """context: most tokens of either text. embed_scale: factor on token vectors, head_scale: on features before the head.
  logits_bias: whether one is added."""

  vocab_size: int
  width: int
  context: int
  encoder: Stack
  decoder: Stack
  tied: bool = True
  embed_scale: float = 1.0
  head_scale: float = 1.0
  logits_bias: bool = False


class Seq2Seq(nn.Module):
  """(tokens_BT, positions_BT, cache) -> (features_BTD, cache), for a cache that `encode` has written to."""

  config: Recipe
  dtype: Any

  def setup(self) -> None:
    c = self.config
    self.embed = blocks.Embedding(c.vocab_size, c.width)
    self.encoder, self.decoder = Encoder(c.encoder), Decoder(c.decoder)
    self.head_table = self.embed if c.tied else blocks.Embedding(c.vocab_size, c.width, name="head")
    self.logits_bias = Bias(c.vocab_size) if c.logits_bias else None

  def __call__(self, tokens_BT: Array, positions_BT: Array, cache: Cache) -> tuple[Array, Cache]:
    return self.decoder(self._vectors(tokens_BT), positions_BT, cache.claim(positions_BT))

  def read(self, tokens_BS: Array, positions_BS: Array) -> Array:
    """What the encoder makes of a source text: features [B, S, D]. All of it at once."""
    return self.encoder(self._vectors(tokens_BS), positions_BS)

  def encode(self, tokens_BS: Array, positions_BS: Array, cache: Cache) -> Cache:
    """Reads a source text and keeps what the decoder's layers look at."""
    features_BSD = self.read(tokens_BS, positions_BS)
    return self.decoder.keep(features_BSD, positions_BS, cache.claim_encoded(positions_BS))

  def head(self, features_BD: Array) -> Array:
    """logits_BV."""
    logits_BV = linear(features_BD * self.config.head_scale, self.head_table())
    return logits_BV if self.logits_bias is None else logits_BV + self.logits_bias().astype(logits_BV.dtype)

  def cache_spec(self) -> tuple[LayerSpec, ...]:
    """What the cache stores: of the text for each layer, then of the source for each."""
    c = self.config.decoder
    return tuple(LayerSpec(group, c.heads, c.head_dim) for group in ("global", CROSS) for _ in range(c.layers))

  def context(self) -> int:
    """The longest text, read or written, that it was made for, in tokens."""
    return self.config.context

  def _vectors(self, tokens_BT: Array) -> Array:
    return blocks.take_rows(self.embed(), tokens_BT, self.dtype) * self.config.embed_scale


class Bias(nn.Module):
  size: int

  @nn.compact
  def __call__(self) -> Array:
    """[1, V]."""
    return self.param("bias", nn.initializers.zeros, (1, self.size))


class Layers(nn.Module):
  """One stack; a subclass gives its `layers`."""

  stack: Stack

  def setup(self) -> None:
    c = self.stack
    self.positions = c.positions() if c.positions else None
    self.relative = c.relative() if c.relative else None
    self.embed_norm = c.embed_norm() if c.embed_norm else None
    self.norm = c.last_norm() if c.last_norm else None

  def enter(self, x_BTD: Array, positions_BT: Array) -> tuple[Array, Callable | None]:
    """What the first layer is given, and the bias of scores in all of them."""
    if self.positions is not None:
      x_BTD = x_BTD + self.positions(positions_BT).astype(x_BTD.dtype)
    if self.embed_norm is not None:
      x_BTD = self.embed_norm(x_BTD)
    return x_BTD, None if self.relative is None else self.relative()

  def leave(self, x_BTD: Array) -> Array:
    """What the last layer gives, normed where the recipe says so."""
    normed = x_BTD if self.norm is None else self.norm(x_BTD)
    return normed.array() if isinstance(normed, Normed) else normed


class Encoder(Layers):
  """(x_BSD, positions_BS) -> features_BSD."""

  def setup(self) -> None:
    super().setup()
    self.layers = [EncoderLayer(self.stack) for _ in range(self.stack.layers)]

  def __call__(self, x_BSD: Array, positions_BS: Array) -> Array:
    x_BSD, bias = self.enter(x_BSD, positions_BS)
    for layer in self.layers:
      x_BSD = layer(x_BSD, positions_BS, bias)
    return self.leave(x_BSD)


class EncoderLayer(nn.Module):
  stack: Stack

  @nn.compact
  def __call__(self, x_BSD: Array, positions_BS: Array, bias: Callable | None) -> Array:
    c = self.stack
    among = Among(c, name="attention")
    with jax.named_scope("attention"):
      x_BSD = c.arrange(c.norm(name="attention_norm"), lambda x, to: among(x, positions_BS, to, bias), x_BSD)
    with jax.named_scope("mlp"):
      return c.arrange(c.norm(name="mlp_norm"), c.mlp(name="mlp"), x_BSD)


class Among(nn.Module):
  """Self-attention of an encoder: all tokens see all."""

  stack: Stack

  @nn.compact
  def __call__(self, x: Array | Normed, positions_BS: Array, residual: Array, bias: Callable | None) -> Array:
    c = self.stack
    parts = [_inward(c, name=name)() for name in ("q", "k", "v")]
    q_BSNH, k_BSNH, v_BSNH = (_by_head(c, part) for part in linears(x, parts))
    seen_BSNH = attend_both_ways(Query(q_BSNH, positions_BS, c.scale, bias=bias), k_BSNH, v_BSNH)
    return linear(_flat(seen_BSNH), *_outward(c, name="o")(), residual)


class Decoder(Layers):
  """(x_BTD, positions_BT, cache) -> (features_BTD, cache)."""

  def setup(self) -> None:
    super().setup()
    self.layers = [DecoderLayer(self.stack, index) for index in range(self.stack.layers)]

  def __call__(self, x_BTD: Array, positions_BT: Array, cache: Cache) -> tuple[Array, Cache]:
    x_BTD, bias = self.enter(x_BTD, positions_BT)
    for layer in self.layers:
      x_BTD, cache = layer(x_BTD, positions_BT, cache, bias)
    return self.leave(x_BTD), cache

  def keep(self, features_BSD: Array, positions_BS: Array, cache: Cache) -> Cache:
    """Writes what each layer looks at of the encoder's features."""
    for layer in self.layers:
      cache = layer.keep(features_BSD, positions_BS, cache)
    return cache


class DecoderLayer(nn.Module):
  stack: Stack
  index: int

  def setup(self) -> None:
    c = self.stack
    self.attention = blocks.Attention(
      self.index, c.heads, c.heads, c.head_dim, qkv_bias=c.bias, out_bias=c.bias, scale=c.scale
    )
    self.cross = Cross(c, c.layers + self.index)
    self.mlp = c.mlp()
    self.attention_norm, self.cross_norm, self.mlp_norm = c.norm(), c.norm(), c.norm()

  def __call__(self, x_BTD: Array, positions_BT: Array, cache: Cache, bias: Callable | None) -> tuple[Array, Cache]:
    arrange = self.stack.arrange

    def attend(x: Array | Normed, residual: Array) -> Array:
      nonlocal cache
      seen_BTD, cache = self.attention(x, positions_BT, cache, residual, bias)
      return seen_BTD

    with jax.named_scope("attention"):
      x_BTD = arrange(self.attention_norm, attend, x_BTD)
    with jax.named_scope("cross"):
      x_BTD = arrange(self.cross_norm, lambda x, to: self.cross(x, positions_BT, cache, to), x_BTD)
    with jax.named_scope("mlp"):
      return arrange(self.mlp_norm, self.mlp, x_BTD), cache

  def keep(self, features_BSD: Array, positions_BS: Array, cache: Cache) -> Cache:
    return self.cross.keep(features_BSD, positions_BS, cache)


class Cross(nn.Module):
  """Attention of what is written to what was read. index: of its layer in the cache."""

  stack: Stack
  index: int

  def setup(self) -> None:
    self.q, self.k, self.v = (_inward(self.stack) for _ in range(3))
    self.o = _outward(self.stack)

  def __call__(self, x: Array | Normed, positions_BT: Array, cache: Cache, residual: Array) -> Array:
    (q_BTD,) = linears(x, [self.q()])
    from_BT = jnp.where(positions_BT >= 0, _AFTER_ALL, NONE)
    query = Query(_by_head(self.stack, q_BTD), from_BT, self.stack.scale)
    seen_BTNH, _ = cache.layer(self.index).attend(query)
    return linear(_flat(seen_BTNH), *self.o(), residual)

  def keep(self, features_BSD: Array, positions_BS: Array, cache: Cache) -> Cache:
    k_BSNH, v_BSNH = (_by_head(self.stack, part) for part in linears(features_BSD, [self.k(), self.v()]))
    return cache.with_layer(self.index, cache.layer(self.index).append(positions_BS, k_BSNH, v_BSNH))


class Learned(nn.Module):
  """A vector for each position. offset: rows of the table before that of position 0."""

  width: int
  size: int
  offset: int

  @nn.compact
  def __call__(self, positions_BT: Array) -> Array:
    table_PD = blocks.Embedding(self.size + self.offset, self.width, name="table")()
    return blocks.take_rows(table_PD, positions_BT + self.offset, jnp.float32)


class Sinusoid(nn.Module):
  """Sines of all frequencies, then cosines (Vaswani et al. 2017, section 3.5, in another order of features).

  steps: frequencies lie between 1 and 1/10000 in so many steps. offset: added to positions. Angles are sums of two
  table entries, since float32 would round the product of a late position by more than features may differ.
  """

  width: int
  steps: int
  offset: int = 0

  @nn.compact
  def __call__(self, positions_BT: Array) -> Array:
    half = self.width // 2
    frequencies_h = 10000.0 ** (-np.arange(half) / self.steps)
    fine_Ph = np.arange(_FINE)[:, None] * frequencies_h
    at_BT = jnp.maximum(positions_BT, 0) + self.offset
    sine, cosine = _sine_cosine(fine_Ph * _FINE, at_BT // _FINE)
    sine_rest, cosine_rest = _sine_cosine(fine_Ph, at_BT % _FINE)
    sines, cosines = sine * cosine_rest + cosine * sine_rest, cosine * cosine_rest - sine * sine_rest
    return jnp.concatenate([sines, cosines], axis=-1)


_FINE = 128  # positions up to its square are exact


def _sine_cosine(angles_Ph: np.ndarray, index_BT: Array) -> tuple[Array, Array]:
  return tuple(jnp.asarray(table(angles_Ph), jnp.float32)[index_BT] for table in (np.sin, np.cos))


def _inward(c: Stack, **name: str) -> blocks.Linear:
  return blocks.Linear(c.heads * c.head_dim, c.width, c.bias, **name)


def _outward(c: Stack, **name: str) -> blocks.Linear:
  return blocks.Linear(c.width, c.heads * c.head_dim, c.bias, **name)


def _by_head(c: Stack, x: Array) -> Array:
  return x.reshape(*x.shape[:2], c.heads, c.head_dim)


def _flat(x_BTNH: Array) -> Array:
  return x_BTNH.reshape(*x_BTNH.shape[:2], -1)


def sizes(config: Mapping[str, Any], *names: str) -> dict[str, int]:
  """Fields of a config.json that are positive integers. ValueError naming the one that is not."""
  for name in names:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise ValueError(f"config field {name!r} must be a positive integer, got {value!r}; check config.json")
  return {name: config[name] for name in names}


def activation(name: str) -> str:
  """The name, if it is that of a known function, else ValueError."""
  if name not in blocks.ACTIVATIONS:
    raise ValueError(f"unknown activation {name!r}; known are {', '.join(sorted(blocks.ACTIVATIONS))}")
  return name
