"""Names: from a published tensor to a place in our parameter tree.

Weights keep the published layout, so a mapping is a list of renamings and nothing else. A new architecture is one
line in RULES, or a new tuple of (pattern, path) pairs where its names differ.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from decoder.checkpoint.errors import CheckpointError

T = TypeVar("T")

# Some files hold the bare decoder, whose names lack the leading "model.".
_LAYER = r"(?:model\.)?layers\.(\d+)\."
_LLAMA = (
  (r"(?:model\.)?embed_tokens\.weight", r"embed/weight"),
  (_LAYER + r"input_layernorm\.weight", r"layers_\1/attention_norm/weight"),
  (_LAYER + r"self_attn\.([qkvo])_proj\.(weight|bias)", r"layers_\1/attention/\2/\3"),
  (_LAYER + r"post_attention_layernorm\.weight", r"layers_\1/mlp_norm/weight"),
  (_LAYER + r"mlp\.(gate|up|down)_proj\.(weight|bias)", r"layers_\1/mlp/\2/\3"),
  (r"(?:model\.)?norm\.weight", r"norm/weight"),
  (r"lm_head\.weight", r"head/weight"),
)

Rules = Mapping[str, tuple[tuple[str, str], ...]]

# Names of Hugging Face checkpoints, by the config's model_type.
RULES: Rules = {
  "llama": _LLAMA,
  "mistral": _LLAMA,
  "qwen2": _LLAMA,
}

_GGUF = (
  (r"token_embd\.weight", r"embed/weight"),
  (r"blk\.(\d+)\.attn_norm\.weight", r"layers_\1/attention_norm/weight"),
  (r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)", r"layers_\1/attention/\2/\3"),
  (r"blk\.(\d+)\.attn_output\.(weight|bias)", r"layers_\1/attention/o/\2"),
  (r"blk\.(\d+)\.ffn_norm\.weight", r"layers_\1/mlp_norm/weight"),
  (r"blk\.(\d+)\.ffn_(gate|up|down)\.(weight|bias)", r"layers_\1/mlp/\2/\3"),
  (r"output_norm\.weight", r"norm/weight"),
  (r"output\.weight", r"head/weight"),
)

# Names inside GGUF files, by general.architecture (which says llama for Mistral's models too).
GGUF_RULES: Rules = {
  "llama": _GGUF,
  "qwen2": _GGUF,
}

# Not weights: buffers that old files carry, and GGUF's rotary factors, which become part of the config.
IGNORED = (r".*\.rotary_emb\.inv_freq", r"rope_freqs\.weight")


def to_paths(rules: Rules, kind: str, tensors: Mapping[str, T]) -> dict[str, T]:
  """Renames tensors from published names to parameter paths. Raises CheckpointError for a name that no rule knows.

  kind: the key of `rules`, a model_type or a GGUF architecture.
  """
  if kind not in rules:
    raise CheckpointError(
      f"unknown architecture {kind!r}",
      wanted=f"one of {', '.join(sorted(rules))}",
      remedy="choose a checkpoint of a supported architecture",
    )
  renamed: dict[str, T] = {}
  for name, tensor in tensors.items():
    if any(re.fullmatch(pattern, name) for pattern in IGNORED):
      continue
    path = _path(rules[kind], name)
    if path is None:
      raise CheckpointError(
        f"tensor {name} has no place in a {kind} model",
        remedy="this is another architecture than it says, or a quantised format that is not supported",
      )
    renamed[path] = tensor
  return renamed


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Leaves of a nested dict by slash-joined path."""
  leaves: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      leaves.update(flatten(value, f"{prefix}{key}/"))
    else:
      leaves[prefix + key] = value
  return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  tree: dict[str, Any] = {}
  for path, value in leaves.items():
    *parents, name = path.split("/")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = value
  return tree


def _path(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
  for pattern, path in rules:
    if match := re.fullmatch(pattern, name):
      return match.expand(path)
  return None
