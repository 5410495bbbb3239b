"""BART (Lewis et al. 2020, arXiv:1910.13461), and what has its parts: Marian (Junczys-Dowmunt et al. 2018,
arXiv:1804.00344), as of OPUS-MT; M2M-100 (Fan et al. 2020, arXiv:2010.11125) and NLLB-200 (arXiv:2207.04672)."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from decoder.models import blocks
from decoder.models.seq2seq import Learned, Recipe, Sinusoid, Stack, activation, norm_first, norm_last, sizes

_EPSILON = 1e-5  # of all their norms; no config says it
_NORM = functools.partial(blocks.LayerNorm, _EPSILON)


def bart(config: Mapping[str, Any]) -> Recipe:
  """Learned positions, two rows of the table unused; a norm after the token vectors and after each part."""
  width, context = sizes(config, "d_model", "max_position_embeddings").values()
  positions = functools.partial(Learned, width, context, 2)
  return _recipe(config, norm_last, positions, embed_norm=_NORM)


def marian(config: Mapping[str, Any]) -> Recipe:
  """Sinusoidal positions; a norm after each part. ValueError for a model of two vocabularies."""
  size = config.get("decoder_vocab_size") or config.get("vocab_size")
  if not config.get("share_encoder_decoder_embeddings", True) or size != config.get("vocab_size"):
    raise ValueError(
      "config: share_encoder_decoder_embeddings false, or a decoder_vocab_size of its own, is a model of two "
      "vocabularies, which is not supported; choose one that shares them"
    )
  width = sizes(config, "d_model")["d_model"]
  return _recipe(config, norm_last, functools.partial(Sinusoid, width, width // 2))


def m2m_100(config: Mapping[str, Any]) -> Recipe:
  """Sinusoidal positions that begin after the padding's; a norm before each part and at the end."""
  width = sizes(config, "d_model")["d_model"]
  positions = functools.partial(Sinusoid, width, width // 2 - 1, config.get("pad_token_id", 1) + 1)
  return _recipe(config, norm_first, positions, last_norm=_NORM)


def _recipe(config: Mapping[str, Any], arrange: Callable, positions: Callable, **norms: Callable) -> Recipe:
  need = sizes(config, "vocab_size", "d_model", "max_position_embeddings")
  vocab_size, width, context = need.values()
  act = activation(config.get("activation_function", "gelu"))

  def stack(half: str) -> Stack:
    named = (f"{half}_{name}" for name in ("layers", "attention_heads", "ffn_dim"))
    layers, heads, hidden = sizes(config, *named).values()
    if width % heads:
      raise ValueError(f"d_model {width} is not a multiple of {half}_attention_heads {heads}; check config.json")
    head_dim = width // heads
    mlp = functools.partial(blocks.MLP, hidden, act, True)
    return Stack(
      layers, width, heads, head_dim, head_dim**-0.5, True, mlp, _NORM, arrange, positions=positions, **norms
    )

  return Recipe(
    vocab_size, width, context, stack("encoder"), stack("decoder"),
    tied=bool(config.get("tie_word_embeddings", True)),
    embed_scale=math.sqrt(width) if config.get("scale_embedding", False) else 1.0,
    logits_bias=config["model_type"] != "m2m_100",
  )  # fmt: skip
