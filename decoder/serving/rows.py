"""What of a request travels, once its prompt has been read? Its row of the State, and of the cache the filled slots.

A `Row` is a State of one row whose cache is cut to what it holds. It is a pytree like any other: `jax.device_put` moves
it between the devices of a process, `pack` and `unpack` make of it plain data with buffers, and back. How the bytes get
from one process to another is `transfer`'s business.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder.cache import LayerSpec
from decoder.programs import bucket
from decoder.sharding import Placement
from decoder.strategies import State, cut
from decoder.types import NONE, Emission

SMALLEST = 64  # slots of a row that moves between devices, at least; more come in powers of two, each a compilation


class Row(NamedTuple):
  """A request between its prompt and its first step of decoding.

  state: of one row, `slots_for(tokens)` slots of cache and one token more of context. emission: the first token.
  """

  state: State
  emission: Emission


class Leaf(NamedTuple):
  """One array of a tree, as a peer is told of it. dtype: numpy's name, or of a random key JAX's, which travels as its
  bits."""

  path: str
  shape: tuple[int, ...]
  dtype: str


def slots_for(tokens: int) -> int:
  """Slots that a row of so many tokens has while it moves between devices: the next power of two, 64 or more."""
  return bucket(tokens, SMALLEST)


def kv_bytes(spec: Sequence[LayerSpec], tokens: int, itemsize: int) -> int:
  """Bytes of the keys and values of so many tokens: tokens × Σ over layers of kv_heads × head_dim × 2 × itemsize."""
  return tokens * sum(layer.kv_heads * layer.head_dim for layer in spec) * 2 * itemsize


def shapes_of(state: State, emitted: Emission, slots: int) -> Row:
  """The shapes of a Row for this State's batch. emitted: what reading a prompt emits for it."""
  one = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[:1], tree), (state, emitted))
  return Row(jax.eval_shape(lambda state: cut(state, slots), one[0]), one[1])


def across(row: Row, placement: Placement) -> Row:
  """The Row where programs of this placement run, from numpy or from other devices of this process; rounded up to
  `slots_for(tokens)` slots. Returns before the bytes have moved."""
  alone = jax.local_devices()[0] if placement.alone else None
  return row._replace(state=jax.device_put(row.state, alone or placement.shardings(row.state)))


def pack(tree: Any) -> tuple[list[Leaf], list[np.ndarray]]:
  """A pytree of arrays as plain data and numpy arrays, in the same order."""
  paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0])
  names = [_dtype(leaf) for leaf in leaves]
  plain = jax.device_get([jax.random.key_data(x) if _is_key(x) else x for x in leaves])
  arrays = [np.ascontiguousarray(x) for x in plain]
  return [Leaf(_path(p), x.shape, name) for p, x, name in zip(paths, arrays, names)], arrays


def pack_row(row: Row) -> tuple[list[Leaf], list[np.ndarray]]:
  """`pack` of a Row with exactly what it holds: no slot more. One that has ended with its first token needs none."""
  state = _on_host(row.state)
  held = held_by(state)
  state = state.replace(cache=state.cache.trim(held), context_BL=state.context_BL[:, : int(state.length_B[0])])
  return pack(Row(state, row.emission))


def held_by(state: State) -> int:
  """Slots that a Row's cache must bring along: all tokens but the one drawn last; none if it has ended with that."""
  return int(state.length_B[0]) - 1 if int(state.finish_B[0]) == 0 else 0


class Room(NamedTuple):
  """Memory for a tree that is on its way. tree: of numpy arrays to be filled. parts: the memory, in the order in which
  the bytes of each leaf come; of a leaf with more room than it needs, a part for each stretch of it."""

  tree: Any
  parts: list[list[memoryview]]

  def whole(self) -> Any:
    """The tree, once its memory is filled: keys are keys again."""

    def key(x: Any) -> Any:
      return jax.random.wrap_key_data(x.bits) if isinstance(x, _Key) else x

    return jax.tree.map(key, self.tree, is_leaf=lambda x: isinstance(x, _Key))


class _Key(NamedTuple):
  """A random key's bits, of JAX's own default kind."""

  bits: np.ndarray


def room_for(described: Sequence[Leaf], like: Any) -> Room:
  """Memory for a tree of the structure and types of `like` (arrays or shapes), in the shapes that are described.

  Where `like` is a Row, what depends on its slots gets as many as `like` has, so that few shapes are ever compiled for.
  ValueError for any other structure or type, or for more than there is room for.
  """
  flat, structure = jax.tree_util.tree_flatten_with_path(like)
  wanted, got = [_path(path) for path, _ in flat], [leaf.path for leaf in described]
  if wanted != got:
    odd = next((pair for pair in zip(wanted, got) if pair[0] != pair[1]), (f"{len(wanted)} arrays", f"{len(got)}"))
    raise ValueError(f"wanted {odd[0]}, got {odd[1]}: the peer holds rows of another kind; give both the same settings")
  memory, parts = [], []
  for leaf, (_, model) in zip(described, flat):
    array = _memory(leaf, model)
    held = array.bits if isinstance(array, _Key) else array
    memory.append(array)
    parts.append(_stretches(held, tuple(leaf.shape)))
  return Room(jax.tree.unflatten(structure, memory), parts)


def _memory(leaf: Leaf, model: Any) -> Any:
  """An array for the leaf: of `model`'s shape in a Row's cache and context, else of its own."""
  shape, wanted = tuple(leaf.shape), tuple(model.shape)
  if leaf.dtype != _dtype(model):
    raise ValueError(f"{leaf.path}: wanted {_dtype(model)}, got {leaf.dtype}; give both the same --dtype and settings")
  if _is_key(model):
    bits = jax.eval_shape(jax.random.key_data, model)
    if shape != bits.shape:
      raise ValueError(f"{leaf.path}: wanted a key of {bits.shape} numbers, got {shape}")
    return _Key(np.empty(bits.shape, bits.dtype))
  dtype, padded = np.dtype(model.dtype), leaf.path.startswith(("state/cache/", "state/context_BL"))
  if len(shape) != len(wanted) or (padded and any(size > most for size, most in zip(shape, wanted))):
    raise ValueError(f"{leaf.path}: there is room for {wanted}, got {shape}; give both the same capacity")
  if not padded or shape == wanted:
    return np.empty(shape, dtype)
  positions = np.issubdtype(dtype, np.signedinteger)  # or other whole numbers, which no position leads to
  return np.full(wanted, NONE, dtype) if positions else np.zeros(wanted, dtype)


def _stretches(array: np.ndarray, shape: tuple[int, ...]) -> list[memoryview]:
  """The memory of `array[:shape[0], :shape[1], …]`, as far as possible in one piece. ValueError where several axes are
  shorter."""
  shorter = [axis for axis, (size, most) in enumerate(zip(shape, array.shape)) if size < most]
  if len(shorter) > 1:
    raise ValueError(f"wanted an array that is shorter than {array.shape} along one axis, got {shape}")
  if math.prod(shape) == 0:
    return []
  if not shorter:
    return [_bytes(array)]
  axis = shorter[0]
  return [_bytes(array[index][: shape[axis]]) for index in np.ndindex(shape[:axis])]


def _bytes(array: np.ndarray) -> memoryview:
  return memoryview(array.reshape(-1).view(np.uint8))


def buffer_of(array: np.ndarray) -> memoryview:
  """A packed array's bytes."""
  return _bytes(array) if array.size else memoryview(b"")


def _on_host(state: State) -> State:
  return jax.device_get(state.replace(key_B=None)).replace(key_B=state.key_B)


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _dtype(x: Any) -> str:
  return str(x.dtype) if _is_key(x) else np.dtype(x.dtype).name


def _path(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
