"""GGUF files: metadata becomes a Hugging Face config; quantised blocks become float32 or stay as they are.

llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so its converter permutes the rows of q and k
of Llama models; here they are put back. The `gguf` library parses and dequantises; tensors are mapped by ourselves,
since the library keeps the whole file mapped and a long conversion would come to hold it all.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from decoder.checkpoint import source as sources
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.mapping import GGUF_RULES, to_paths
from decoder.checkpoint.source import Source, Tensor

_PLAIN = {
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F64": np.float64,
}
# Kept as they are where asked, under these names in lower case; `ops.quantised` itself is imported with JAX.
_KEPT = ("Q8_0", "Q4_0", "Q4_1")
_BLOCK = 1 << 20  # weights dequantised at a time: the library's temporaries are several times as large


def open_gguf(file: Path) -> Source:
  """Opens a GGUF file. Raises CheckpointError if it is damaged, split, or of an unknown architecture or type."""
  metadata, raw = _parse(file)
  architecture = metadata.get("general.architecture")
  if architecture not in GGUF_RULES:
    raise CheckpointError(
      f"{file}: unknown architecture {architecture!r}",
      wanted=f"one of {', '.join(sorted(GGUF_RULES))}",
      remedy="choose a checkpoint of a supported architecture",
    )
  config = config_from_metadata(metadata, raw)
  tensors = to_paths(GGUF_RULES, architecture, raw)
  if architecture == "llama":
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = {path: _unpermuted(path, tensor, heads) for path, tensor in tensors.items()}
  return Source(
    path=file,
    config=config,
    generation=_generation(metadata),
    tensors=tensors,
    tokenizer=lambda: _tokenizer(metadata),
    tokenizer_files=lambda: _tokenizer(metadata).files() if _has_tokenizer(metadata) else {},
    files=(file,),
  )


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q or k from pairs that are neighbours (2i, 2i+1) to halves (i, i + h), head by head.

  heads: of this matrix, so the key/value heads for k.
  """
  pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def config_from_metadata(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
  """A config.json for the model in a GGUF file. Facts that GGUF leaves to the tensors are read off their names."""
  get = _getter(metadata)
  heads, hidden = get("attention.head_count"), get("embedding_length")
  head_dim = get("attention.key_length", hidden // heads)
  window, experts = get("attention.sliding_window", None), get("expert_count", 0)
  architecture = metadata["general.architecture"]
  if experts and architecture != "llama":
    raise CheckpointError(
      f"the GGUF file holds a mixture of experts that is no Mixtral but {architecture}",
      got=f"{experts} experts",
      remedy="choose a dense model or a Mixtral",
    )
  kind = "mixtral" if experts else "mistral" if window else "llama"
  config = {
    "model_type": kind if architecture == "llama" else architecture,
    "hidden_size": hidden,
    "intermediate_size": get("feed_forward_length"),
    "num_hidden_layers": get("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": get("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": get("context_length"),
    "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
    "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else get("vocab_size"),
    "tie_word_embeddings": "output.weight" not in tensors,
    # Qwen2 always has biases on q, k and v; the flag would add one on o.
    "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
    "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    "rope_theta": get("rope.freq_base", 10000.0),
    "rope_scaling": _rope_scaling(get, tensors),
  }
  if window:
    config["sliding_window"] = window
  if experts:
    config |= {"num_local_experts": experts, "num_experts_per_tok": get("expert_used_count")}
  if (rotated := get("rope.dimension_count", head_dim)) != head_dim:
    config["partial_rotary_factor"] = rotated / head_dim
  for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
    config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
  return config


def _getter(metadata: Mapping[str, Any]):
  """A function from a key without its architecture to its value, floats shortened to what float32 can tell apart."""
  prefix = metadata["general.architecture"] + "."

  def get(key: str, *default: Any) -> Any:
    if prefix + key not in metadata and not default:
      raise CheckpointError(
        "the GGUF metadata is incomplete", wanted=prefix + key, got="no such key", remedy="convert the model again"
      )
    value = metadata.get(prefix + key, *default)
    if isinstance(value, list):  # one number a layer; only models whose layers are alike are supported
      if len(set(value)) != 1:
        raise CheckpointError(f"{prefix + key} differs between layers", got=value, remedy="choose a uniform model")
      value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value

  return get


def _rope_scaling(get, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
  kind = get("rope.scaling.type", "none")
  context = get("context_length")
  if "rope_freqs.weight" in tensors:
    factors = tensors["rope_freqs.weight"].read().astype(np.float32)
    return llama3_from_factors(factors, get("rope.freq_base", 10000.0), context)
  if kind == "none" and (scale := get("rope.scale_linear", 1.0)) == 1.0:
    return None
  if kind == "none":  # the key of files older than rope.scaling.type
    return {"rope_type": "linear", "factor": scale}
  if kind == "linear":
    return {"rope_type": "linear", "factor": get("rope.scaling.factor")}
  if kind != "yarn":
    raise CheckpointError(
      "unknown rope scaling in the GGUF file", wanted="none, linear or yarn", got=kind, remedy="choose another model"
    )
  factor = get("rope.scaling.factor")
  scaling = {
    "rope_type": "yarn",
    "factor": factor,
    "original_max_position_embeddings": get("rope.scaling.original_context_length", context),
    "beta_fast": get("rope.scaling.yarn_beta_fast", 32.0),
    "beta_slow": get("rope.scaling.yarn_beta_slow", 1.0),
  }
  if (scale := get("rope.scaling.attn_factor", 1.0)) != 1.0:  # multiplies yarn's own magnitude, HF's replaces it
    scaling["attention_factor"] = scale * (1.0 + 0.1 * float(np.log(factor)))
  return scaling


def llama3_from_factors(factors_h: np.ndarray, theta: float, context: int) -> dict[str, Any]:
  """The rope_scaling that gives these divisors of the plain frequencies.

  Llama 3.1's converter stores only the factors it computed. They are recognised by computing them again from the
  published constants; any other list is expressed exactly, as longrope with one list for every length.
  """
  published = {
    "rope_type": "llama3",
    "factor": float(factors_h.max()),
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  plain_h = theta ** -(np.arange(len(factors_h)) / len(factors_h))
  turns_h = published["original_max_position_embeddings"] * plain_h / (2 * np.pi)
  keep_h = np.clip((turns_h - 1.0) / 3.0, 0.0, 1.0)
  if np.allclose(factors_h, 1.0 / ((1 - keep_h) / published["factor"] + keep_h), rtol=1e-4):
    return published
  factors = [float(factor) for factor in factors_h]
  return {
    "rope_type": "longrope",
    "short_factor": factors,
    "long_factor": factors,
    "factor": 1.0,
    "attention_factor": 1.0,
    "original_max_position_embeddings": context,
  }


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
  ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
  ends = list(dict.fromkeys(end for end in ends if end is not None))
  start = metadata.get("tokenizer.ggml.bos_token_id")
  return ({"bos_token_id": start} if start is not None else {}) | ({"eos_token_id": ends} if ends else {})


def _has_tokenizer(metadata: Mapping[str, Any]) -> bool:
  return "tokenizer.ggml.tokens" in metadata


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
  if not _has_tokenizer(metadata):
    return None
  from decoder.text.tokenizer import tokenizer_from_gguf  # slow to import and not needed to read weights

  return tokenizer_from_gguf(metadata)


def _parse(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """Metadata as plain values, and tensors by GGUF name in numpy's order of axes."""
  import gguf

  remedy = "the file is truncated, damaged or no GGUF file; fetch it again"
  with file.open("rb") as stream:
    if (magic := stream.read(4)) != b"GGUF":
      raise CheckpointError(f"{file} is not a GGUF file", wanted=b"GGUF", got=magic, remedy=remedy)
  try:
    reader = gguf.GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    swapped = reader.byte_order == "S"
    tensors = {tensor.name: _tensor(file, tensor) for tensor in reader.tensors}
  except CheckpointError:
    raise
  except Exception as error:  # the library indexes into the bytes unchecked: a damaged file may raise anything
    raise CheckpointError(f"cannot read {file}", got=f"{type(error).__name__}: {error}", remedy=remedy) from error
  if swapped or metadata.get("split.count", 0) > 1:
    raise CheckpointError(
      f"{file} is {'big-endian' if swapped else 'one part of a split model'}",
      wanted="one little-endian file",
      remedy="join or convert it with llama.cpp's tools",
    )
  return metadata, tensors


def _tensor(file: Path, entry: Any) -> Tensor:
  import gguf

  shape, kind, offset = tuple(int(n) for n in reversed(entry.shape)), entry.tensor_type, int(entry.data_offset)
  if len(shape) == 3:  # [E, F, D], of experts: we have the same bytes in two dimensions
    shape = (shape[0] * shape[1], shape[2])
  if kind.name in _PLAIN:
    dtype = np.dtype(_PLAIN[kind.name])
    return Tensor(shape, dtype, lambda: sources.map_array(file, offset, shape, dtype))
  packed_shape = gguf.quant_shape_to_byte_shape(shape, kind)

  def read_packed() -> np.ndarray:
    return sources.map_array(file, offset, packed_shape, np.dtype(np.uint8)).reshape(-1, packed_shape[-1])

  def read() -> np.ndarray:
    packed = read_packed()
    values = np.empty((len(packed), shape[-1]), np.float32)
    step = max(1, _BLOCK // shape[-1])
    try:
      for row in range(0, len(packed), step):
        values[row : row + step] = gguf.dequantize(packed[row : row + step], kind)
    except NotImplementedError as error:
      raise CheckpointError(
        f"{file}: the gguf library cannot dequantise {kind.name}", remedy="choose another quantisation"
      ) from error
    return values.reshape(shape)

  if kind.name not in _KEPT or len(shape) != 2:
    return Tensor(shape, np.dtype(np.float32), read)
  name = kind.name.lower()
  return Tensor(shape, np.dtype(np.float32), read, name, _Blocks(name, shape, read_packed))


class _Blocks(NamedTuple):
  """`Tensor.keep` of rows of GGUF blocks (uint8)."""

  kind: str
  shape: tuple[int, int]
  read_packed: Callable[[], np.ndarray]

  def __call__(self, striped: bool) -> Any:
    from decoder.ops.quantised import from_gguf_blocks

    return from_gguf_blocks(self.read_packed(), self.kind, self.shape, striped=striped)


def _unpermuted(path: str, tensor: Tensor, heads: Mapping[str, int]) -> Tensor:
  *_, block, name, _ = f"//{path}".split("/")
  if block != "attention" or name not in heads:
    return tensor
  keep = tensor.keep
  if keep is not None:  # rows are whole blocks, so they move without being understood
    keep = keep._replace(read_packed=lambda: unpermute(tensor.keep.read_packed(), heads[name]))
  return tensor._replace(read=lambda: unpermute(tensor.read(), heads[name]), keep=keep)
