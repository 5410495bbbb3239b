"""Does a model fit on devices that are not at hand, and how fast could it decode there? By shapes alone.

What a device holds follows from the rules of `decoder.sharding`: each leaf's part of parameters and state, padded as a
TPU pads it. The time of a step is the least that memory, arithmetic and links allow (a roofline, Williams et al. 2009,
doi:10.1145/1498765.1498785): what a device must read over its bandwidth, or its arithmetic if that takes longer, and
then the sums over devices, which wait for each other. A real step takes longer. `measure.compiling` confirms the bytes.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from decoder import sharding
from decoder.measure import shapes, tiles
from decoder.measure.shapes import Case
from decoder.measure.topologies import Topology
from decoder.models import registry
from decoder.ops.quantised import KINDS
from decoder.sharding import AXES, PARAMETERS, STATE

_CACHE = "cache/layers/"
_TABLES = r"(embed|head)/weight(/values)?$"
_BLOCK = 256  # slots that attention reads at once; less than one for each device of `sequence` makes no sense


class Need(NamedTuple):
  """Bytes of one device. rest: of the state but for its cache: tokens, positions, settings. code: the program."""

  weights: int
  cache: int
  rest: int
  temporaries: int
  code: int

  @property
  def arguments(self) -> int:
    return self.weights + self.cache + self.rest

  @property
  def total(self) -> int:
    return sum(self)


class Speed(NamedTuple):
  """Seconds of a step at least: for reading memory, for arithmetic meanwhile, and for sums over links."""

  memory: float
  arithmetic: float
  links: float

  @property
  def step(self) -> float:
    return max(self.memory, self.arithmetic) + self.links

  @property
  def bound(self) -> str:
    """What takes the most of it."""
    return max(("links", "arithmetic", "memory"), key=lambda name: getattr(self, name))


class Plan(NamedTuple):
  """What a case comes to. fits: whether the device's memory holds it. tokens_per_s: of all rows, at most."""

  case: Case
  need: Need
  speed: Speed
  fits: bool
  tokens_per_s: float

  @property
  def mesh(self) -> str:
    """As it is written for --mesh."""
    sizes = dict(self.case.sizes)
    sizes["tensor"] = sizes.get("tensor", 1) * sizes.pop("group", 1)
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


class _Weights(NamedTuple):
  """Of one device. held: bytes; read: (bytes, whether of an expert) that a step reads; products: likewise, of weights
  that a token is multiplied by; sums: how many values of a token each sum over devices has. vocabulary: tokens whose
  logits it computes. copied: bytes of a table in another order."""

  held: int
  read: dict[bool, float]
  products: dict[bool, float]
  sums: tuple[int, ...]
  vocabulary: int
  copied: int


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
  """Plans for one model on one topology. ValueError for what the registry does not know."""

  config: Mapping[str, Any]
  topology: Topology

  def plan(self, case: Case) -> Plan:
    need, speed = self.need(case), self.speed(case)
    return Plan(case, need, speed, need.total <= self.topology.device.memory, case.batch / speed.step)

  def case(self, weights: str, cache: str, batch: int, context: int, mesh: Mapping[str, int]) -> Case:
    """A case over a mesh of sizes by axis, as `sharding.parse` gives them. ValueError where the model does not allow
    it."""
    whole = sharding.sizes_for(mesh, self.network.cache_spec, self._heads, self.topology.devices)
    if batch % whole["data"]:
      raise ValueError(f"data={whole['data']} does not divide a batch of {batch}; use one of its divisors")
    if whole["expert"] > 1 and (not self._experts or self._experts % whole["expert"]):
      raise ValueError(f"expert={whole['expert']} does not divide the {self._experts} experts that each layer has")
    sizes = tuple((axis, whole[axis]) for axis in AXES) if self.topology.devices > 1 else ()
    return Case(weights, cache, batch, context, sizes)

  def candidates(self, weights: str, cache: str, batch: int, context: int) -> list[Plan]:
    """All meshes that the model allows, the best first: those that fit, then by the time of a step, and by memory."""
    plans = []
    for sizes in factorisations(self.topology.devices, ("data", "expert", "sequence", "tensor")):
      if sizes["sequence"] > max(1, context // _BLOCK):
        continue
      try:
        plans.append(self.plan(self.case(weights, cache, batch, context, sizes)))
      except ValueError:  # this mesh is none for the model
        continue
    return sorted(plans, key=lambda plan: (not plan.fits, plan.speed.step, plan.need.total))

  def best(self, weights: str, cache: str, batch: int, context: int) -> Plan | None:
    """The best mesh, None where the model allows none."""
    plans = self.candidates(weights, cache, batch, context)
    return plans[0] if plans else None

  def notes(self, case: Case) -> list[str]:
    """What more than one device holds, and why."""
    sizes, over = dict(case.sizes), shapes.abstract(dict(case.sizes))
    told = []
    if sizes.get("group", 1) > 1:
      heads = min(layer.kv_heads for layer in self.network.cache_spec)
      tensor = sizes["tensor"] * sizes["group"]
      told.append(
        f"tensor={tensor} is more than divides the {heads} key/value heads: keys, values and their weights are each "
        f"held by {sizes['group']} devices"
      )
    if sizes.get("data", 1) > 1:
      told.append(f"data={sizes['data']}: weights are held {sizes['data']} times")
    if sizes.get("sequence", 1) > 1:
      told.append(f"sequence={sizes['sequence']}: weights are held by each of its {sizes['sequence']} devices")
    if not self.suits(case.weights):
      told.append(
        f"{case.weights}: the TPUs' compiler writes weights in groups out, which takes memory and time that are not "
        "counted here; int8 is read as it is"
      )
    return told + over.notes(shapes.parameters(self.config, case.weights), PARAMETERS)

  def suits(self, weights: str) -> bool:
    """Whether the devices read weights in this format where they lie."""
    return not (self.topology.device.tiled and weights in KINDS and KINDS[weights].grouped)

  def need(self, case: Case) -> Need:
    """Bytes of one device while a decode loop runs."""
    of, tiled = _weights(self, case.weights, case.sizes), self.topology.device.tiled
    cache = rest = 0
    layers = len(self.network.cache_spec)
    beside = of.copied + tiles.small(layers) if tiled else 0  # what the compiler adds for tiles' sake
    for path, shape, dtype, count in self._state(case):
      held = count * self._held(shape, dtype)
      cache, rest = (cache + held, rest) if path.startswith(_CACHE) else (cache, rest + held)
      beside += count * tiles.turned(shape, dtype) if tiled and path.startswith(_CACHE) else 0
    logits = case.batch // self._size(case, "data") * of.vocabulary * 4
    temporaries = beside + tiles.drawing(logits, self.topology.device.fast)
    return Need(of.held, cache, rest, temporaries, tiles.code(layers))

  def speed(self, case: Case) -> Speed:
    """The least time of a step whose rows hold all tokens of their context."""
    device, of = self.topology.device, _weights(self, case.weights, case.sizes)
    rows, part = case.batch // self._size(case, "data"), self._chosen(case)
    seen, scores = self._attended(case)
    read = of.read[False] + of.read[True] * (1 - (1 - part) ** rows) + seen
    products = 2 * rows * (of.products[False] + of.products[True] * part) + scores
    links = sum(self._sum(rows * width * 2, self._size(case, "tensor", "group", "expert")) for width in of.sums)
    if self._size(case, "sequence") > 1:
      links += sum(self._sum(rows * width * 4, self._size(case, "sequence")) for width in self._merged(case))
    return Speed(read / device.bandwidth, products / device.flops, links)

  @functools.cached_property
  def network(self) -> registry.Network:
    return registry.build(self.config)

  @functools.cached_property
  def _heads(self) -> list[int]:
    return sharding.query_heads(shapes.parameters(self.config, "bfloat16"), self.network.cache_spec)

  @property
  def _experts(self) -> int:
    return self.config.get("num_local_experts") or self.config.get("num_experts") or 0

  def _chosen(self, case: Case) -> float:
    """The share of experts that one token goes to."""
    return self.config.get("num_experts_per_tok", 1) / self._experts if self._experts else 0.0

  def _size(self, case: Case, *axes: str) -> int:
    return math.prod(dict(case.sizes).get(axis, 1) for axis in axes)

  def _held(self, shape: tuple[int, ...], dtype: Any) -> int:
    return tiles.padded(shape, dtype) if self.topology.device.tiled else tiles.plain(shape, dtype)

  def _state(self, case: Case) -> list[tuple[str, tuple[int, ...], Any, int]]:
    """(path, a device's part, type, how many of them) of the state's leaves. Layers that are alike are one."""
    alike = collections.Counter(self.network.cache_spec)
    over = shapes.abstract(dict(case.sizes))
    held = _state(self, case._replace(sizes=()), tuple(alike), over.layout)
    counts = list(alike.values())
    return [(*part, _count(part[0], counts)) for part in shapes.divided(held, over, STATE)]

  def _attended(self, case: Case) -> tuple[float, float]:
    """Bytes of the cache that a device reads in a step, and its arithmetic for attention."""
    seen = scores = 0.0
    heads = max(self._heads) / self._size(case, "tensor", "group")
    layers = list(dict.fromkeys(self.network.cache_spec))
    for path, shape, dtype, count in self._state(case):
      if path.startswith(_CACHE):
        window = layers[int(path.removeprefix(_CACHE).partition("/")[0])].window or case.context
        share = count * min(1.0, window / case.context)
        seen += share * tiles.plain(shape, dtype)
        scores += 2 * share * shape[0] * heads * shape[-2] * shape[-1]
    return seen, scores

  def _merged(self, case: Case) -> Iterator[int]:
    """Values of a token that each layer's softmax over the sequence's devices adds up."""
    heads = max(self._heads) // self._size(case, "tensor", "group")
    return (heads * (layer.head_dim + 2) for layer in self.network.cache_spec)

  def _sum(self, size: int, devices: int) -> float:
    """Seconds of an all-reduce of so many bytes."""
    device = self.topology.device
    share = 2 * (devices - 1) / devices
    return share * size / device.link + self.topology.hops(devices) * device.hop


@functools.lru_cache(256)
def _state(planner: Planner, case: Case, layers: tuple[Any, ...], layout: Any) -> Any:
  """The state of a case whose model has only these layers."""
  return shapes.state(planner.network._replace(cache_spec=layers), case, layout)


def _count(path: str, counts: list[int]) -> int:
  """How many leaves the one of this path stands for."""
  return counts[int(path.removeprefix(_CACHE).partition("/")[0])] if path.startswith(_CACHE) else 1


@functools.lru_cache(4096)
def _weights(planner: Planner, weights: str, sizes: tuple[tuple[str, int], ...]) -> _Weights:
  params = shapes.parameters(planner.config, weights)
  parts = shapes.divided(params, shapes.abstract(dict(sizes)), PARAMETERS)
  looked_up = "embed/" if "head" in params else None  # of it a step reads a row a token
  read, products, sums = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}, []
  for path, shape, dtype in parts:
    if (looked_up and path.startswith(looked_up)) or path.startswith("encoder/"):
      continue
    expert = "experts/" in path
    read[expert] += tiles.plain(shape, dtype)
    if re.search(r"weight(/values)?$", path) and len(shape) > 1:
      products[expert] += math.prod(shape)
    if re.search(r"(/o|down)/weight(/values)?$", path):
      sums.append(planner.config.get("hidden_size") or planner.config.get("d_model") or shape[0])
  held = sum(planner._held(shape, dtype) for _, shape, dtype in parts)
  tables = {path.partition("/")[0]: (shape, dtype) for path, shape, dtype in parts if re.match(_TABLES, path)}
  vocabulary = tables.get("head", tables["embed"])[0][0]
  return _Weights(held, read, products, tuple(sums), vocabulary, tiles.turned(*tables["embed"]))


def factorisations(number: int, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
  """All ways to write a number as a product of sizes with these names."""
  divisors = [size for size in range(1, number + 1) if number % size == 0]
  for sizes in itertools.product(divisors, repeat=len(names)):
    if math.prod(sizes) == number:
      yield dict(zip(names, sizes))
