"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a Llama with several MLPs a layer, a few of which read each token.

Also Mistral's 8x22B. The network is `llama.Llama`, which asks its config for a layer's MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from decoder.models import blocks
from decoder.models.llama import LlamaConfig, positive
from decoder.ops import moe
from decoder.ops.norm import Normed
from decoder.types import Array

# What transformers takes a missing field for, where that is not what it is for a Llama.
_MISSING = {
  "num_key_value_heads": 8,
  "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e6,
  "num_local_experts": 8,
  "num_experts_per_tok": 2,
}


@dataclasses.dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
  """A Llama's fields, of which `intermediate_size` is one expert's, and the experts', as published."""

  num_local_experts: int = 8
  num_experts_per_tok: int = 2

  def mlp(self) -> nn.Module:
    return MixtureOfExperts(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size, name="mlp")

  @classmethod
  def from_dict(cls, config: Mapping[str, Any]) -> "MixtralConfig":
    """From a config.json. Raises ValueError naming a missing or impossible field."""
    config = {**_MISSING, **config}
    experts, chosen = (positive(config, name, config[name]) for name in ("num_local_experts", "num_experts_per_tok"))
    if chosen > experts:
      raise ValueError(f"num_experts_per_tok {chosen} is more than num_local_experts {experts}; check config.json")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
      raise ValueError(f"hidden_act of experts is silu, got {config['hidden_act']!r}; check config.json")
    llama = super().from_dict(config)
    return dataclasses.replace(llama, num_local_experts=experts, num_experts_per_tok=chosen)


class MixtureOfExperts(nn.Module):
  """Of `number` gated MLPs, the `chosen` that a router names for each token, see `ops.moe`."""

  number: int
  chosen: int
  hidden: int

  @nn.compact
  def __call__(self, x_BTD: Normed, residual_BTD: Array) -> Array:
    width = x_BTD.shape[-1]
    router_ED, _ = blocks.Linear(self.number, width, name="router")()
    experts = Experts(self.number, self.hidden, width, name="experts")()
    return moe.mixture(x_BTD.array(), router_ED, experts, self.chosen, residual_BTD)


class Experts(nn.Module):
  """The weights of gated MLPs, one after the other."""

  number: int
  hidden: int
  width: int

  @nn.compact
  def __call__(self) -> moe.Experts:
    inner, outer = self.number * self.hidden, self.number * self.width
    shapes = {"gate": (inner, self.width), "up": (inner, self.width), "down": (outer, self.hidden)}
    return moe.Experts(**{name: blocks.Linear(*shape, name=name)()[0] for name, shape in shapes.items()})
