"""Parts that decoder-only transformers share, as Flax Linen modules with the cache as argument and result.

A module is its frozen configuration; weights are [out, in], named as in `checkpoint/mapping.py`.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from decoder.cache import Cache
from decoder.ops.attention import Query
from decoder.ops.linear import linear, linears, look_up, swiglu
from decoder.ops.norm import Normed, layer_norm
from decoder.ops.rope import Rope, rotate
from decoder.types import Array

_init = nn.initializers.normal(0.02)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "swish": jax.nn.silu,
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
  "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "relu": jax.nn.relu,
}


def _weight(module: nn.Module, shape: tuple[int, int]) -> Array:
  """The parameter `weight` in whatever form it came: Flax's own check would look at the shapes of its leaves."""
  given = module.get_variable("params", "weight")
  return given if getattr(given, "shape", None) == shape else module.param("weight", _init, shape)


class Embedding(nn.Module):
  """A table of token vectors."""

  size: int
  features: int

  @nn.compact
  def __call__(self) -> Array:
    """The table [V, D]; callers index it, and a tied head multiplies by it."""
    return _weight(self, (self.size, self.features))


class Linear(nn.Module):
  """The weight and bias of a projection."""

  features: int
  inputs: int
  bias: bool = False

  @nn.compact
  def __call__(self) -> tuple[Array, Array | None]:
    """weight [features, inputs] and bias [features] or None, for `ops.linear`."""
    weight_FD = _weight(self, (self.features, self.inputs))
    return weight_FD, self.param("bias", nn.initializers.zeros, (self.features,)) if self.bias else None


class RMSNorm(nn.Module):
  epsilon: float

  @nn.compact
  def __call__(self, x: Array) -> Normed:
    return Normed(x, self.param("weight", nn.initializers.ones, (x.shape[-1],)), self.epsilon)


class LayerNorm(nn.Module):
  epsilon: float

  @nn.compact
  def __call__(self, x: Array) -> Array:
    size = (x.shape[-1],)
    weight_D, bias_D = self.param("weight", nn.initializers.ones, size), self.param("bias", nn.initializers.zeros, size)
    return layer_norm(x, weight_D, bias_D, self.epsilon)


class Attention(nn.Module):
  """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) over one layer's cache entry.

  rope: None for models without rotary positions. qkv_bias, out_bias: which projections carry a bias. scale: of scores,
  None for head_dim**-0.5.
  """

  index: int
  heads: int
  kv_heads: int
  head_dim: int
  rope: Rope | None = None
  window: int | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  scale: float | None = None

  @nn.compact
  def __call__(
    self, x_BTD: Array | Normed, positions_BT: Array, cache: Cache, residual: Array | None = None,
    bias: Callable | None = None,
  ) -> tuple[Array, Cache]:  # fmt: skip
    """What the tokens take from each other [B, T, D], added to `residual`, and the cache that holds them. bias: of
    scores, as in `Query`."""
    batch, tokens, width = x_BTD.shape
    counts = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
    parts = [Linear(n * self.head_dim, width, self.qkv_bias, name=name)() for name, n in counts.items()]
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(batch, tokens, -1, self.head_dim) for x in linears(x_BTD, parts))
    turn = None
    if self.rope is not None:

      def turn(x: Array, positions: Array) -> Array:
        return rotate(x, positions, self.rope, cache.extent_B)

    entry = cache.layer(self.index).append(positions_BT, k_BTKH, v_BTKH, turn)
    scale = self.head_dim**-0.5 if self.scale is None else self.scale
    query = Query(q_BTNH, positions_BT, scale, window=self.window, rotate=turn, bias=bias)
    with jax.named_scope("attend"):
      seen_BTNH, entry = entry.attend(query)
    out = Linear(width, self.heads * self.head_dim, self.out_bias, name="o")()
    return linear(seen_BTNH.reshape(batch, tokens, -1), *out, residual), cache.with_layer(self.index, entry)


class GatedMLP(nn.Module):
  """down(act(gate(x)) · up(x)); with silu, SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

  hidden: int
  activation: str = "silu"
  bias: bool = False

  @nn.compact
  def __call__(self, x: Array | Normed, residual: Array | None = None) -> Array:
    width = x.shape[-1]
    gate, up = (Linear(self.hidden, width, self.bias, name=name)() for name in ("gate", "up"))
    down = Linear(width, self.hidden, self.bias, name="down")()
    activation = ACTIVATIONS[self.activation]
    if activation is jax.nn.silu and not self.bias:
      return linear(swiglu(x, gate[0], up[0]), *down, residual)
    gated, raised = linears(x, (gate, up))
    return linear(activation(gated) * raised, *down, residual)


class MLP(nn.Module):
  """down(act(up(x)))."""

  hidden: int
  activation: str = "relu"
  bias: bool = True

  @nn.compact
  def __call__(self, x: Array | Normed, residual: Array | None = None) -> Array:
    width = x.shape[-1]
    up = Linear(self.hidden, width, self.bias, name="up")()
    down = Linear(width, self.hidden, self.bias, name="down")()
    (raised,) = linears(x, (up,))
    return linear(ACTIVATIONS[self.activation](raised), *down, residual)


def take_rows(table_VD: Array, tokens_BT: Array, dtype: jnp.dtype) -> Array:
  """Token vectors [B, T, D] in the compute type. Ids are clipped: padding may hold any id."""
  return look_up(table_VD, tokens_BT).astype(dtype)
