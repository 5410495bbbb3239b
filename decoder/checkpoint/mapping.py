"""Names: from a published tensor to a place in our parameter tree.

Weights keep the published layout, so a mapping is a list of renamings and nothing else. A new architecture is one
line in RULES, or a new tuple of (pattern, path) pairs where its names differ; an empty path leaves a tensor out, and
`path#3` is the fourth of the tensors that `source.join` stacks into one.
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

_EXPERT = {"w1": "gate", "w3": "up", "w2": "down"}
_MIXTRAL = (
  *_LLAMA,
  (_LAYER + r"block_sparse_moe\.gate\.weight", r"layers_\1/mlp/router/weight"),
  *(
    (_LAYER + rf"block_sparse_moe\.experts\.(\d+)\.{theirs}\.weight", rf"layers_\1/mlp/experts/{ours}/weight#\2")
    for theirs, ours in _EXPERT.items()
  ),
)

_T5_PARTS = {"SelfAttention": "attention", "EncDecAttention": "cross"}
_T5_MLP = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
_T5 = (
  (r"shared\.weight", r"embed/weight"),
  (r"(?:encoder|decoder)\.embed_tokens\.weight", ""),  # the same once more
  (r"(\w+)\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight", r"\1/relative/table/weight"),
  (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight", ""),  # never used
  *(
    (rf"(\w+)\.block\.(\d+)\.layer\.\d\.{theirs}\.([qkvo])\.weight", rf"\1/layers_\2/{ours}/\3/weight")
    for theirs, ours in _T5_PARTS.items()
  ),
  *(
    (rf"(\w+)\.block\.(\d+)\.layer\.\d\.DenseReluDense\.{theirs}\.weight", rf"\1/layers_\2/mlp/{ours}/weight")
    for theirs, ours in _T5_MLP.items()
  ),
  (r"(\w+)\.block\.(\d+)\.layer\.0\.layer_norm\.weight", r"\1/layers_\2/attention_norm/weight"),
  (r"encoder\.block\.(\d+)\.layer\.1\.layer_norm\.weight", r"encoder/layers_\1/mlp_norm/weight"),
  (r"decoder\.block\.(\d+)\.layer\.1\.layer_norm\.weight", r"decoder/layers_\1/cross_norm/weight"),
  (r"decoder\.block\.(\d+)\.layer\.2\.layer_norm\.weight", r"decoder/layers_\1/mlp_norm/weight"),
  (r"(\w+)\.final_layer_norm\.weight", r"\1/norm/weight"),
  (r"lm_head\.weight", r"head/weight"),
)

_HALF = r"(?:model\.)?(encoder|decoder)\."
_BART_LAYER = _HALF + r"layers\.(\d+)\."
_BART_MLP = {"fc1": "up", "fc2": "down"}
_BART_NORMS = {"self_attn": "attention", "encoder_attn": "cross", "final": "mlp"}
_BART = (
  (r"(?:model\.)?shared\.weight", r"embed/weight"),
  (_HALF + r"embed_tokens\.weight", ""),  # the same once more
  (_HALF + r"embed_positions\.weight", r"\1/positions/table/weight"),
  (_HALF + r"layernorm_embedding\.(weight|bias)", r"\1/embed_norm/\2"),
  (_BART_LAYER + r"self_attn\.([qkv])_proj\.(weight|bias)", r"\1/layers_\2/attention/\3/\4"),
  (_BART_LAYER + r"self_attn\.out_proj\.(weight|bias)", r"\1/layers_\2/attention/o/\3"),
  (_BART_LAYER + r"encoder_attn\.([qkv])_proj\.(weight|bias)", r"\1/layers_\2/cross/\3/\4"),
  (_BART_LAYER + r"encoder_attn\.out_proj\.(weight|bias)", r"\1/layers_\2/cross/o/\3"),
  *((_BART_LAYER + rf"{theirs}\.(weight|bias)", rf"\1/layers_\2/mlp/{ours}/\3") for theirs, ours in _BART_MLP.items()),
  *(
    (_BART_LAYER + rf"{theirs}_layer_norm\.(weight|bias)", rf"\1/layers_\2/{ours}_norm/\3")
    for theirs, ours in _BART_NORMS.items()
  ),
  (_HALF + r"layer_norm\.(weight|bias)", r"\1/norm/\2"),
  (r"lm_head\.weight", r"head/weight"),
  (r"final_logits_bias", r"logits_bias/bias"),
)
_MADE = (_HALF + r"embed_positions\.weights?", "")  # sinusoids, which are computed

Rules = Mapping[str, tuple[tuple[str, str], ...]]

# Names of Hugging Face checkpoints, by the config's model_type.
RULES: Rules = {
  "llama": _LLAMA,
  "mistral": _LLAMA,
  "qwen2": _LLAMA,
  "mixtral": _MIXTRAL,
  "t5": _T5,
  "mt5": _T5,
  "bart": _BART,
  "marian": (_MADE, *_BART),
  "m2m_100": (_MADE, *_BART),
}

_GGUF = (
  (r"token_embd\.weight", r"embed/weight"),
  (r"blk\.(\d+)\.attn_norm\.weight", r"layers_\1/attention_norm/weight"),
  (r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)", r"layers_\1/attention/\2/\3"),
  (r"blk\.(\d+)\.attn_output\.(weight|bias)", r"layers_\1/attention/o/\2"),
  (r"blk\.(\d+)\.ffn_norm\.weight", r"layers_\1/mlp_norm/weight"),
  (r"blk\.(\d+)\.ffn_(gate|up|down)\.(weight|bias)", r"layers_\1/mlp/\2/\3"),
  (r"blk\.(\d+)\.ffn_gate_inp\.weight", r"layers_\1/mlp/router/weight"),
  (r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", r"layers_\1/mlp/experts/\2/weight"),
  (r"output_norm\.weight", r"norm/weight"),
  (r"output\.weight", r"head/weight"),
)

# Names inside GGUF files, by general.architecture (which says llama for Mistral's and Mixtral's models too).
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
    if path:
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
