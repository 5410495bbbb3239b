"""From a name or a path to parameters on the device."""

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decoder.checkpoint import memory, orbax
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.gguf import open_gguf
from decoder.checkpoint.mapping import unflatten
from decoder.checkpoint.progress import progress_bar
from decoder.checkpoint.safetensors import open_huggingface
from decoder.checkpoint.source import Source, Tensor, check, expected_shapes
from decoder.checkpoint.weights import KEEP, check_weights, kind_of, read_quantised
from decoder.sharding import OneDevice, Placement


class Checkpoint(NamedTuple):
  """A loaded model, before anything is built from it.

  config: as a Hugging Face config.json. generation: as generation_config.json, or {}.
  tokenizer: None if the checkpoint has none; token ids still work then.
  params: nested dict on the default device, arrays and QTensors, named as `models.registry.parameter_shapes` does.
  path: the file or directory that it came from. placement: where they lie.
  """

  name: str
  config: dict[str, Any]
  generation: dict[str, Any]
  tokenizer: Any
  params: dict[str, Any]
  path: Path
  placement: Placement = OneDevice()


def load(
  name: str | Path,
  dtype: Any = None,
  *,
  weights: str | None = None,
  cache_dir: str | Path | None = None,
  progress: bool = True,
  placement: Callable[[Mapping[str, Any]], Placement] = lambda config: OneDevice(),
) -> Checkpoint:
  """Loads a model by registered name, path (GGUF file, Hugging Face or Orbax directory) or `hf:org/name[@revision]`.

  dtype: of all parameters; None is float32 on CPU, where XLA's dots are slow in anything else, bfloat16 elsewhere.
  weights: None for floats; 'keep' for the bits of the file where they are of a kind that `ops.quantised` knows; a kind
  to round to it what is not of that kind already. Norms, biases and widths that are no multiple of 32 stay floats; with
  4 bits, embedding and head are rounded to 8.
  Weights of an Orbax directory already as asked are memory-mapped on CPU and never copied; what is copied lies on huge
  pages, where the system has them. placement: config -> where the parameters go. Raises CheckpointError.
  """
  from decoder.checkpoint.hub import resolve

  check_weights(weights)
  path = resolve(name, cache_dir=cache_dir, progress=progress, kept=weights == KEEP)
  source = open_checked(path)
  placed = placement(source.config)
  return Checkpoint(
    name=str(name) if not Path(name).exists() else Path(name).resolve().stem,
    config=source.config,
    generation=source.generation,
    tokenizer=source.tokenizer(),
    params=place(source, dtype, weights, progress, placed),
    path=path,
    placement=placed,
  )


def read_generation(
  name: str | Path, *, weights: str | None = None, cache_dir: str | Path | None = None
) -> dict[str, Any]:
  """A model's generation_config.json, {} where it has none. Fetches the model if need be, in the form that `load` with
  these `weights` would, and loads none of them."""
  from decoder.checkpoint.hub import resolve

  return open_source(resolve(name, cache_dir=cache_dir, kept=weights == KEEP)).generation


def open_checked(path: Path) -> Source:
  """Opens a checkpoint of any format and checks that it holds just the tensors of its config's model."""
  source = open_source(path)
  return source if source.checked else check(source, expected_shapes(source.config))


def open_source(path: Path) -> Source:
  """Opens a GGUF file, a Hugging Face directory or an Orbax directory. Reads names and shapes, no weights."""
  if path.is_file() and path.suffix == ".safetensors":
    raise CheckpointError(f"{path} has no config", wanted="its directory", remedy=f"name {path.parent} instead")
  if path.is_file():
    return open_gguf(path)
  if not path.is_dir():
    raise CheckpointError(f"{path} does not exist", remedy="check the path")
  if (path / orbax.MANIFEST).is_file():
    return orbax.open_orbax(path)
  if (path / "config.json").is_file():
    return open_huggingface(path)
  ggufs = sorted(file.name for file in path.glob("*.gguf"))
  raise CheckpointError(
    f"{path} is no checkpoint directory",
    wanted="config.json and model.safetensors, or manifest.json",
    got=", ".join(sorted(entry.name for entry in path.iterdir())[:4]) or "an empty directory",
    remedy=f"name the file itself, {path / ggufs[0]}" if ggufs else "fetch or convert the model",
  )


def place(
  source: Source, dtype: Any, weights: str | None = None, progress: bool = True, placement: Placement | None = None
) -> dict[str, Any]:
  """Reads all tensors in parallel and puts them on their devices, as the nested dict of parameters."""
  import jax

  from decoder.ops.kernels import build

  if dtype is None:
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
  placement = placement or OneDevice()
  striped = weights is not None and placement.alone and build.ready()  # the order that the CPU kernels stream
  room, tensors = memory.Room(), source.tensors

  def put(path: str, tensor: Tensor) -> Any:
    kind = kind_of(path, tensor, weights)
    value = read_quantised(tensor, kind, striped) if kind else tensor.read()
    as_stored = source.stable and tensor.kind == kind and (kind or value.dtype == dtype)
    copy = np.asarray if as_stored else lambda part: room.copy(part, part.dtype if kind else dtype)
    value = placement.put(path, value, copy)
    advance(tensor.size * dtype.itemsize)
    return value

  total = sum(tensor.size for tensor in tensors.values()) * dtype.itemsize
  with (
    progress_bar(total, f"loading {source.path.name}", progress) as advance,
    concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
  ):
    # Transfers run in the background; waiting makes "loaded" mean it, in time and in memory.
    return jax.block_until_ready(unflatten(dict(zip(tensors, pool.map(put, tensors, tensors.values())))))
