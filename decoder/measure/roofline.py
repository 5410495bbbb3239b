"""How fast could a step be? The bytes that it must read, over the speed at which this machine reads memory.

Decoding reads every weight once a step, whatever the rows, and of each row's cache what is filled. Time below that is
impossible, time above it went elsewhere: a share of the limit says how much. It bounds few rows; many are bound by
arithmetic, which is not counted here.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoder.cache import Codec, LayerSpec, allocate
from decoder.measure.machine import cores
from decoder.ops import quantised
from decoder.types import QTensor

_SLOTS = 256  # of a cache whose bytes are counted: a whole block, so that nothing is padding


def step_bytes(params: Any, spec: Sequence[LayerSpec], codec: Codec, rows: int, held: float) -> int:
  """Bytes that a step must read: weights once, and the cache of `rows` rows that hold `held` tokens each."""
  return weight_bytes(params) + round(rows * cache_bytes(spec, codec, held))


def weight_bytes(params: Any) -> int:
  """Bytes of all weights that a step reads. A table of embeddings beside a head of its own is left out: of it, a step
  looks up one row a token."""
  read = {name: part for name, part in params.items() if name != "embed" or "head" not in params}
  return sum(_size(leaf) for leaf in _leaves(read))


def weight_formats(params: Any) -> str:
  """In which forms weights are held, those with the most bytes first: 'q4_1, q8_0, float32'."""
  sizes: dict[str, int] = {}
  for leaf in _leaves(params):
    name = leaf.kind if isinstance(leaf, QTensor) else leaf.dtype.name
    sizes[name] = sizes.get(name, 0) + _size(leaf)
  return ", ".join(sorted(sizes, key=sizes.get, reverse=True))


def cache_bytes(spec: Sequence[LayerSpec], codec: Codec, held: float) -> float:
  """Bytes of what one row's layers see of `held` tokens; a layer with a window sees no more than that."""
  total = 0.0
  for layer, tokens in ((layer, min(held, layer.window or held)) for layer in spec):
    shapes = jax.eval_shape(lambda layer=layer: allocate((layer,), 1, _SLOTS, codec=codec).layers)
    total += tokens * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)) / _SLOTS
  return total


def read_speed(mib: int = 256, rounds: int = 15) -> float:
  """Bytes a second at which all cores together, or the accelerator, read memory; best of the rounds."""
  return device_speed(mib, rounds) if jax.default_backend() != "cpu" else host_speed(mib, rounds)


def device_speed(mib: int, rounds: int) -> float:
  """The same through XLA, on whatever its default device is."""
  values = jnp.ones(mib << 18, jnp.float32)
  largest = jax.jit(jnp.max)
  largest(values).block_until_ready()
  return values.nbytes / min(_seconds(lambda: largest(values).block_until_ready()) for _ in range(rounds))


def host_speed(mib: int, rounds: int) -> float:
  """The same through numpy, on all cores."""
  parts = np.array_split(np.ones(mib << 18, np.float32), cores())
  with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
    best = min(_seconds(lambda: list(pool.map(np.max, parts))) for _ in range(rounds))
  return sum(part.nbytes for part in parts) / best


def host_flops(size: int = 512, rounds: int = 5) -> float:
  """Float32 operations a second of numpy's matrix product, on all cores; best of the rounds."""
  values = np.ones((size, size), np.float32)
  return 2 * size**3 / min(_seconds(lambda: values @ values) for _ in range(rounds))


def _seconds(work: Callable[[], Any]) -> float:
  start = time.perf_counter()
  work()
  return time.perf_counter() - start


def _leaves(params: Any) -> list:
  return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def _size(leaf: Any) -> int:
  return quantised.nbytes(leaf.shape, leaf.kind) if isinstance(leaf, QTensor) else leaf.nbytes
