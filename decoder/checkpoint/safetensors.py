"""Hugging Face directories: config.json, tokenizer files, one safetensors file or several with an index; or PyTorch's
own files, where there are none of those (`torchfile.py`).

The safetensors header gives every tensor's place in the file, so tensors are memory-mapped one by one (the library
would copy them). All headers are read and checked at once, the weights only when asked for.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from decoder.checkpoint import source as sources
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.mapping import RULES, to_paths
from decoder.checkpoint.source import Source, Tensor
from decoder.checkpoint.torchfile import read_torch

_DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E5M2": ml_dtypes.float8_e5m2,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_REMEDY = "the file is truncated or damaged; fetch it again"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there counts


def open_huggingface(directory: Path) -> Source:
  """Opens a Hugging Face directory. Raises CheckpointError for anything incomplete or damaged."""
  config = sources.read_json(directory / "config.json")
  if not isinstance(config.get("model_type"), str):
    raise CheckpointError(
      f"{directory / 'config.json'} names no model_type", remedy="this is not a Hugging Face config; fetch it again"
    )
  generation = directory / "generation_config.json"
  files, index = weight_files(directory)
  headers = {file.name: _READERS[file.suffix](file) for file in files}
  _check_index(directory, index, headers)
  tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
  return Source(
    path=directory,
    config=config,
    generation=sources.read_json(generation) if generation.is_file() else {},
    tensors=sources.join(to_paths(RULES, config["model_type"], tensors)),
    tokenizer=lambda: sources.directory_tokenizer(directory),
    tokenizer_files=lambda: sources.tokenizer_files(directory),
    files=files,
  )


def weight_files(directory: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
  """The files of a directory that hold weights, and the index (tensor -> file name) if they are sharded."""
  for name in WEIGHTS:
    single, index_file = directory / name, directory / f"{name}.index.json"
    if single.is_file():
      return (single,), {}
    if index_file.is_file():
      return _sharded(directory, index_file)
  others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.h5") for file in directory.glob(pattern))
  raise CheckpointError(
    f"{directory} holds no weights",
    wanted=" or ".join((*WEIGHTS, *(f"{name}.index.json" for name in WEIGHTS))),
    got=", ".join(others[:3]) or "neither",
    remedy="save it with save_pretrained(..., safe_serialization=True)" if others else "fetch the weights",
  )


def _sharded(directory: Path, index_file: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
  index = sources.read_json(index_file).get("weight_map")
  if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
    raise CheckpointError(f"{index_file} has no weight_map", wanted="{tensor: file}", remedy="fetch it again")
  files = tuple(directory / name for name in sorted(set(index.values())))
  missing = [f.name for f in files if f.parent != directory or f.suffix not in _READERS or not f.is_file()]
  if missing:
    raise CheckpointError(
      f"{directory}: {len(missing)} of {len(files)} weight files are missing",
      wanted=", ".join(missing[:3]),
      remedy="fetch the missing files",
    )
  return files, index


def read_header(file: Path) -> dict[str, Tensor]:
  """Tensors of one safetensors file by published name; checks every offset against the file's length."""
  size = file.stat().st_size
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > size - 8:
      raise CheckpointError(
        f"{file} is no whole safetensors file", wanted=f"a header of {length} bytes", got=size, remedy=_REMEDY
      )
    try:
      header = json.loads(stream.read(length))
      entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
      return {name: _tensor(file, 8 + length, size, name, entry) for name, entry in entries.items()}
    except CheckpointError:
      raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise CheckpointError(f"{file} has a damaged header", got=error, remedy=_REMEDY) from error


_READERS = {".safetensors": read_header, ".bin": read_torch}


def _tensor(file: Path, start: int, size: int, name: str, entry: dict) -> Tensor:
  if entry["dtype"] not in _DTYPES:
    raise CheckpointError(
      f"{file}: tensor {name} has a type that is not supported",
      wanted=f"one of {', '.join(_DTYPES)}",
      got=entry["dtype"],
      remedy="fetch another version of the model",
    )
  shape, dtype = tuple(int(n) for n in entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
  begin, end = entry["data_offsets"]
  tensor = Tensor(shape, dtype, lambda: sources.map_array(file, start + begin, shape, dtype))
  if min(shape, default=0) < 0 or begin < 0 or end - begin != tensor.bytes:
    raise CheckpointError(
      f"{file}: tensor {name} {list(shape)} has wrong offsets", wanted=tensor.bytes, got=end - begin, remedy=_REMEDY
    )
  if start + end > size:
    raise CheckpointError(
      f"{file} is truncated: tensor {name} ends beyond it",
      wanted=f"{start + end} bytes",
      got=f"{size} bytes",
      remedy="fetch it again",
    )
  return tensor


def _check_index(directory: Path, index: dict[str, str], headers: dict[str, dict[str, Tensor]]) -> None:
  lost = [name for name, file in index.items() if name not in headers[file]]
  if lost:
    raise CheckpointError(
      f"{directory}: the index and the files disagree",
      wanted=f"{lost[0]} in {index[lost[0]]}",
      got="no such tensor there",
      remedy="fetch the directory again, index and files of one revision",
    )
