"""The Llama family (Touvron et al. 2023, arXiv:2302.13971; 2307.09288; Grattafiori et al. 2024, arXiv:2407.21783).

Also what differs from it by a bias or a window: Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671), SmolLM2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from decoder.cache import Cache, LayerSpec
from decoder.models import blocks
from decoder.ops.linear import linear
from decoder.ops.rope import Rope, rope
from decoder.types import Array


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
  """Fields of the published config.json, under their names there. `qkv_bias` and `window_layers` say what a
  `model_type` implies without a field of its own."""

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  max_position_embeddings: int
  rms_norm_eps: float
  rope_parameters: Mapping[str, Any]
  hidden_act: str = "silu"
  attention_bias: bool = False
  qkv_bias: bool = False
  mlp_bias: bool = False
  tie_word_embeddings: bool = False
  windows: tuple[int | None, ...] = ()  # by layer

  def __post_init__(self) -> None:
    self.rope()  # an unknown rope type is refused here, not in the middle of a trace

  def rope(self) -> Rope:
    return rope(self.rope_parameters, self.head_dim, self.max_position_embeddings)

  def mlp(self) -> nn.Module:
    """A layer's MLP, (normed x_BTD, residual_BTD) -> x_BTD; what families may differ in."""
    return blocks.GatedMLP(self.intermediate_size, self.hidden_act, self.mlp_bias, name="mlp")

  @classmethod
  def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
    """From a config.json. Raises ValueError naming a missing or impossible field."""
    need = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {}
    for name in need:
      sizes[name] = positive(config, name, config.get(name))
    heads = sizes["num_attention_heads"]
    kv_heads = positive(config, "num_key_value_heads", config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
      raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    act = config.get("hidden_act", "silu")
    if act not in blocks.ACTIVATIONS:
      raise ValueError(f"unknown hidden_act {act!r}; known are {', '.join(sorted(blocks.ACTIVATIONS))}")
    bias = bool(config.get("attention_bias", False))
    return cls(
      **sizes,
      num_key_value_heads=kv_heads,
      head_dim=positive(config, "head_dim", config.get("head_dim") or sizes["hidden_size"] // heads),
      max_position_embeddings=positive(config, "max_position_embeddings", config.get("max_position_embeddings", 2048)),
      rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
      rope_parameters=rope_parameters(config),
      hidden_act=act,
      attention_bias=bias,
      qkv_bias=bias or config["model_type"] == "qwen2",
      mlp_bias=bool(config.get("mlp_bias", False)),
      tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
      windows=_windows(config, sizes["num_hidden_layers"]),
    )


class Llama(nn.Module):
  """(tokens_BT, positions_BT, cache) -> (features_BTD after the last norm, cache)."""

  config: LlamaConfig
  dtype: Any

  def setup(self) -> None:
    c = self.config
    self.embed = blocks.Embedding(c.vocab_size, c.hidden_size)
    self.layers = [Layer(c, i, c.rope(), name=f"layers_{i}") for i in range(c.num_hidden_layers)]
    self.norm = blocks.RMSNorm(c.rms_norm_eps)
    self.head_table = self.embed
    if not c.tie_word_embeddings:
      self.head_table = blocks.Embedding(c.vocab_size, c.hidden_size, name="head")

  def __call__(self, tokens_BT: Array, positions_BT: Array, cache: Cache) -> tuple[Array, Cache]:
    cache = cache.claim(positions_BT)
    x_BTD = blocks.take_rows(self.embed(), tokens_BT, self.dtype)
    for layer in self.layers:
      x_BTD, cache = layer(x_BTD, positions_BT, cache)
    return self.norm(x_BTD).array(), cache

  def head(self, features_BD: Array) -> Array:
    """logits_BV."""
    return linear(features_BD, self.head_table())

  def cache_spec(self) -> tuple[LayerSpec, ...]:
    """What the cache stores for each layer."""
    c = self.config
    return tuple(LayerSpec("global" if w is None else "local", c.num_key_value_heads, c.head_dim, w) for w in c.windows)

  def context(self) -> int:
    """The longest sequence, in tokens, that it was made for."""
    c = self.config
    stretched = (
      c.rope_parameters["rope_type"] == "dynamic" and "original_max_position_embeddings" not in c.rope_parameters
    )
    return int(c.max_position_embeddings * (c.rope_parameters["factor"] if stretched else 1))


class Layer(nn.Module):
  """Pre-norm attention and the MLP of the config, each added to the residual stream."""

  config: LlamaConfig
  index: int
  rope: Rope

  @nn.compact
  def __call__(self, x_BTD: Array, positions_BT: Array, cache: Cache) -> tuple[Array, Cache]:
    c = self.config
    attention = blocks.Attention(
      self.index, c.num_attention_heads, c.num_key_value_heads, c.head_dim, self.rope,
      window=c.windows[self.index], qkv_bias=c.qkv_bias, out_bias=c.attention_bias, name="attention",
    )  # fmt: skip
    with jax.named_scope("attention"):
      normed = blocks.RMSNorm(c.rms_norm_eps, name="attention_norm")(x_BTD)
      x_BTD, cache = attention(normed, positions_BT, cache, x_BTD)
    with jax.named_scope("mlp"):
      normed = blocks.RMSNorm(c.rms_norm_eps, name="mlp_norm")(x_BTD)
      return c.mlp()(normed, x_BTD), cache


def tables(params: Mapping[str, Any]) -> tuple[Any, Any]:
  """(vectors_VD of tokens, logits_VD that makes logits of features), of a Llama's parameters."""
  return params["embed"]["weight"], params.get("head", params["embed"])["weight"]


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
  """`rope_parameters` as transformers 5 writes them, from either spelling of config.json."""
  merged = {"rope_theta": config.get("rope_theta", 10000.0)}
  if config.get("partial_rotary_factor") is not None:
    merged["partial_rotary_factor"] = config["partial_rotary_factor"]
  merged |= {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
  if config.get("original_max_position_embeddings") is not None:  # outside, as Phi-3 has it, wins
    merged["original_max_position_embeddings"] = config["original_max_position_embeddings"]
  kind = merged.pop("type", "default")  # the oldest spelling
  return {"rope_type": kind, **merged}


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
  """Each layer's window. What a missing field means is the published default of its `model_type`."""
  kind, window, kinds = config["model_type"], config.get("sliding_window"), config.get("layer_types")
  if kind == "mistral" and "sliding_window" not in config:
    window = 4096
  if window is None or kind == "llama" or not config.get("use_sliding_window", kind != "qwen2"):
    return (None,) * layers
  if kind == "qwen2" and not kinds:
    full = config.get("max_window_layers", 28)  # the first layers of Qwen2 look at everything
    return tuple(None if i < full else window for i in range(layers))
  kinds = kinds or ["sliding_attention"] * layers
  return tuple(window if layer == "sliding_attention" else None for layer in kinds)


def positive(config: Mapping[str, Any], name: str, value: Any) -> int:
  """The value of a config's field that must be an integer above 0. Raises ValueError naming the field."""
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise ValueError(f"config field {name!r} must be a positive integer, got {value!r}; check config.json")
  return value
