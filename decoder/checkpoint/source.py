"""A checkpoint before it is loaded: its config, and tensors that are read only when asked for.

Every format becomes the same value, a `Source`, whose tensors already carry the paths of our parameter tree; so
loading and conversion do not know where a checkpoint came from. Weights keep their published [out, in] layout, which
is why a Source can hand out memory-mapped arrays.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decoder.checkpoint.errors import CheckpointError
from decoder.text.config import TOKENIZER_FILES, VOCABULARIES


class Tensor(NamedTuple):
  """One weight, not yet read. `read()` gives a new array of this shape and dtype, perhaps a read-only memory map.

  kind: one of `ops.quantised.KINDS` for a weight that is stored in few bits; then `keep(striped)` gives it as it is,
  a QTensor of numpy arrays, where `read` gives the floats that it stands for.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]
  kind: str | None = None
  keep: Callable[[bool], Any] | None = None

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64))

  @property
  def bytes(self) -> int:
    return self.size * self.dtype.itemsize


class Source(NamedTuple):
  """One checkpoint, opened.

  config: as a Hugging Face config.json. generation: as generation_config.json, or {}.
  tensors: by parameter path, e.g. 'layers_0/attention/q/weight'.
  tokenizer: () -> a `text.tokenizer.Tokenizer`, or None for a checkpoint that has no tokenizer.
  tokenizer_files: () -> file name to content, what a self-contained copy must hold.
  files: the files whose bytes are the weights, for provenance.
  checked: the tensors are known to be those of the config's model, so `check` need not build it again.
  stable: the files are only ever replaced by renaming, so parameters may be maps of them and outlive a replacement.
  """

  path: Path
  config: dict[str, Any]
  generation: dict[str, Any]
  tensors: dict[str, Tensor]
  tokenizer: Callable[[], Any]
  tokenizer_files: Callable[[], dict[str, bytes]]
  files: tuple[Path, ...]
  checked: bool = False
  stable: bool = False


def map_array(file: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """A read-only view of a file's bytes; unmapped when the last array that shares it dies.

  Each call maps anew, so dropping a tensor also drops its pages from the process. Touching a map of a file
  that was truncated meanwhile kills the process, so what outlives a load maps only `stable` sources.
  """
  if 0 in shape:
    return np.zeros(shape, dtype)
  return np.asarray(np.memmap(file, dtype, mode="r", offset=offset, shape=shape))


def read_json(file: Path) -> dict[str, Any]:
  """A JSON object from a file. Raises CheckpointError for anything else."""
  try:
    value = json.loads(file.read_text(encoding="utf-8"))
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise CheckpointError(f"cannot read {file} as JSON", got=error, remedy="fetch the file again") from error
  if not isinstance(value, dict):
    raise CheckpointError(f"{file} is not a JSON object", wanted="{...}", got=type(value).__name__)
  return value


def directory_tokenizer(directory: Path) -> Any:
  """The tokenizer that lies beside the weights, or None where there is none."""
  if not tokenizer_files(directory):
    return None
  from decoder.text.tokenizer import load_tokenizer  # slow to import and not needed to convert

  return load_tokenizer(directory)


def tokenizer_files(directory: Path) -> dict[str, bytes]:
  """The tokenizer's files of a directory, as they are; {} if none of them holds a vocabulary."""
  names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
  if not set(VOCABULARIES) & set(names):
    return {}
  return {name: (directory / name).read_bytes() for name in names}


def sha256_of(chunks: Iterable[Any]) -> str:
  """Hex digest of some buffers, one after the other."""
  digest = hashlib.sha256()
  for chunk in chunks:
    digest.update(chunk)
  return digest.hexdigest()


def sha256_of_file(file: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
  """Hex digest of a file, read in blocks of 1 MiB, so that memory stays flat."""

  def blocks():
    with file.open("rb") as stream:
      while block := stream.read(1 << 20):
        on_bytes(len(block))
        yield block

  return sha256_of(blocks())


def join(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The tensors with those that are published in parts, as `path#0`, `path#1`, …, each stacked into one: the rows of
  the first, then of the second. Raises CheckpointError where a part is missing or unlike the others."""
  joined: dict[str, Tensor] = {}
  parts: dict[str, dict[int, Tensor]] = {}
  for path, tensor in tensors.items():
    path, mark, number = path.partition("#")
    if mark:
      parts.setdefault(path, {})[int(number)] = tensor
    else:
      joined[path] = tensor
  return joined | {path: _stacked(path, found) for path, found in parts.items()}


def _stacked(path: str, parts: Mapping[int, Tensor]) -> Tensor:
  numbers, count = sorted(parts), len(parts)
  if numbers != list(range(count)):
    raise CheckpointError(
      f"not all parts of {path} are there",
      wanted=f"0 to {numbers[-1]}",
      got=_some([str(number) for number in numbers]),
      remedy="the download is incomplete; fetch it again",
    )
  tensors = [parts[number] for number in numbers]
  kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
  if len(kinds) > 1:
    raise CheckpointError(
      f"the parts of {path} differ from each other",
      wanted="one shape and one type",
      got=_some([f"{list(shape)} {dtype}" for shape, dtype in kinds]),
      remedy="the files are of different models; fetch them again",
    )
  shape, dtype = tensors[0].shape, tensors[0].dtype
  return Tensor((count * shape[0], *shape[1:]), dtype, lambda: np.concatenate([tensor.read() for tensor in tensors]))


def check(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> Source:
  """The source with exactly the tensors that the config's model has, or a CheckpointError.

  shapes: by parameter path. A head that a tied model does not use is dropped; anything else too many is refused,
  because a checkpoint with tensors we do not know is a model that we would run wrongly.
  """
  source = source._replace(tensors={**_implied(source, shapes), **source.tensors})
  missing = [path for path in shapes if path not in source.tensors]
  if missing == ["head/weight"]:
    raise CheckpointError(
      f"{source.path}: the config says tie_word_embeddings = false, but there is no output head",
      wanted=f"lm_head.weight {list(shapes['head/weight'])}",
      got="no such tensor",
      remedy="set tie_word_embeddings to true in config.json if this model ties its head, else fetch the missing file",
    )
  if missing:
    raise CheckpointError(
      f"{source.path}: {len(missing)} of {len(shapes)} tensors are missing",
      wanted=_some(missing),
      got=f"{len(source.tensors)} tensors",
      remedy="the download or the config is incomplete; fetch it again",
    )
  extra = [path for path in source.tensors if path not in shapes and path != "head/weight"]
  if extra:
    raise CheckpointError(
      f"{source.path}: {len(extra)} tensors are not part of a {source.config.get('model_type')} of this config",
      wanted=f"{len(shapes)} tensors",
      got=_some(extra),
      remedy="check num_hidden_layers and the bias flags in config.json",
    )
  for path, shape in shapes.items():
    if tuple(source.tensors[path].shape) != tuple(shape):
      raise CheckpointError(
        f"{source.path}: tensor {path} does not fit the config",
        wanted=list(shape),
        got=list(source.tensors[path].shape),
        remedy="weights and config.json are of two different models",
      )
  return source._replace(tensors={path: source.tensors[path] for path in shapes})


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Shapes by parameter path of the model that a config describes. Raises ValueError for an unknown model or rope."""
  from decoder.checkpoint.mapping import flatten
  from decoder.models.registry import parameter_shapes  # imports flax; opening a source does not

  try:
    return {path: tuple(leaf.shape) for path, leaf in flatten(parameter_shapes(dict(config))).items()}
  except (KeyError, TypeError) as error:
    raise CheckpointError(
      "config.json cannot describe a model", got=f"{type(error).__name__} {error}", remedy="fetch it again"
    ) from error


def _implied(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
  """Tensors that a checkpoint may leave out: a bias of zeros, and a head that is said to be the embedding, but that
  the model takes for one of its own, as T5 does since transformers 5."""
  implied = {}
  if (bias := "logits_bias/bias") in shapes:
    implied[bias] = Tensor(tuple(shapes[bias]), np.dtype(np.float32), lambda: np.zeros(shapes[bias], np.float32))
  if source.config.get("tie_word_embeddings") and "head/weight" in shapes and "embed/weight" in source.tensors:
    implied["head/weight"] = source.tensors["embed/weight"]
  return implied


def _some(names: list[str]) -> str:
  return ", ".join(names[:3]) + (f", … ({len(names)} in all)" if len(names) > 3 else "")
