"""A decode program by shapes alone: what a step is given, of any model on any devices, before anything is loaded.

Nothing is allocated and no device is needed: `jax.eval_shape` gives the shapes, an abstract mesh their division.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from decoder import sharding
from decoder.cache import Codec, Contiguous, Raw, allocate
from decoder.checkpoint.weights import rounded_kind
from decoder.models import registry
from decoder.ops import quantised
from decoder.sampling import LogitTransform, request_key
from decoder.settings import Settings
from decoder.sharding import AXES, Sharding
from decoder.strategies import State, init
from decoder.types import QTensor

FLOATS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float16}
FORMATS = (*FLOATS, *quantised.KINDS)  # of weights
CACHES: dict[str, Codec] = {name: Raw(dtype, bits=True) for name, dtype in FLOATS.items()}
_SHORT = {"bf16": "bfloat16", "f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16"}
_ENDS = 8  # end ids that a row has room for, as in `decoding`


class Case(NamedTuple):
  """What is to be decoded. weights: one of FORMATS; cache: one of CACHES. batch: rows; context: tokens that each may
  reach. sizes: devices by axis of `sharding.AXES`, from `sharding.sizes_for`; empty for one device."""

  weights: str
  cache: str
  batch: int
  context: int
  sizes: tuple[tuple[str, int], ...] = ()


def named(kind: str, known: Sequence[str], what: str) -> str:
  """A format under its full name. ValueError for an unknown one."""
  full = _SHORT.get(kind, kind)
  if full not in known:
    raise ValueError(f"unknown {what} {kind!r}; known are {', '.join(known)}")
  return full


def parameters(config: Mapping[str, Any], weights: str) -> Any:
  """The nested dict of a model's parameters in a format, as ShapeDtypeStructs and QTensors of them; quantised as
  `checkpoint.load` would, floats beside them in bfloat16."""
  return _parameters(json.dumps(config, sort_keys=True), weights)


@functools.lru_cache(8)
def _floats(config: str) -> Any:
  return registry.parameter_shapes(json.loads(config))  # takes seconds where layers are many


@functools.lru_cache(64)
def _parameters(config: str, weights: str) -> Any:
  dtype = FLOATS.get(weights, jnp.bfloat16)

  def held(path: Any, leaf: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    kind = None if weights in FLOATS else rounded_kind(name, leaf.shape, weights)
    return stored(leaf.shape, kind) if kind else jax.ShapeDtypeStruct(leaf.shape, dtype)

  return jax.tree_util.tree_map_with_path(held, _floats(config))


def stored(shape: tuple[int, ...], kind: str) -> QTensor:
  """The shapes of a weight in few bits, by rows."""
  of = quantised.KINDS[kind]
  values = jax.ShapeDtypeStruct(shape, jnp.int8 if of.bits == 8 else jnp.uint4)
  groups = (shape[0], shape[1] // quantised.GROUP) if of.grouped else shape[:1]
  scales = jax.ShapeDtypeStruct(groups, jnp.float16 if of.grouped else jnp.float32)
  return QTensor(values, scales, scales if of.minimum else None, kind, shape, False)


def chain() -> LogitTransform:
  """The transforms of plain requests."""
  return Settings().chain(full=False)


def state(network: registry.Network, case: Case, layout: Any = Contiguous, link: LogitTransform | None = None) -> State:
  """The State that a decode loop threads; of an encoder–decoder, whose source is as long as the context. link: the
  `chain` if not given."""
  return jax.eval_shape(lambda: _begin(network, case, layout, link or chain()))


def _begin(network: registry.Network, case: Case, layout: Any, link: LogitTransform) -> State:
  rows = case.batch
  settings = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *jnp.shape(leaf))), link.init())
  key_B = jax.vmap(request_key)(jnp.arange(rows, dtype=jnp.uint32))
  cache = allocate(network.cache_spec, rows, case.context, layout=layout, codec=CACHES[case.cache], source=case.context)
  context_BL, ends_BE = jnp.zeros((rows, case.context), jnp.int32), jnp.full((rows, _ENDS), -1, jnp.int32)
  length_B, limit_B = jnp.full((rows,), 1, jnp.int32), jnp.full((rows,), case.context, jnp.int32)
  return init(cache, context_BL, length_B, limit_B, ends_BE, key_B, settings)


def abstract(sizes: Mapping[str, int]) -> Sharding:
  """The rules over a mesh of no devices; sizes: of all axes."""
  whole = tuple(sizes.get(axis, 1) for axis in AXES)
  return Sharding(AbstractMesh(whole, AXES, axis_types=(AxisType.Auto,) * len(AXES)))


def divided(tree: Any, over: Sharding, rules: sharding.Rules) -> list[tuple[str, tuple[int, ...], Any]]:
  """(path, shape of one device's part, dtype) of each leaf."""
  placed = jax.tree.leaves(over.shardings(tree, rules))
  named_leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [
    (jax.tree_util.keystr(path, simple=True, separator="/"), place.shard_shape(leaf.shape), leaf.dtype)
    for (path, leaf), place in zip(named_leaves, placed)
  ]
