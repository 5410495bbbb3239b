"""Tiny random encoder–decoders of each family, and their checkpoints: nothing to download."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from decoder.checkpoint import Checkpoint
from decoder.models import registry
from decoder.translator import Translator

V, D = 64, 32
T5 = {
  "model_type": "t5", "vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
  "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
  "eos_token_id": 1,
}  # fmt: skip
BART = {
  "model_type": "bart", "vocab_size": V, "d_model": D, "encoder_layers": 2, "decoder_layers": 2,
  "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
  "max_position_embeddings": 64, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
CONFIGS = {
  "t5": T5,
  "flan": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
  "bart": BART,
  "marian": {
    **BART,
    "model_type": "marian",
    "scale_embedding": True,
    "tie_word_embeddings": False,
    "activation_function": "swish",
  },
  "nllb": {
    **BART,
    "model_type": "m2m_100",
    "scale_embedding": True,
    "tie_word_embeddings": False,
    "activation_function": "relu",
  },
}


@functools.cache
def tiny(name):
  """(network, params) of a family, its weights large enough that texts are lively."""
  network, rng = registry.build(CONFIGS[name]), np.random.default_rng(3)

  def values(path, leaf):
    drawn, norm = rng.normal(size=leaf.shape) * 0.4, leaf.ndim == 1 and "weight" in jax.tree_util.keystr(path)
    return jnp.asarray(1 + drawn if norm else drawn, jnp.float32)

  return network, jax.tree_util.tree_map_with_path(values, registry.parameter_shapes(CONFIGS[name]))


@functools.cache
def translator(name="marian", tokenizer=None, generation="{}"):
  """The same behind the façade. generation: JSON of a generation_config."""
  _, params = tiny(name)
  checkpoint = Checkpoint("tiny", CONFIGS[name], json.loads(generation), tokenizer, params, Path())
  return Translator(checkpoint, jnp.dtype("float32"))


def padded(rows, width=16):
  """Tokens and positions of sources."""
  tokens, positions = (np.full((len(rows), width), value, np.int32) for value in (0, -1))
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
  return jnp.asarray(tokens), jnp.asarray(positions)


def sources(*lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(3, V, length).tolist() for length in lengths]
