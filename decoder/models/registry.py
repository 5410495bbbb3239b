"""From a config.json to a network: one line an architecture."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from decoder.cache import LayerSpec, allocate
from decoder.models.llama import Llama, LlamaConfig
from decoder.types import Array, Model

ARCHITECTURES = {
  "llama": (LlamaConfig.from_dict, Llama),
  "mistral": (LlamaConfig.from_dict, Llama),
  "qwen2": (LlamaConfig.from_dict, Llama),
}


class Network(NamedTuple):
  """A built model: `model` is what strategies take, `cache_spec` what `cache.allocate` takes, `context` the longest
  sequence it was made for, in tokens; `dtype` the type it computes in."""

  model: Model
  cache_spec: tuple[LayerSpec, ...]
  vocab_size: int
  context: int
  dtype: Any


def build(config: Mapping[str, Any], dtype: Any = jnp.float32) -> Network:
  """The network that a config.json describes. Raises ValueError for an unknown `model_type` or rope type."""
  module = _module(config, dtype)
  module._rope()  # an unknown rope type is refused here, not in the middle of a trace
  spec = module.cache_spec()
  return Network(as_model(module), spec, module.config.vocab_size, module.context(), dtype)


def as_model(module: nn.Module) -> Model:
  """A Linen module with `__call__` and `head` as a Model; parameters are the nested dict alone."""

  def forward(params: Any, tokens_BT: Array, positions_BT: Array, cache: Any) -> tuple[Array, Any]:
    return module.apply({"params": params}, tokens_BT, positions_BT, cache)

  def head(params: Any, features_BD: Array) -> Array:
    return module.apply({"params": params}, features_BD, method=type(module).head)

  return Model(forward, head)


def parameter_shapes(config: Mapping[str, Any], dtype: Any = jnp.float32) -> dict[str, Any]:
  """The nested dict of parameters that the network expects, as jax.ShapeDtypeStruct."""
  return jax.eval_shape(lambda key: initialise(_module(config, dtype), key), jax.random.key(0))


def initialise(module: nn.Module, key: Array) -> dict[str, Any]:
  """Fresh random parameters of a module, for tests, shapes and training."""

  def touch(module: nn.Module, tokens: Array, cache: Any) -> Array:
    features, _ = module(tokens, tokens, cache)
    return module.head(features[:, 0])

  cache = allocate(module.cache_spec(), 1, 1)
  return module.init(key, jnp.zeros((1, 1), jnp.int32), cache, method=touch)["params"]


def _module(config: Mapping[str, Any], dtype: Any) -> nn.Module:
  kind = config.get("model_type")
  if kind not in ARCHITECTURES:
    raise ValueError(f"unknown model_type {kind!r}; this build knows {', '.join(ARCHITECTURES)}")
  configure, module = ARCHITECTURES[kind]
  return module(configure(config), dtype)
