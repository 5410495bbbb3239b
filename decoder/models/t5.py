"""T5 (Raffel et al. 2020, arXiv:1910.10683), T5 v1.1, Flan-T5 (arXiv:2210.11416) and mT5 (arXiv:2010.11934).

Positions are known by their distance alone: scores get a learned bias for each bucket of distances.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from decoder.models import blocks
from decoder.models.seq2seq import Recipe, Stack, activation, norm_first, sizes
from decoder.ops.linear import look_up
from decoder.types import Array


def recipe(config: Mapping[str, Any]) -> Recipe:
  """From a config.json. Raises ValueError naming a missing or impossible field."""
  need = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
  width, head_dim, hidden, layers, heads = list(sizes(config, *need).values())[1:]
  decoder_layers = config.get("num_decoder_layers") or layers
  # transformers 5 says tie_word_embeddings of every T5, and by this other field whether it was so. mT5 never was.
  tied = config["model_type"] == "t5" and config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
  norm = functools.partial(blocks.RMSNorm, float(config.get("layer_norm_epsilon", 1e-6)))
  buckets, farthest = (
    config.get(f"relative_attention_{name}") or default
    for name, default in (("num_buckets", 32), ("max_distance", 128))
  )

  def stack(layers: int, both_ways: bool) -> Stack:
    relative = functools.partial(Relative, heads, buckets, farthest, both_ways)
    return Stack(
      layers, width, heads, head_dim, 1.0, False, _mlp(config, hidden), norm, norm_first,
      relative=relative, last_norm=norm,
    )  # fmt: skip

  return Recipe(
    config["vocab_size"], width, config.get("n_positions") or 512, stack(layers, True), stack(decoder_layers, False),
    tied=bool(tied), head_scale=width**-0.5 if tied else 1.0,
  )  # fmt: skip


def _mlp(config: Mapping[str, Any], hidden: int) -> Callable:
  ways = {"t5": "relu", "mt5": "gated-gelu"}
  *gated, name = config.get("feed_forward_proj", ways[config["model_type"]]).split("-")
  if gated not in ([], ["gated"]):
    raise ValueError(f"unknown feed_forward_proj {config['feed_forward_proj']!r}; wanted an activation or gated-one")
  name = activation("gelu_new" if gated and name == "gelu" else name)
  return functools.partial(blocks.GatedMLP if gated else blocks.MLP, hidden, name, False)


class Relative(nn.Module):
  """() -> the bias of scores, as in `Query`. both_ways: whether tokens after the query have buckets of their own."""

  heads: int
  buckets: int
  farthest: int
  both_ways: bool

  @nn.compact
  def __call__(self) -> Callable:
    table_PN = blocks.Embedding(self.buckets, self.heads, name="table")()
    bucket_R = bucket_of_distances(self.buckets, self.farthest, self.both_ways)
    by_distance_RN = look_up(table_PN, jnp.asarray(bucket_R)).astype(jnp.float32)  # f32: as scores are
    return jax.tree_util.Partial(_bias, by_distance_RN)


def _bias(by_distance_RN: Array, positions_BT: Array, kv_positions: Array) -> Array:
  """by_distance_RN: for distances −farthest … farthest, and for what is farther, the ends."""
  farthest = by_distance_RN.shape[0] // 2
  kv = kv_positions if kv_positions.ndim == 3 else kv_positions[:, None]
  distance_BTS = jnp.clip(kv - positions_BT[:, :, None], -farthest, farthest)
  return jnp.moveaxis(by_distance_RN[distance_BTS + farthest], -1, 1)


def bucket_of_distances(buckets: int, farthest: int, both_ways: bool) -> np.ndarray:
  """The bucket of each distance key − query, −farthest … farthest, int32: half of them for one distance each, the rest
  logarithmic."""
  distance_R = np.arange(-farthest, farthest + 1)
  side = buckets // 2 if both_ways else buckets
  after_R = side * (distance_R > 0) if both_ways else 0
  away_R = np.abs(distance_R) if both_ways else np.maximum(-distance_R, 0)
  exact = side // 2
  # f32: buckets border where the published models' own arithmetic puts them
  log_R = np.log(np.maximum(away_R, 1).astype(np.float32) / np.float32(exact))
  far_R = exact + (log_R / np.float32(math.log(farthest / exact)) * np.float32(side - exact)).astype(np.int32)
  return (after_R + np.where(away_R < exact, away_R, np.minimum(far_R, side - 1))).astype(np.int32)
