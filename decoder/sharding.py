"""Where arrays lie when one device is not enough: rules by the names of leaves, and shardings at the edge of `jit`.

A parameter or a buffer of a cache is known by its path. Ordered rules give its axes logical names (heads, mlp, vocab,
rows, slots, …), and a table says over which axes of the mesh those are divided; XLA's partitioner (GSPMD, Xu et al.
2021, arXiv:2105.04663) does the rest. With `tensor`, layers are divided as in Megatron (Shoeybi et al. 2019,
arXiv:1909.08053): two all-reduces each. Models, caches and strategies know nothing of it, but for `cache.Spread`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decoder.cache import CROSS, Cache, Contiguous, LayerSpec, Spreading
from decoder.types import Array, Emission

AXES = ("data", "expert", "sequence", "tensor", "group")  # of every mesh; those not asked for have size 1

# Over which axes of the mesh a logical axis is divided. Query heads of one key/value head lie side by side, so that
# where the key/value heads are too few for all devices, `group` divides their queries further.
DIVIDED = {
  "rows": ("data",),
  "slots": ("sequence",),
  "kv_heads": ("tensor",),
  "heads": ("tensor", "group"),
  "mlp": ("tensor", "group"),
  "vocab": ("tensor", "group"),
  "experts": ("expert", "tensor", "group"),  # of [experts · mlp, …]: an expert's rows lie side by side
  "expert": ("expert",),
}

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]
Copy = Callable[[np.ndarray], np.ndarray]

# What a leaf's axes are, by the first pattern that its path contains; what no rule knows, each device holds whole. A
# QTensor's parts have the axes of the weight.
PARAMETERS: Rules = (
  (r"experts/(gate|up)/", ("experts",)),  # [E·F, D]
  (r"experts/down/", ("expert", "mlp")),  # [E·D, F]
  (r"(attention|cross)/q/", ("heads",)),  # [N·H, D]
  (r"(attention|cross)/[kv]/", ("kv_heads",)),
  (r"(attention|cross)/o/weight", (None, "heads")),
  (r"mlp/(gate|up)/", ("mlp",)),  # [F, D]
  (r"mlp/down/weight", (None, "mlp")),
  (r"(embed|head)/weight", ("vocab",)),  # [V, D]
  (r"relative/table/weight", (None, "heads")),
)
STATE: Rules = (
  (r"emission/", ()),  # the host reads it, all of it
  (r"layers/cross/", ("rows", "kv_heads")),  # buffers of a cache, [B, K, S, H]
  (r"layers/own/", ("rows", "kv_heads", "slots")),
  (r"layouts/cross/", ("rows",)),
  (r"layouts/\w+/positions_BS", ("rows", "slots")),
  (r"layouts/\w+/positions_BWS", ("rows", None, "slots")),
  (r"", ("rows",)),
)


class Placement(Protocol):
  """Where a model's arrays lie and its programs run.

  rows: what batches are multiples of. layout: has `allocate(batch, capacity)`, for caches. alone: whether programs run
  on one device, so that kernels of our own and calls back to the host have a place in them. jit: like `jax.jit`, for
  `lower`. put: (path, numpy array or QTensor of them) -> the parameter on the device; copy: makes what is kept of an
  array, which the device then takes over, by default the array itself. fetch: a pytree as numpy arrays.
  """

  rows: int
  layout: Any
  alone: bool

  def jit(self, program: Callable, donate_argnums: Any = None) -> Any: ...
  def put(self, path: str, value: Any, copy: Copy = np.asarray) -> Any: ...
  def fetch(self, tree: Any) -> Any: ...


class OneDevice:
  """The default device."""

  rows, layout, alone = 1, Contiguous, True

  def jit(self, program: Callable, donate_argnums: Any = None) -> Any:
    return jax.jit(program, donate_argnums=donate_argnums)

  def put(self, path: str, value: Any, copy: Copy = np.asarray) -> Any:
    # On CPU an array aligned to 64 bytes becomes the buffer itself, here a mapped file or a copy of our own. JAX keeps
    # it alive as long as the buffer and copies before it would write to it (donation).
    return jax.device_put(jax.tree.map(copy, value), may_alias=True)

  def fetch(self, tree: Any) -> Any:
    return jax.device_get(tree)


@dataclasses.dataclass(frozen=True)
class Sharding:
  """A Placement over a mesh of axes AXES, from `mesh_for`. heads, mlp and the like that `tensor` does not divide are
  held whole by every device; `notes` tells which."""

  mesh: Mesh
  alone = False

  @property
  def rows(self) -> int:
    return self.mesh.shape["data"]

  @property
  def layout(self) -> Any:
    return Spreading(self.mesh) if self.mesh.shape["sequence"] > 1 else Contiguous

  def specs(self, tree: Any, rules: Rules = STATE) -> Any:
    """A PartitionSpec for each leaf of what a program threads (State, Cache, Emission), or of a model's parameters with
    `rules` PARAMETERS. Leaves may be arrays or ShapeDtypeStructs."""
    return jax.tree.unflatten(
      jax.tree.structure(tree), [self._spec(path, leaf.shape, rules) for path, leaf in _named(tree)]
    )

  def shardings(self, tree: Any, rules: Rules = STATE) -> Any:
    """The same as NamedShardings."""

    def over(spec: PartitionSpec) -> NamedSharding:
      return NamedSharding(self.mesh, spec)

    return jax.tree.map(over, self.specs(tree, rules), is_leaf=lambda node: isinstance(node, PartitionSpec))

  def notes(self, tree: Any, rules: Rules = STATE) -> list[str]:
    """What the rules would divide and the mesh does not, with the sizes that do not go."""
    found = {}
    for path, leaf in _named(tree):
      for axis, (name, size) in enumerate(zip(_logical(path, leaf.ndim, rules), leaf.shape)):
        parts = self._parts(name)
        if size % parts:
          kind = re.sub(r"layers_\d+", "layers_*", path)
          found[f"{kind}: {name} of {size} (axis {axis}) do not divide by {parts}, so each device holds all"] = None
    return list(found)

  def jit(self, program: Callable, donate_argnums: Any = None) -> "_Meshed":
    return _Meshed(self, program, donate_argnums)

  def put(self, path: str, value: Any, copy: Copy = np.asarray) -> Any:
    """Each device gets its part; of a mapped file no more than those parts are read, and no more is copied."""

    def place(inner: tuple, part: np.ndarray) -> Array:
      if part.dtype == jnp.uint4 and self.mesh.devices.flat[0].platform == "cpu":
        part = part.astype(np.uint8)  # JAX's calls of compiled programs refuse divided arrays of 4 bits there
      spec = self._spec(f"{path}/{_joined(inner)}", part.shape, PARAMETERS)
      return jax.make_array_from_callback(part.shape, NamedSharding(self.mesh, spec), lambda index: copy(part[index]))

    return jax.tree_util.tree_map_with_path(place, value)

  def fetch(self, tree: Any) -> Any:
    """What other processes hold a part of is gathered, by all of them together; the rest lies here."""

    def whole(leaf: Any) -> Any:
      here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
      return leaf if here else multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))

  def _spec(self, path: str, shape: tuple[int, ...], rules: Rules) -> PartitionSpec:
    axes = []
    for name, size in zip(_logical(path, len(shape), rules), shape):
      over = tuple(axis for axis in DIVIDED.get(name, ()) if self.mesh.shape[axis] > 1)
      axes.append(over if over and size % self._parts(name) == 0 else None)
    return PartitionSpec(*axes)

  def _parts(self, name: str | None) -> int:
    return math.prod(self.mesh.shape[axis] for axis in DIVIDED.get(name, ()))


class _Meshed:
  """A program to be compiled for a mesh, with outputs where the rules want them. `lower` takes arrays on the mesh,
  numpy arrays, of which each device gets a copy, and shapes, which are taken to come out of such a program."""

  def __init__(self, sharding: Sharding, program: Callable, donate_argnums: Any):
    @functools.wraps(program)
    def placed(*arguments: Any) -> Any:
      out = program(*arguments)
      return jax.lax.with_sharding_constraint(out, sharding.shardings(out))

    self._sharding, self._jitted = sharding, jax.jit(placed, donate_argnums=donate_argnums)

  def lower(self, *arguments: Any) -> Any:
    with jax.set_mesh(self._sharding.mesh):
      return self._jitted.lower(*self._described(arguments))

  def _described(self, arguments: Any) -> Any:
    mesh, by_rule = self._sharding.mesh, self._sharding.shardings(jax.tree.map(_shape, arguments))

    def describe(leaf: Any, placed: NamedSharding) -> jax.ShapeDtypeStruct:
      if isinstance(getattr(leaf, "sharding", None), NamedSharding):
        placed = leaf.sharding
      elif not isinstance(leaf, jax.ShapeDtypeStruct):
        placed = NamedSharding(mesh, PartitionSpec())
      return jax.ShapeDtypeStruct(np.shape(leaf), _shape(leaf).dtype, sharding=placed)

    return jax.tree.map(describe, arguments, by_rule)


def parse(text: str, devices: int) -> dict[str, int]:
  """Sizes by axis from 'tensor=4,data=2'; one axis may come without a size and takes the devices that are left.
  ValueError for what is no mesh of so many devices."""
  sizes: dict[str, int | None] = {}
  for part in filter(None, re.split(r"[,+]", text.replace(" ", ""))):
    name, _, size = part.partition("=")
    if name == "pipeline":
      raise ValueError(
        "pipeline is not offered: decoding one token at a time, all stages but one would wait for it; use tensor"
      )
    if name not in AXES[:4] or name in sizes or not re.fullmatch(r"[1-9]\d*|", size):
      raise ValueError(f"a mesh is written as {', '.join(f'{axis}=N' for axis in AXES[:4])}, got {text!r}")
    sizes[name] = int(size) if size else None
  rest = [name for name, size in sizes.items() if size is None]
  known = math.prod(size for size in sizes.values() if size)
  if not sizes or len(rest) > 1 or devices % known or (not rest and known != devices):
    wanted = f"{text or 'nothing'} asks for {known} devices" + (f" times {rest[0]}" if rest else "")
    raise ValueError(f"mesh {wanted}, and there are {devices}; the sizes must multiply to that")
  return {name: size or devices // known for name, size in sizes.items()}


def mesh_for(
  sizes: Mapping[str, int], spec: Sequence[LayerSpec], heads: Sequence[int], devices: Sequence[Any] | None = None
) -> Mesh:
  """A mesh for a model whose cache is `spec` and whose layers have so many query heads, see `sizes_for`."""
  devices = list(jax.devices() if devices is None else devices)
  return mesh_of(sizes_for(sizes, spec, heads, len(devices)), devices)


def mesh_of(whole: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
  """A mesh of these devices by the sizes of all AXES, from `sizes_for`."""
  sizes = tuple(whole[axis] for axis in AXES)
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=list(devices))


def sizes_for(
  sizes: Mapping[str, int], spec: Sequence[LayerSpec], heads: Sequence[int], devices: int
) -> dict[str, int]:
  """The sizes of all AXES.

  Where `tensor` is more than divides the key/value heads, what is left divides the queries of each (axis `group`), and
  keys and values are held by each device of a group. ValueError where the query heads do not divide: the model would
  be held whole by every device, and be no faster.
  """
  whole = {axis: sizes.get(axis, 1) for axis in AXES}
  tensor = whole["tensor"]
  whole["tensor"] = math.gcd(tensor, *(layer.kv_heads for layer in spec))
  whole["group"] = tensor // whole["tensor"]
  for count in set(heads):
    if count % tensor:
      fitting = [n for n in range(1, count + 1) if count % n == 0 and n <= devices]
      raise ValueError(
        f"tensor={tensor} does not divide {count} heads; use one of {', '.join(map(str, fitting))}, and data for the "
        "other devices"
      )
  if math.prod(whole.values()) != devices:
    raise ValueError(f"a mesh of {dict(sizes)} needs {math.prod(whole.values())} devices, got {devices}")
  return whole


def query_heads(shapes: Mapping[str, Any], spec: Sequence[LayerSpec]) -> list[int]:
  """Query heads of each attention, from the shapes of a model's parameters."""
  (head_dim,) = {layer.head_dim for layer in spec}
  return [leaf.shape[0] // head_dim for path, leaf in _named(shapes) if re.search(r"(attention|cross)/q/weight", path)]


def _named(tree: Any) -> list[tuple[str, Any]]:
  """Leaves by path, in their order. Of a cache, layers are called by what they hold."""

  def special(node: Any) -> bool:
    return isinstance(node, Emission | Cache) and node is not tree

  found = []
  for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=special):
    name = _joined(path)
    if special(node):
      kind = "emission/" if isinstance(node, Emission) else ""
      found += [(kind + inner, leaf) for inner, leaf in _named(node)]
    else:
      found.append((_by_group(name, tree.spec) if isinstance(tree, Cache) else name, node))
  return found


def _joined(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _by_group(path: str, spec: Sequence[LayerSpec]) -> str:
  layer = re.match(r"layers/(\d+)/", path)
  if not layer:
    return path
  return f"layers/{CROSS if spec[int(layer[1])].group == CROSS else 'own'}/{path[layer.end() :]}"


def _logical(path: str, ndim: int, rules: Rules) -> tuple[str | None, ...]:
  """The logical names of a leaf's axes."""
  axes = next((axes for pattern, axes in rules if re.search(pattern, path)), ())
  return (*axes, *(None,) * ndim)[:ndim]


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
  return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
