"""A tiny random model, written in every format that the library reads."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

LAYER = {
  "input_layernorm": ("attn_norm", "D"),
  "self_attn.q_proj": ("attn_q", "QD"),
  "self_attn.k_proj": ("attn_k", "KD"),
  "self_attn.v_proj": ("attn_v", "KD"),
  "self_attn.o_proj": ("attn_output", "DQ"),
  "post_attention_layernorm": ("ffn_norm", "D"),
  "mlp.gate_proj": ("ffn_gate", "FD"),
  "mlp.up_proj": ("ffn_up", "FD"),
  "mlp.down_proj": ("ffn_down", "DF"),
}
TOP = {"model.embed_tokens": ("token_embd", "VD"), "model.norm": ("output_norm", "D"), "lm_head": ("output", "VD")}


class Tiny:
  """Configs, weights under published names, and writers. GQA with 8 query and 2 key/value heads."""

  def config(self, **changes) -> dict:
    config = {
      "model_type": "llama",
      "hidden_size": 256,
      "intermediate_size": 512,
      "num_hidden_layers": 2,
      "num_attention_heads": 8,
      "num_key_value_heads": 2,
      "head_dim": 32,
      "hidden_act": "silu",
      "max_position_embeddings": 64,
      "rms_norm_eps": 1e-5,
      "rope_theta": 10000.0,
      "rope_scaling": None,
      "vocab_size": 96,
      "tie_word_embeddings": False,
      "attention_bias": False,
      "mlp_bias": False,
    }
    return config | changes

  def names(self, config: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Published name -> (GGUF name, shape), for every tensor that the config calls for, but those of experts."""
    heads = {"Q": config["num_attention_heads"], "K": config["num_key_value_heads"]}
    axes = {letter: count * config["head_dim"] for letter, count in heads.items()}
    axes |= {"D": config["hidden_size"], "F": config["intermediate_size"], "V": config["vocab_size"]}
    table = {name: value for name, value in TOP.items() if name != "lm_head" or not config["tie_word_embeddings"]}
    layer = {name: value for name, value in LAYER.items() if "mlp" not in name or config["model_type"] != "mixtral"}
    for i in range(config["num_hidden_layers"]):
      table |= {f"model.layers.{i}.{name}": (f"blk.{i}.{ours}", letters) for name, (ours, letters) in layer.items()}
    found = {f"{name}.weight": (f"{ours}.weight", letters) for name, (ours, letters) in table.items()}
    if config["model_type"] == "qwen2":
      for name, (ours, letters) in table.items():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
          found[f"{name}.bias"] = (f"{ours}.bias", letters[:1])
    return {name: (ours, tuple(axes[letter] for letter in letters)) for name, (ours, letters) in found.items()}

  def tensors(self, config: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    names = self.names(config)
    return {name: generator.standard_normal(shape, np.float32).astype(dtype) for name, (_, shape) in names.items()}

  def huggingface(self, directory: Path, config: dict, tensors: dict | None = None, shards: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = self.tensors(config) if tensors is None else tensors
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
      save_file(tensors, directory / "model.safetensors")
      return directory
    index = {}
    for shard in range(shards):
      file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
      part = dict(list(tensors.items())[shard::shards])
      save_file(part, directory / file)
      index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory

  def gguf(self, file: Path, config: dict, tensors: dict, kind: str = "F32", extra=None, architecture="llama") -> Path:
    """Writes a GGUF file as llama.cpp's converter would: names, metadata, a Llama's q and k permuted."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for add in extra or ():
      add(writer)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, (ours, _) in self.names(config).items():
      values = tensors[name].astype(np.float32)
      if architecture == "llama" and ours.rsplit(".", 2)[1] in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if "attn_q" in ours else "num_key_value_heads"]
        values = self.permute(values, heads)
      if values.ndim == 1:
        writer.add_tensor(ours, values)
      else:
        writer.add_tensor(ours, gguf.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

  def permute(self, rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves to neighbours, written out by index, so that nothing is shared with the code under test."""
    size = rows.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


@pytest.fixture(scope="session")
def tiny() -> Tiny:
  return Tiny()
