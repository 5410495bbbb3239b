"""What was measured on: processor, cores, versions; and the most memory that was held."""

import datetime
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from decoder.ops.kernels import build

_VECTORS = ("avx512f", "avx2", "asimd", "neon")  # the widest first


def describe() -> dict[str, Any]:
  """Plain data for a report: machine, versions, date (UTC) and, in a checkout, the commit."""
  device = jax.local_devices()[0]
  return {
    "machine": {
      "processor": _processor(),
      "cores": cores(),
      "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
      "device": device.device_kind,
      "devices": jax.local_device_count(),
      "kernels": build.ready(),
    },
    "versions": {"python": platform.python_version(), **{n: _version(n) for n in ("jax", "jaxlib", "numpy", "flax")}},
    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    "commit": _commit(),
  }


def line(facts: dict[str, Any]) -> str:
  """`describe()` in one line, for a title."""
  machine, versions = facts["machine"], facts["versions"]
  where = f"{machine['cores']} core{'s' * (machine['cores'] > 1)} of {machine['processor']}"
  if machine["device"] != "cpu":
    where = f"{machine['devices']} × {machine['device']}"
  commit = f", commit {facts['commit']}" if facts.get("commit") else ""
  return f"{where}, JAX {versions['jax']}, {facts['date']} UTC{commit}"


def cores() -> int:
  """Processors that this process may run on."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
  """Bytes held at most since `forget_peak`: of the device where it tells (since its start), else of this process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  try:  # ru_maxrss survives exec, so it may be that of whoever started this process
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
  except (OSError, IndexError):
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> bool:
  """Begins to watch memory anew; false where the system does not let a process do that."""
  try:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
  except OSError:
    return False
  return True


def _processor() -> str:
  """Name, family and model (vendors call many the same), and the widest vectors."""
  try:
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    told = {name.strip(): value.strip() for name, _, value in lines}
  except OSError:
    return platform.processor() or platform.machine()
  name = told.get("model name", platform.machine())
  if "cpu family" in told:
    name += f" (family {told['cpu family']} model {told.get('model', '?')})"
  flags = (told.get("flags") or told.get("Features") or "").split()
  widest = next((vector for vector in _VECTORS if vector in flags), None)
  return name + (f" {widest.upper()}" if widest else "")


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit() -> str | None:
  """The commit of the checkout that this file lies in, + where tracked files differ from it."""
  root = Path(__file__).resolve().parents[2]
  if not (root / ".git").exists():
    return None
  command = ("git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=7")
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  return done.stdout.strip() or None
