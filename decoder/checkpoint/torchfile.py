"""PyTorch's own files (pytorch_model.bin), read without PyTorch and without running what is pickled in them.

A pickle is a program. The one here may call what puts a tensor together and nothing else: those functions are ours, and
any other name is refused before it is looked up. So a tensor becomes a place in the file, and weights are mapped when
asked for, as those of safetensors are. Both layouts are read: the zip file of PyTorch ≥ 1.6 and the one before it.
"""

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.source import Tensor, map_array

_STORAGES = {
  "DoubleStorage": np.float64,
  "FloatStorage": np.float32,
  "HalfStorage": np.float16,
  "BFloat16Storage": ml_dtypes.bfloat16,
  "LongStorage": np.int64,
  "IntStorage": np.int32,
  "ShortStorage": np.int16,
  "CharStorage": np.int8,
  "ByteStorage": np.uint8,
  "BoolStorage": np.bool_,
}
_MAGIC = 0x1950A86A20F9469CFC6C  # what the older layout begins with
_REMEDY = "the file is truncated or damaged; fetch it again"


class _Storage(NamedTuple):
  key: str
  dtype: np.dtype
  size: int  # in elements


class _Strided(NamedTuple):
  """A tensor as a view of a storage; numbers in elements."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def read_torch(file: Path) -> dict[str, Tensor]:
  """Tensors of a PyTorch file by name. Raises CheckpointError for a file that holds anything else, or is damaged."""
  try:
    found, places = (_read_zip if zipfile.is_zipfile(file) else _read_older)(file)
    tensors = _flat(found)
    return {name: _tensor(file, name, strided, places) for name, strided in tensors.items()}
  except CheckpointError:
    raise
  except _Refused as error:
    raise CheckpointError(
      f"{file} wants more than tensors", wanted="what puts a tensor together", got=error,
      remedy="do not load it; take model.safetensors, or another copy of the file",
    ) from error  # fmt: skip
  except Exception as error:  # a damaged pickle fails in any way it likes
    found = f"{type(error).__name__} {error}"
    raise CheckpointError(f"{file} is no whole PyTorch file", got=found, remedy=_REMEDY) from error


class _Refused(Exception):
  """A name that a pickle may not ask for."""


class _Unpickler(pickle.Unpickler):
  """Knows what makes a tensor, by name, and nothing else. storages: those that were asked for."""

  def __init__(self, stream: BinaryIO):
    super().__init__(stream)
    self.storages: dict[str, _Storage] = {}

  def find_class(self, module: str, name: str) -> Any:
    if module in ("torch", "torch.storage") and name in _STORAGES:
      return np.dtype(_STORAGES[name])
    if (module, name) not in _KNOWN:
      raise _Refused(f"{module}.{name}")
    return _KNOWN[module, name]

  def persistent_load(self, saved: Any) -> _Storage:
    kind, dtype, key, _, size, *view = saved
    if kind != "storage" or not isinstance(dtype, np.dtype) or any(view):
      raise _Refused(f"a storage described by {saved!r}")
    return self.storages.setdefault(str(key), _Storage(str(key), dtype, int(size)))


def _rebuild(storage: _Storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> _Strided:
  return _Strided(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(strided: _Strided, *_: Any) -> _Strided:
  return strided


_KNOWN: dict[tuple[str, str], Callable] = {
  ("torch._utils", "_rebuild_tensor"): _rebuild,
  ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
  ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
  ("collections", "OrderedDict"): collections.OrderedDict,
}


def _read_zip(file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
  """What is pickled, and by storage its place: (offset in the file, bytes)."""
  with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
    (index,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    root = index.filename.removesuffix("data.pkl")
    order = root + "byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
      raise CheckpointError(f"{file} is of a big-endian machine", remedy="save it again on another")
    places = {}
    for info in archive.infolist():
      if info.filename.startswith(root + "data/"):
        if info.compress_type != zipfile.ZIP_STORED:
          raise CheckpointError(f"{file} is compressed", wanted="storages as they are", remedy="save it again")
        places[info.filename.removeprefix(root + "data/")] = (_start(stream, info), info.file_size)
    return _Unpickler(io.BytesIO(archive.read(index))).load(), places


def _start(stream: BinaryIO, info: zipfile.ZipInfo) -> int:
  """Where a member's bytes begin: its own header tells, which may be longer than the directory says."""
  stream.seek(info.header_offset)
  header = stream.read(30)
  name, extra = struct.unpack("<HH", header[26:30])
  return info.header_offset + 30 + name + extra


def _read_older(file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
  with file.open("rb") as stream:
    magic, _, machine = (_Unpickler(stream).load() for _ in range(3))
    if magic != _MAGIC or not machine.get("little_endian", True):
      raise CheckpointError(f"{file} is no PyTorch file", remedy=_REMEDY)
    unpickler = _Unpickler(stream)
    found, places = unpickler.load(), {}
    for key in map(str, _Unpickler(stream).load()):
      (size,) = struct.unpack("<q", stream.read(8))
      places[key] = (stream.tell(), size * unpickler.storages[key].dtype.itemsize)
      stream.seek(places[key][1], io.SEEK_CUR)
  return found, places


def _flat(found: Any) -> dict[str, _Strided]:
  if not isinstance(found, Mapping) or not all(isinstance(value, _Strided) for value in found.values()):
    raise _Refused("something that is not a mapping of names to tensors")
  return {str(name): strided for name, strided in found.items()}


def _tensor(file: Path, name: str, strided: _Strided, places: Mapping[str, tuple[int, int]]) -> Tensor:
  (key, dtype, size), offset, shape, strides = strided
  start, held = places[key]
  reach = 1 + offset + sum((length - 1) * stride for length, stride in zip(shape, strides)) if 0 not in shape else 0
  sound = min((offset, *shape, *strides)) >= 0 and len(shape) == len(strides) and reach <= size
  if not sound or size * dtype.itemsize != held or start + held > file.stat().st_size:
    raise CheckpointError(f"{file}: tensor {name} {list(shape)} lies outside its bytes", remedy=_REMEDY)

  def read() -> np.ndarray:
    whole = map_array(file, start, (size,), dtype) if size else np.zeros(0, dtype)
    return np.lib.stride_tricks.as_strided(
      whole[offset:], shape, [stride * dtype.itemsize for stride in strides], writeable=False
    )

  return Tensor(shape, dtype, read)
