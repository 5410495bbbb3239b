"""A head that drafts: one decoder layer over a model's features (EAGLE, Li et al. 2024, arXiv:2401.15077).

From the vector of a token and the model's features of the token before it, it says what the model's features of this
token will be. Both are normed before they are joined (as in EAGLE-3, arXiv:2503.01840). Token vectors are the model's
own, and so is the table that makes logits of features, of which it has the rows of frequent tokens only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from decoder.cache import Cache, LayerSpec
from decoder.models import blocks
from decoder.models.llama import Layer, LlamaConfig
from decoder.ops.linear import linear
from decoder.types import Array


class DraftHead(nn.Module):
  """(vectors_BTD of tokens, features_BTD of those before them, positions_BT, cache) -> (features_BTD, cache).

  config: of the layer, whose sizes are the model's.
  """

  config: LlamaConfig
  dtype: Any

  @nn.compact
  def __call__(self, vectors_BTD: Array, features_BTD: Array, positions_BT: Array, cache: Cache) -> tuple[Array, Cache]:
    c = self.config
    cache = cache.claim(positions_BT)
    parts = {"vectors": vectors_BTD, "features": features_BTD}
    normed = [blocks.RMSNorm(c.rms_norm_eps, name=f"{name}_norm")(x).array() for name, x in parts.items()]
    joined_BTD = jnp.concatenate(normed, axis=-1).astype(self.dtype)
    x_BTD = linear(joined_BTD, *blocks.Linear(c.hidden_size, 2 * c.hidden_size, name="join")())
    x_BTD, cache = Layer(c, 0, c.rope(), name="layers_0")(x_BTD, positions_BT, cache)
    return blocks.RMSNorm(c.rms_norm_eps, name="norm")(x_BTD).array(), cache

  def cache_spec(self) -> tuple[LayerSpec, ...]:
    """What its cache stores: one layer."""
    c = self.config
    return (LayerSpec("global", c.num_key_value_heads, c.head_dim),)


def head_config(model: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
  """The config.json of a head for the model of that config.json. tokens: the ids that it drafts, ascending."""
  kept = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
  )  # fmt: skip
  own = {"model_type": "draft_head", "num_hidden_layers": 1, "tie_word_embeddings": True, "draft_tokens": [*tokens]}
  return {**{name: model[name] for name in kept if model.get(name) is not None}, **own}
