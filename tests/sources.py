"""Tiny random encoder–decoders of each family, and their checkpoints: nothing to download."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from decoder.checkpoint import Checkpoint
from decoder.checkpoint.mapping import flatten
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


_THEIRS = {
  "attention": "self_attn", "cross": "encoder_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj",
  "up": "fc1", "down": "fc2", "attention_norm": "self_attn_layer_norm", "cross_norm": "encoder_attn_layer_norm",
  "mlp_norm": "final_layer_norm", "mlp": None, "layers_0": "layers.0", "layers_1": "layers.1",
}  # fmt: skip
_WHOLE = {
  "embed.weight": "model.shared.weight",
  "head.weight": "lm_head.weight",
  "logits_bias.bias": "final_logits_bias",
}


def marian_directory(directory: Path, files: dict[str, bytes]) -> Path:
  """A tiny random Marian as published, with these tokenizer files."""
  vocabulary = json.loads(files["vocab.json"])
  ends = {"eos_token_id": vocabulary["</s>"], "pad_token_id": vocabulary["<pad>"]}
  config = {**CONFIGS["marian"], **ends, "decoder_start_token_id": vocabulary["<pad>"], "vocab_size": len(vocabulary)}
  rng, weights = np.random.default_rng(5), {}
  for path, leaf in flatten(registry.parameter_shapes(config)).items():
    parts = [_THEIRS.get(part, part) for part in path.split("/")]
    name = ".".join(part for part in parts if part)
    drawn = rng.normal(size=leaf.shape).astype(np.float32) * 0.4
    norm = leaf.ndim == 1 and name.endswith("weight")
    weights[_WHOLE.get(name, f"model.{name}")] = 1 + drawn if norm else drawn
  save_file(weights, directory / "model.safetensors")
  for name, data in {**files, "config.json": json.dumps(config).encode()}.items():
    (directory / name).write_bytes(data)
  return directory


def padded(rows, width=16):
  """Tokens and positions of sources."""
  tokens, positions = (np.full((len(rows), width), value, np.int32) for value in (0, -1))
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
  return jnp.asarray(tokens), jnp.asarray(positions)


def sources(*lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(3, V, length).tolist() for length in lengths]
