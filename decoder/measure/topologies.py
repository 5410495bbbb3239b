"""What devices there are: memory, speed of memory and of arithmetic, links, by the names that people use.

People's names come in two kinds. v5e-8 and v6e-4 count chips. v4-8, v5p-8 and tpu7x-8 count TensorCores, two a chip,
so that they have 4 chips (https://docs.cloud.google.com/tpu/docs/v5p and /v4: the accelerator type gives the number of
TensorCores; MaxText's table of topologies reads them so too). JAX sees a v4 or v5p chip as one device and a tpu7x chip
as two. Its own names (v5e:2x4) count chips.
"""

import difflib
import re
from typing import Any, NamedTuple

from decoder.measure import machine, roofline

_GB, _GIB, _TERA = 10**9, 1 << 30, 10**12


class Device(NamedTuple):
  """One device, as JAX counts them.

  memory: bytes that programs may use, code and arguments included. bandwidth: of its memory, bytes a second. flops:
  bfloat16, a second. link: bytes a second that it sends over all its links. hop: seconds that a message takes at least
  to a neighbour. source: where the figures are from. fast: bytes of memory near the arithmetic, where a program's own
  arrays may lie; 0 where they do not.
  """

  name: str
  memory: int
  bandwidth: float
  flops: float
  link: float
  hop: float
  source: str
  fast: int = 0

  @property
  def tiled(self) -> bool:
    """Whether arrays in its memory are padded to tiles."""
    return self.name in TPUS


class Topology(NamedTuple):
  """Devices that a model may be divided among. jax: (name, options) for `topologies.get_topology_desc`, None where JAX
  describes none. chips: as they are sold. ring: whether devices have neighbours, or a switch joins all."""

  name: str
  device: Device
  devices: int
  chips: int
  jax: tuple[str, dict[str, Any]] | None
  ring: bool

  def hops(self, devices: int) -> int:
    """Between the farthest two of so many."""
    return 0 if devices == 1 else devices // 2 if self.ring else 1


# Bytes that programs may use: what libtpu 0.0.52 calls the available HBM when a program does not fit. Bandwidth, flops
# and links: Google's pages of each chip, where "bidirectional ICI bandwidth" counts sending and receiving (v4: six
# links of 50 GB/s each way, arXiv:2304.01433). A hop takes 1 µs: https://jax-ml.github.io/scaling-book.
# Fast memory: VMEM, and CMEM of v4, of all cores of a device, from the table in jax/_src/pallas/mosaic/tpu_info.py;
# of the 128 MB of v5p and v6e the draw was seen to take 20 to 50.
_HOP = 1e-6
_PAGES = "https://docs.cloud.google.com/tpu/docs/"
TPUS = {
  "v4": Device("v4", int(30.75 * _GIB), 1200 * _GB, 275 * _TERA, 300 * _GB, _HOP, _PAGES + "v4", 150 << 20),
  "v5e": Device("v5e", int(15.75 * _GIB), 819 * _GB, 197 * _TERA, 200 * _GB, _HOP, _PAGES + "v5e", 128 << 20),
  "v5p": Device("v5p", int(95.73 * _GIB), 2765 * _GB, 459 * _TERA, 600 * _GB, _HOP, _PAGES + "v5p", 20 << 20),
  "v6e": Device("v6e", int(31.24 * _GIB), 1638 * _GB, 918 * _TERA, 400 * _GB, _HOP, _PAGES + "v6e", 20 << 20),
  # half a chip: 7,380 GB/s, 2,307 TFLOP/s and 1,200 GB/s of links are a chip's
  "tpu7x": Device("tpu7x", int(94.74 * _GIB), 3690 * _GB, 1153.5 * _TERA, 300 * _GB, _HOP, _PAGES + "tpu7x", 64 << 20),
}
# SXM modules, dense arithmetic: NVIDIA's data sheets give twice as much "with sparsity". Half a gigabyte is the
# driver's. NVLink's published figure counts both ways.
_SHEETS = "https://www.nvidia.com/en-us/data-center/"
GPUS = {
  "h200": Device("h200", 140_500_000_000, 4800 * _GB, 989.5 * _TERA, 450 * _GB, _HOP, _SHEETS + "h200"),
  "h100": Device("h100", 79_500_000_000, 3350 * _GB, 989.5 * _TERA, 450 * _GB, _HOP, _SHEETS + "h100"),
  "a100": Device("a100", 79_500_000_000, 2039 * _GB, 312 * _TERA, 300 * _GB, _HOP, _SHEETS + "a100"),
}
_ALIASES = {"v5litepod": "v5e", "7x": "tpu7x", "v7x": "tpu7x"}
_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}  # TensorCores a chip, where names count those
_DEVICES = {"tpu7x": 2}  # a chip
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}  # else libtpu describes a v4 chip as two devices
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
SHAPES = {"v4": _DEEP, "v5e": _FLAT, "v5p": _DEEP, "v6e": _FLAT, "tpu7x": ("1x1x1", *_DEEP)}
_HOST = 8  # GPUs that one switch joins


def names() -> list[str]:
  """All names that `find` knows, of people's kind."""
  slices = [f"{kind}-{_chips(shape) * _CORES.get(kind, 1)}" for kind in TPUS for shape in SHAPES[kind]]
  return [*slices, *(f"{kind}-{count}" if count > 1 else kind for kind in GPUS for count in (1, 2, 4, 8)), "cpu"]


def find(name: str) -> Topology:
  """The topology of a name: v5e-8, v5p-8, h200, h200-8, cpu, or one of JAX's own, v5e:2x4. ValueError for others."""
  text = name.strip().lower()
  if text == "cpu":
    return Topology("cpu", _this_machine(), 1, 1, None, False)
  if tpu := re.fullmatch(r"(\w+?)(?:-(\d+)|:([\dx]+))?", text):
    kind, count, shape = _ALIASES.get(tpu[1], tpu[1]), tpu[2], tpu[3]
    if kind in TPUS:
      return _slice(name, kind, count and int(count), shape)
    if kind in GPUS and not shape and 1 <= int(count or 1) <= _HOST:
      return Topology(text, GPUS[kind], int(count or 1), int(count or 1), None, False)
    if kind in GPUS:
      raise ValueError(f"topology {name!r} is not one host; {kind}-1 … {kind}-{_HOST} are what a switch joins")
  near = difflib.get_close_matches(text, names(), 3, 0.5)
  hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names())}"
  raise ValueError(f"unknown topology {name!r}; {hint}")


def larger(topology: Topology) -> list[Topology]:
  """The same devices, more of them, from few to many."""
  kind = topology.device.name
  known = [find(name) for name in names() if name.partition("-")[0] == kind]
  return [other for other in known if other.devices > topology.devices]


def _slice(name: str, kind: str, count: int | None, shape: str | None) -> Topology:
  """count: as people count; shape: as JAX writes it; neither: the smallest there is."""
  cores, shapes = _CORES.get(kind, 1), SHAPES[kind]
  fitting = [s for s in shapes if _chips(s) * cores == count] if count is not None else [shape or shapes[0]]
  if not fitting:
    near = sorted(shapes, key=lambda s: abs(_chips(s) * cores - count))[:2]
    unit = "TensorCores, two a chip" if cores > 1 else "chips"
    hint = " or ".join(f"{kind}-{_chips(s) * cores}" for s in sorted(near, key=_chips))
    raise ValueError(f"there is no topology {name!r}: {kind}-N counts {unit}; the nearest are {hint}")
  if len(fitting[0].split("x")) != len(shapes[-1].split("x")) or not _chips(fitting[0]):
    raise ValueError(f"topology {name!r} wants a shape such as {kind}:{shapes[1]}, got {fitting[0]}")
  chips = _chips(fitting[0])
  described = (f"{kind}:{fitting[0]}", _OPTIONS.get(kind, {}))
  return Topology(f"{kind}-{chips * cores}", TPUS[kind], chips * _DEVICES.get(kind, 1), chips, described, True)


def _chips(shape: str) -> int:
  total = 1
  for side in shape.split("x"):
    total *= int(side or 0)
  return total


def _this_machine() -> Device:
  facts = machine.describe()["machine"]
  bandwidth, flops = roofline.host_speed(64, 5), roofline.host_flops()
  source = f"measured on {facts['cores']} cores of {facts['processor']}"
  return Device("cpu", int(facts["memory_gb"] * _GB), bandwidth, flops, bandwidth, 0.0, source)
