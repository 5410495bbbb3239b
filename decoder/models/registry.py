"""From a config.json to a network: one line an architecture."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from decoder.cache import LayerSpec, allocate
from decoder.models import bart, llama, t5
from decoder.models.draft_head import DraftHead
from decoder.models.llama import Llama, LlamaConfig
from decoder.models.mixtral import MixtralConfig
from decoder.models.seq2seq import Seq2Seq
from decoder.types import Array, Model

ARCHITECTURES = {
  "llama": (LlamaConfig.from_dict, Llama),
  "mistral": (LlamaConfig.from_dict, Llama),
  "qwen2": (LlamaConfig.from_dict, Llama),
  "mixtral": (MixtralConfig.from_dict, Llama),
  "t5": (t5.recipe, Seq2Seq),
  "mt5": (t5.recipe, Seq2Seq),
  "bart": (bart.bart, Seq2Seq),
  "marian": (bart.marian, Seq2Seq),
  "m2m_100": (bart.m2m_100, Seq2Seq),
}


HEADS = {"draft_head": (LlamaConfig.from_dict, DraftHead)}  # trained beside a model, and none by themselves


class Network(NamedTuple):
  """A built model: `model` is what strategies take, `cache_spec` what `cache.allocate` takes, `context` the longest
  sequence it was made for, in tokens; `dtype` the type it computes in. encode: of an encoder–decoder, (params,
  tokens_BS, positions_BS, cache) -> cache, which writes what the model looks at while it decodes; else None. tables: of
  what a draft head can follow, (params) -> (vectors_VD of tokens, logits_VD that makes logits of features)."""

  model: Model
  cache_spec: tuple[LayerSpec, ...]
  vocab_size: int
  context: int
  dtype: Any
  encode: Callable | None = None
  tables: Callable | None = None


def build(config: Mapping[str, Any], dtype: Any = jnp.float32) -> Network:
  """The network that a config.json describes. Raises ValueError for an unknown `model_type` or rope type."""
  if config.get("model_type") in HEADS:
    raise ValueError("this is a head that drafts for a model, no model; name it as speculate='head:…' of that model")
  module = _module(config, dtype)
  shapes = (as_model(module), module.cache_spec(), module.config.vocab_size, module.context(), dtype)
  encode = _encode(module) if isinstance(module, Seq2Seq) else None
  return Network(*shapes, encode, llama.tables if isinstance(module, Llama) else None)


def draft_head(config: Mapping[str, Any], dtype: Any = jnp.float32) -> tuple[Callable, tuple[LayerSpec, ...]]:
  """(forward, cache_spec) of the head that a config.json describes; forward: (params, vectors_BTD, features_BTD,
  positions_BT, cache) -> (features_BTD, cache), see `draft_head.DraftHead`."""
  module = _module(config, dtype)

  def forward(params: Any, *inputs: Any) -> tuple[Array, Any]:
    return module.apply({"params": params}, *inputs)

  return forward, module.cache_spec()


def feature_size(network: Network, params: Any) -> int:
  """How many features the model has of a token."""
  token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  cache = jax.eval_shape(lambda: allocate(network.cache_spec, 1, 1))
  return jax.eval_shape(network.model.forward, params, token, token, cache)[0].shape[-1]


def has_encoder(config: Mapping[str, Any]) -> bool:
  """Whether a config.json describes an encoder–decoder."""
  return ARCHITECTURES.get(config.get("model_type"), (None, None))[1] is Seq2Seq


def as_model(module: nn.Module) -> Model:
  """A Linen module with `__call__` and `head` as a Model; parameters are the nested dict alone."""

  def forward(params: Any, tokens_BT: Array, positions_BT: Array, cache: Any) -> tuple[Array, Any]:
    return module.apply({"params": params}, tokens_BT, positions_BT, cache)

  def head(params: Any, features_BD: Array) -> Array:
    return module.apply({"params": params}, features_BD, method=type(module).head)

  return Model(forward, head)


def _encode(module: nn.Module) -> Callable:
  def encode(params: Any, tokens_BS: Array, positions_BS: Array, cache: Any) -> Any:
    return module.apply({"params": params}, tokens_BS, positions_BS, cache, method=type(module).encode)

  return encode


def parameter_shapes(config: Mapping[str, Any], dtype: Any = jnp.float32) -> dict[str, Any]:
  """The nested dict of parameters that the network expects, as jax.ShapeDtypeStruct."""
  return jax.eval_shape(lambda key: initialise(_module(config, dtype), key), jax.random.key(0))


def fresh(config: Mapping[str, Any], key: Array) -> dict[str, Any]:
  """Random float32 parameters of the network that a config.json describes, to be trained."""
  return initialise(_module(config, jnp.float32), key)


def initialise(module: nn.Module, key: Array) -> dict[str, Any]:
  """Fresh random parameters of a module, for tests, shapes and training."""

  def touch(module: nn.Module, tokens: Array, cache: Any) -> Array:
    cache = module.encode(tokens, tokens, cache) if isinstance(module, Seq2Seq) else cache
    features, _ = module(tokens, tokens, cache)
    return module.head(features[:, 0])

  cache, token = allocate(module.cache_spec(), 1, 1), jnp.zeros((1, 1), jnp.int32)
  if isinstance(module, DraftHead):
    vector = jnp.zeros((1, 1, module.config.hidden_size))
    return module.init(key, vector, vector, token, cache)["params"]
  return module.init(key, token, cache, method=touch)["params"]


def _module(config: Mapping[str, Any], dtype: Any) -> nn.Module:
  kind, known = config.get("model_type"), ARCHITECTURES | HEADS
  if kind not in known:
    raise ValueError(f"unknown model_type {kind!r}; this build knows {', '.join(known)}")
  configure, module = known[kind]
  return module(configure(config), dtype)
