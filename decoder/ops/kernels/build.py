"""Builds the C++ kernels with the machine's own compiler and makes them known to XLA, once a process.

The library is kept in the user's cache directory under a name made of everything it depends on: sources, flags,
compiler, CPU and jaxlib. Building writes aside and renames, so processes may build at once. Without a compiler, or with
one that fails, there is one notice and XLA's own code is used.
"""

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax

SOURCES = Path(__file__).parent / "native"
TARGETS = {  # by XLA's name, the symbol in the library
  "decoder_products": "DecoderProducts",
  "decoder_attend": "DecoderAttend",
  "decoder_tell": "DecoderTell",
  "decoder_ask": "DecoderAsk",
  "decoder_over": "DecoderOver",
}
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-w")
ARCHITECTURE = "-march=native"

_log = logging.getLogger(__name__)
_lock = threading.Lock()


def ready() -> bool:
  """Whether XLA's CPU backend can call the kernels; builds them when first asked.

  False, without building, where the default backend is another: programs of a GPU or TPU host need no CPU kernels.
  False too while a program is traced for several devices: XLA would gather on each what a call takes.
  """
  with _lock:
    return jax.default_backend() == "cpu" and not partitioned() and _registered() is not None


def partitioned() -> bool:
  """Whether what is being traced is for several devices, among which XLA divides it."""
  mesh = jax.sharding.get_abstract_mesh()
  automatic = (size for size, kind in zip(mesh.axis_sizes, mesh.axis_types) if kind == jax.sharding.AxisType.Auto)
  return math.prod(automatic) > 1


def loaded() -> ctypes.CDLL:
  """The library, once it is `ready`."""
  return _registered()


def library(directory: Path) -> Path:
  """The built library in `directory`, which is created; compiles it if it is not there.

  Raises FileNotFoundError without a compiler, subprocess.CalledProcessError where it fails, OSError where it cannot
  write.
  """
  compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
  if compiler is None:
    raise FileNotFoundError(f"none of {', '.join(COMPILERS)} is on the PATH")
  sources = sorted(SOURCES.iterdir())
  parts = [*(source.read_bytes() for source in sources), *(flag.encode() for flag in (*FLAGS, ARCHITECTURE))]
  parts += [jax.lib.__version__.encode(), _cpu(), _run(compiler, "--version")]
  name = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:20]
  target = directory / f"kernels-{name}.so"
  if not target.exists():
    directory.mkdir(parents=True, exist_ok=True)
    _compile(compiler, [str(source) for source in sources if source.suffix == ".cc"], target)
  return target


@functools.cache
def _registered() -> ctypes.CDLL | None:
  try:
    try:
      loaded = ctypes.CDLL(str(library(cache_directory())))
    except FileNotFoundError:  # no compiler
      raise
    except OSError:  # the cache cannot be written: a library of this process alone
      loaded = ctypes.CDLL(str(library(Path(tempfile.mkdtemp(prefix="decoder-kernels-")))))
    for name, symbol in TARGETS.items():
      jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")
  except (OSError, AttributeError, subprocess.SubprocessError) as error:
    said = getattr(error, "stderr", None) or str(error).encode()
    _log.warning(
      "CPU kernels could not be built, decoding will be slower: %s",
      " ".join(said.decode(errors="replace").split())[:200],
    )
    return None
  return loaded


def _compile(compiler: str, sources: list[str], target: Path) -> None:
  with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
    aside = Path(scratch) / target.name
    common = (compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), *sources, "-o", str(aside))
    try:
      _run(*common, ARCHITECTURE)
    except subprocess.CalledProcessError:  # compilers for ARM know the flag as -mcpu, old ones not at all
      _run(*common)
    os.replace(aside, target)


def _run(*command: str) -> bytes:
  return subprocess.run(command, check=True, capture_output=True, timeout=600).stdout


def cache_directory() -> Path:
  """Where this library keeps what can be made again: kernels, models, compiled programs."""
  return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decoder"


def _cpu() -> bytes:
  """What -march=native depends on: a home directory may be shared by unlike machines."""
  try:
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(sorted({x for x in lines if x.startswith((b"flags", b"model name", b"Features"))}))
  except OSError:
    return f"{platform.machine()} {platform.processor()}".encode()
