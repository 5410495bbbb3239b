"""The config.json of a model by its name: shapes that are published, the registered models, and checkpoints by path.

No weight is read and nothing is fetched.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.checkpoint import hub
from decoder.checkpoint.loading import open_source
from decoder.checkpoint.source import read_json
from decoder.models import registry

_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_LLAMA_3 |= {"rope_theta": 500000.0, "num_key_value_heads": 8}
_MISTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_MISTRAL |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
_MISTRAL |= {"max_position_embeddings": 32768}
SHAPES: dict[str, Mapping[str, Any]] = {
  # arXiv:2407.21783, table 3
  "llama-3-8b": _LLAMA_3
  | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
  "llama-3-70b": _LLAMA_3
  | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
  # config.json of mistralai/Mistral-7B-v0.3 and mistralai/Mixtral-8x7B-v0.1 (arXiv:2401.04088)
  "mistral-7b": _MISTRAL | {"model_type": "mistral", "vocab_size": 32768},
  "mixtral-8x7b": _MISTRAL
  | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
}


def config(name: str) -> Mapping[str, Any]:
  """What a model's config.json says. name: one of SHAPES, a registered name, or a path: a config.json, a GGUF file, a
  Hugging Face or an Orbax directory. ValueError for others, and for architectures that this build does not know."""
  found = _find(name)
  if found.get("model_type") not in registry.ARCHITECTURES:
    known = ", ".join(registry.ARCHITECTURES)
    raise ValueError(f"{name} has model_type {found.get('model_type')!r}; this build knows {known}")
  return found


def names() -> list[str]:
  """Those that need no path."""
  offered = {**SHAPES, **{name: manifest.get("config") or {} for name, manifest in hub.registered().items()}}
  return [name for name, one in offered.items() if one.get("model_type", "llama") in registry.ARCHITECTURES]


def _find(name: str) -> Mapping[str, Any]:
  if name in SHAPES:
    return SHAPES[name]
  manifest = hub.registered().get(name)
  if manifest and manifest.get("config"):
    return manifest["config"]
  if manifest:
    return open_source(hub.resolve(name)).config  # trained here: it lies beside its manifest
  path = Path(name).expanduser()
  if path.is_file() and path.suffix == ".json":
    return read_json(path)
  if path.exists():
    return open_source(path).config
  near = difflib.get_close_matches(name, names(), 2, 0.5)
  hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names())}"
  raise ValueError(f"unknown model {name!r}: no such path, and no shape of that name; {hint}")
