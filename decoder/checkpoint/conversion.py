"""Conversion of any checkpoint into a self-contained Orbax directory, one slice of tensors in memory at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from decoder.checkpoint import orbax
from decoder.checkpoint.atomic import publish, refuse_foreign, workspace
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.loading import open_checked
from decoder.checkpoint.mapping import flatten
from decoder.checkpoint.progress import Progress, progress_bar
from decoder.checkpoint.source import Source, Tensor, check, expected_shapes, sha256_of_file
from decoder.checkpoint.weights import check_weights, kind_of, read_quantised

SLICE_BYTES = 32 << 20  # a larger tensor is a slice of its own; smaller slices only make more files
Form = np.dtype | str  # how a tensor is stored: as floats, or in a kind of `ops.quantised`
_SPARE_BYTES = 16 << 20  # room for config, tokenizer, manifest and the file system's own overhead


def convert(
  source: str | Path,
  out: str | Path,
  dtype: Any = None,
  *,
  weights: str | None = None,
  origin: Mapping[str, Any] | None = None,
  progress: bool = True,
) -> Path:
  """Writes the checkpoint at `source` to the new directory `out`, whole or not at all.

  dtype: float32, float16 or bfloat16 for all weights; None keeps each tensor's own (quantised ones become float32).
  weights: as for `load`; what it makes a QTensor is stored as one, bit for bit.
  origin: facts for the manifest, e.g. name and revision; the sha256 of the source's files is added.
  Peak memory is about two slices, that is, twice the largest tensor. An earlier conversion at `out` is replaced,
  anything else there is refused. Raises CheckpointError.
  """
  check_weights(weights)
  source, out = Path(source), Path(out)
  refuse_foreign(out, orbax.is_orbax)
  described = {"path": str(source.resolve())} | dict(origin or {})
  return _store(open_checked(source), out, dtype, weights, described, progress)


def save(
  params: Mapping[str, Any],
  config: Mapping[str, Any],
  tokenizer: Mapping[str, bytes],
  out: str | Path,
  *,
  weights: str | None = None,
  generation: Mapping[str, Any] | None = None,
  origin: Mapping[str, Any] | None = None,
  progress: bool = True,
) -> Path:
  """Writes a model that is held in memory, such as one just trained, to the directory `out`, whole or not at all.

  params: its nested dict of arrays; config: as a config.json, whose model they must be; tokenizer: file name to
  content. The rest is as for `convert`. Raises CheckpointError.
  """
  check_weights(weights)
  refuse_foreign(Path(out), orbax.is_orbax)
  arrays = {path: np.asarray(array) for path, array in flatten(params).items()}
  tensors = {path: Tensor(array.shape, array.dtype, lambda array=array: array) for path, array in arrays.items()}
  source = Source(Path(out), dict(config), dict(generation or {}), tensors, lambda: None, lambda: dict(tokenizer), ())
  return _store(check(source, expected_shapes(config)), Path(out), None, weights, dict(origin or {}), progress)


def _store(
  opened: Source, out: Path, dtype: Any, weights: str | None, described: dict[str, Any], progress: bool
) -> Path:
  forms = {
    path: kind_of(path, tensor, weights) or _target_dtype(tensor, dtype, path)
    for path, tensor in opened.tensors.items()
  }
  total = sum(_bytes(tensor, forms[path]) for path, tensor in opened.tensors.items())
  _check_space(out, total)
  read = sum(file.stat().st_size for file in opened.files)
  with progress_bar(read + 2 * total, f"writing {out.name}", progress) as advance, workspace(out) as directory:
    described = described | {"files": {file.name: sha256_of_file(file, advance) for file in opened.files}}
    _write_texts(opened, directory)
    entries = _write_tensors(opened, forms, directory, advance)
    orbax.verify_tensors(directory, entries, advance)
    orbax.write_manifest(directory, entries, described)
    publish(directory, out, orbax.is_orbax)
  return out


def _write_texts(source: Source, directory: Path) -> None:
  texts = dict(source.tokenizer_files())
  texts["config.json"] = _json(source.config)
  if source.generation:
    texts["generation_config.json"] = _json(source.generation)
  for name, content in texts.items():
    (directory / name).write_bytes(content)


def _write_tensors(
  source: Source, forms: Mapping[str, Form], directory: Path, advance: Progress
) -> dict[str, dict[str, Any]]:
  """Writes all slices; the manifest's entry for every tensor, hashed before Orbax saw it."""
  entries: dict[str, dict[str, Any]] = {}
  for number, paths in enumerate(_slices(source.tensors, forms)):
    name, arrays = f"{number:04d}", {}
    for path in paths:
      entries[path], stored = _stored(path, source.tensors[path], forms[path], name)
      arrays |= stored
      del stored  # a second name for the last tensor, which would outlive the slice
    orbax.save_slice(directory, name, arrays)
    advance(sum(array.nbytes for array in arrays.values()))
  return entries


def _stored(path: str, tensor: Tensor, form: Form, slice_name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """A tensor's entry in the manifest and its arrays by path."""

  def described(array: np.ndarray) -> dict[str, Any]:
    shape, digest = list(array.shape), orbax.digest(array)
    return {"slice": slice_name, "shape": shape, "dtype": array.dtype.name, "sha256": digest}

  if isinstance(form, np.dtype):
    array = np.ascontiguousarray(tensor.read().astype(form, copy=False))
    return described(array), {path: array}
  q = read_quantised(tensor, form, striped=True)
  parts = {name: np.asarray(part) for name in orbax.PARTS if (part := getattr(q, name)) is not None}
  entry = {"shape": list(tensor.shape), "kind": form, "parts": {name: described(part) for name, part in parts.items()}}
  return entry, {f"{path}/{name}": part for name, part in parts.items()}


def _slices(tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> Iterator[list[str]]:
  """Groups of neighbouring tensors of at most SLICE_BYTES; a larger tensor stands alone."""
  group: list[str] = []
  held = 0
  for path, tensor in tensors.items():
    size = max(tensor.bytes, _bytes(tensor, forms[path]))
    if group and held + size > SLICE_BYTES:
      yield group
      group, held = [], 0
    group.append(path)
    held += size
  if group:
    yield group


def _bytes(tensor: Tensor, form: Form) -> int:
  if isinstance(form, np.dtype):
    return tensor.size * form.itemsize
  from decoder.ops.quantised import nbytes

  return nbytes(tensor.shape, form)


def _target_dtype(tensor: Tensor, dtype: Any, path: str) -> np.dtype:
  target = np.dtype(tensor.dtype if dtype is None else dtype)
  if target.name not in orbax.DTYPES:
    raise CheckpointError(
      f"tensor {path} cannot be stored as {target.name}",
      wanted=f"one of {', '.join(orbax.DTYPES)}",
      remedy="name one of them as dtype",
    )
  return target


def _check_space(out: Path, total: int) -> None:
  parent = next(parent for parent in out.resolve().parents if parent.exists())
  free = shutil.disk_usage(parent).free
  if free < total + _SPARE_BYTES:
    raise CheckpointError(
      f"not enough space for {out}",
      wanted=f"{(total + _SPARE_BYTES) / 1e6:.0f} MB",
      got=f"{free / 1e6:.0f} MB free",
      remedy="free some space or choose another disk",
    )


def _json(value: Mapping[str, Any]) -> bytes:
  return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
