"""Self-contained Orbax directories: weights, config, tokenizer, and a manifest that vouches for them.

  manifest.json             format, origin, and for every tensor its slice, shape, dtype and sha256, or its kind and
                            those of its parts, if it is a QTensor: striped, as the CPU kernels read it
  config.json, generation_config.json, tokenizer files
  weights/0000, 0001, ...   one Orbax item (PyTree) a slice: an uncompressed zarr array a tensor

A whole tree would cost its size again while Orbax saves it, a slice costs a slice. An uncompressed array in one chunk
is the tensor's bytes, so loading maps the files and does not import Orbax; a slice of any other layout (compressed,
OCDBT) is restored by Orbax itself.
"""

import functools
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from decoder.checkpoint import source as sources
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.mapping import flatten, unflatten
from decoder.checkpoint.source import Source, Tensor

FORMAT = "decoder-orbax"
VERSION = 1
MANIFEST = "manifest.json"
DTYPES = {
  "float32": np.dtype(np.float32),
  "float16": np.dtype(np.float16),
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
PARTS = ("values", "scales", "minimums")
_STORED = DTYPES | {name: np.dtype(name) for name in ("int8", "uint8")}  # with those of PARTS
_REMEDY = "convert it again, or if it lies in the cache, remove the directory and it is fetched anew"


def written_version(directory: Path) -> int | None:
  """The version of the format in which this module wrote a directory, or None if it did not write it."""
  try:
    manifest = json.loads((directory / MANIFEST).read_bytes())
    return manifest["version"] if manifest["format"] == FORMAT else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def is_orbax(directory: Path) -> bool:
  """True for a directory that this module wrote, in any version."""
  return written_version(directory) is not None


def open_orbax(directory: Path) -> Source:
  """Opens a converted directory; checks that every file is there and has its length, not its hash (see `verify`)."""
  manifest = read_manifest(directory)
  for name, entry in manifest["files"].items():
    _check_length(directory / name, entry["bytes"])
  generation = directory / "generation_config.json"
  return Source(
    path=directory,
    config=sources.read_json(directory / "config.json"),
    stable=True,
    generation=sources.read_json(generation) if generation.is_file() else {},
    tensors={
      path: (_quantised if "kind" in entry else _tensor)(directory, path, entry)
      for path, entry in manifest["tensors"].items()
    },
    tokenizer=lambda: sources.directory_tokenizer(directory),
    tokenizer_files=lambda: sources.tokenizer_files(directory),
    files=(directory / MANIFEST,),
    checked=_unchanged(directory, manifest, "config.json"),
  )


def _unchanged(directory: Path, manifest: Mapping[str, Any], name: str) -> bool:
  """True if a small file is as it was at conversion, when the tensors were checked against it."""
  return manifest["files"].get(name, {}).get("sha256") == sources.sha256_of_file(directory / name)


def read_manifest(directory: Path) -> dict[str, Any]:
  """The manifest, with the fields that reading relies on."""
  manifest = sources.read_json(directory / MANIFEST)
  if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
    raise CheckpointError(
      f"{directory / MANIFEST} is of another format",
      wanted=f"{FORMAT} {VERSION}",
      got=f"{manifest.get('format')} {manifest.get('version')}",
      remedy=_REMEDY,
    )
  tensors, files = manifest.get("tensors"), manifest.get("files")
  if not _well_formed(tensors):
    raise CheckpointError(f"{directory / MANIFEST} lists no tensors", remedy=_REMEDY)
  if not (isinstance(files, dict) and all(isinstance(f, dict) and "bytes" in f for f in files.values())):
    raise CheckpointError(f"{directory / MANIFEST} lists no files", remedy=_REMEDY)
  return manifest


def _well_formed(tensors: Any) -> bool:
  if not (isinstance(tensors, dict) and all(isinstance(entry, dict) for entry in tensors.values())):
    return False
  for entry in tensors.values():
    if "kind" in entry and not ("shape" in entry and isinstance(entry.get("parts"), dict) and entry["parts"]):
      return False
  fields = {"slice", "shape", "dtype", "sha256"}
  return all(isinstance(array, dict) and fields <= set(array) for array in _arrays(tensors).values())


def _arrays(entries: Mapping[str, Any]) -> dict[str, Any]:
  """The entries of stored arrays by path: of a QTensor its parts."""
  found = {}
  for path, entry in entries.items():
    found |= {f"{path}/{name}": part for name, part in entry["parts"].items()} if "kind" in entry else {path: entry}
  return found


def save_slice(directory: Path, name: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes some tensors (by path) as the Orbax item `weights/<name>`."""
  from etils import epath

  item = directory / "weights" / name
  item.mkdir(parents=True)
  # The handler alone: a Checkpointer would add a rename and a commit file for every slice, and the whole directory
  # is published by one rename anyway.
  ocp = _orbax()
  ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False).save(
    epath.Path(item), args=ocp.args.PyTreeSave(unflatten(arrays))
  )


def write_manifest(directory: Path, tensors: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
  """Describes what the directory holds. Last of all, since a directory with a manifest is one that loads."""
  names = sorted(file.name for file in directory.iterdir() if file.is_file() and file.name != MANIFEST)
  manifest = {
    "format": FORMAT,
    "version": VERSION,
    "source": dict(origin),
    "tools": {name: _version(name) for name in ("decoder", "orbax-checkpoint", "gguf")},
    "parameters": sum(math.prod(entry["shape"]) for entry in tensors.values()),
    "dtype": ", ".join(sorted({entry.get("kind") or entry["dtype"] for entry in tensors.values()})),
    "files": {
      name: {"bytes": (directory / name).stat().st_size, "sha256": sources.sha256_of_file(directory / name)}
      for name in names
    },
    "tensors": dict(tensors),
  }
  (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def verify(directory: Path, on_bytes: Callable[[int], None] = lambda count: None) -> None:
  """Reads everything and compares it with the manifest's sha256. Raises CheckpointError naming what differs."""
  manifest = read_manifest(directory)
  verify_tensors(directory, manifest["tensors"], on_bytes)
  for name, entry in manifest["files"].items():
    _compare(directory / name, entry["sha256"], sources.sha256_of_file(directory / name))


def verify_tensors(
  directory: Path, entries: Mapping[str, Any], on_bytes: Callable[[int], None] = lambda count: None
) -> None:
  """The same for the weights alone, against entries that need not be written yet."""
  for path, entry in _arrays(entries).items():
    array = _tensor(directory, path, entry).read()
    _compare(directory / "weights" / entry["slice"] / path, entry["sha256"], digest(array))
    on_bytes(array.nbytes)


def digest(array: np.ndarray) -> str:
  """sha256 of a tensor's bytes in C order."""
  return sources.sha256_of([np.ascontiguousarray(array).reshape(-1).view(np.uint8)])


def _tensor(directory: Path, path: str, entry: Mapping[str, Any]) -> Tensor:
  if entry["dtype"] not in _STORED:
    raise CheckpointError(f"{directory}: tensor {path} is of unknown type {entry['dtype']!r}", remedy=_REMEDY)
  shape, dtype = tuple(entry["shape"]), _STORED[entry["dtype"]]
  item = directory / "weights" / entry["slice"]
  file = _mappable(item, path, shape, dtype)
  if file is None:
    return Tensor(shape, dtype, lambda: _restore(item, path, shape, dtype))
  _check_length(file, math.prod(shape) * dtype.itemsize)
  return Tensor(shape, dtype, lambda: sources.map_array(file, 0, shape, dtype))


def _quantised(directory: Path, path: str, entry: Mapping[str, Any]) -> Tensor:
  from decoder.ops import quantised
  from decoder.types import QTensor

  kind, shape = entry["kind"], tuple(entry["shape"])
  parts = {name: _tensor(directory, f"{path}/{name}", part) for name, part in entry["parts"].items()}
  if kind not in quantised.KINDS or set(parts) != set(PARTS[: 2 + quantised.KINDS[kind].minimum]):
    raise CheckpointError(f"{directory}: tensor {path} is of unknown kind {kind!r}", got=list(parts), remedy=_REMEDY)

  def keep(striped: bool) -> QTensor:
    q = QTensor(*(parts[name].read() if name in parts else None for name in PARTS), kind, shape, True)
    return q if striped else quantised.unstriped(q)

  return Tensor(shape, np.dtype(np.float32), lambda: np.asarray(quantised.dequantise(keep(True))), kind, keep)


def _mappable(item: Path, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Path | None:
  """The file that holds just this tensor's bytes, or None if Orbax stored it in another way."""
  array = item / path.replace("/", ".")
  try:
    layout = json.loads((array / ".zarray").read_bytes())
  except (OSError, ValueError):
    return None
  name = "bfloat16" if dtype == ml_dtypes.bfloat16 else dtype.str
  wanted = {"compressor": None, "filters": None, "order": "C", "dtype": name}
  if any(layout.get(key) != value for key, value in wanted.items()):
    return None
  if not shape or list(shape) != layout.get("shape") or list(shape) != layout.get("chunks"):
    return None
  return array / layout.get("dimension_separator", ".").join("0" for _ in shape)


def _restore(item: Path, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  array = _restored_slice(item, item.stat().st_mtime_ns if item.exists() else 0).get(path)
  if array is None or array.shape != shape:
    raise CheckpointError(
      f"{item} does not hold {path} {list(shape)}", got="no such tensor" if array is None else list(array.shape),
      remedy=_REMEDY,
    )  # fmt: skip
  return array.astype(dtype, copy=False)


@functools.lru_cache(maxsize=1)  # tensors come slice by slice; one slice is all that is kept
def _restored_slice(item: Path, changed: int) -> dict[str, np.ndarray]:
  """All tensors of a slice by path, through Orbax. changed: when the slice was written, so that no old one is given."""
  try:
    tree = _orbax().PyTreeCheckpointer().restore(item)
  except Exception as error:  # Orbax and tensorstore raise many types for what is missing or damaged
    raise CheckpointError(f"Orbax cannot restore {item}", got=error, remedy=_REMEDY) from error
  return {path: np.asarray(leaf) for path, leaf in flatten(tree).items()}


def _check_length(file: Path, size: int) -> None:
  try:
    found = file.stat().st_size
  except OSError as error:
    raise CheckpointError(f"{file} is missing", wanted=f"{size} bytes", remedy=_REMEDY) from error
  if found != size:
    raise CheckpointError(f"{file} is damaged", wanted=f"{size} bytes", got=f"{found} bytes", remedy=_REMEDY)


def _compare(what: Path, wanted: str, got: str) -> None:
  if wanted != got:
    raise CheckpointError(f"{what} is damaged", wanted=f"sha256 {wanted[:16]}…", got=f"{got[:16]}…", remedy=_REMEDY)


def _orbax() -> Any:
  import orbax.checkpoint  # slow to import, and loading a directory that can be mapped does not need it

  return orbax.checkpoint


def _version(distribution: str) -> str:
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
