"""Decode programs compiled for TPUs that are not there: `libtpu` compiles for a described topology on any machine.

What the compiler plans for one device is told in bytes. Work is done in a process of its own, whose environment keeps
JAX on the CPU and libtpu away from chips and metadata servers.
"""

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding

from decoder import sharding
from decoder.measure import shapes
from decoder.measure.topologies import Topology
from decoder.models import registry
from decoder.programs import LOOP
from decoder.sharding import PARAMETERS, Sharding
from decoder.strategies import autoregressive, run

ENVIRONMENT = {
  "XLA_FLAGS": "",  # those of the caller are for CPU
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # who only compiles need not be alone
}


class Compiled(NamedTuple):
  """Sizes in bytes, as the compiler plans them for one device, and the optimised HLO."""

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  text: str

  @property
  def needed(self) -> int:
    """Bytes of the device's memory while the program runs."""
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def available() -> bool:
  """Whether libtpu is installed."""
  return importlib.util.find_spec("libtpu") is not None


@contextlib.contextmanager
def process() -> Iterator[Callable]:
  """A function (function, *arguments) -> its result, called in a process whose environment is made for compiling. What
  is passed must be importable there. One call at a time."""
  before = {name: os.environ.get(name) for name in ENVIRONMENT}
  os.environ.update(ENVIRONMENT)
  try:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
      yield lambda function, *arguments: pool.submit(function, *arguments).result()
  finally:
    for name, value in before.items():
      os.environ.pop(name) if value is None else os.environ.update({name: value})


def devices(topology: Topology) -> list[Any]:
  """Those of a topology, to compile for. ValueError where JAX describes none."""
  if topology.jax is None:
    raise ValueError(f"only TPUs can be compiled for without having them, not {topology.name}; leave --compile out")
  if not available():
    raise ValueError("compiling for TPUs needs libtpu: pip install 'decoder[tpu]', or pip install libtpu")
  name, options = topology.jax
  return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


def decode_loop(config: Mapping[str, Any], case: shapes.Case, topology: Topology) -> Compiled:
  """The loop over a case's steps; call it by `process`. ValueError where the compiler says that it does not fit."""
  network = registry.build(config, shapes.FLOATS.get(case.weights, jnp.bfloat16))
  params, chips = shapes.parameters(config, case.weights), devices(topology)
  strategy = autoregressive(network.model, shapes.chain())

  def program(params: Any, state: Any, limit: Any) -> Any:
    return run(strategy, params, state, limit, LOOP)

  if not case.sizes:
    arguments = (params, shapes.state(network, case), jax.ShapeDtypeStruct((), jnp.int32))
    lowered = jax.jit(program, donate_argnums=1).lower(*on(chips[0], arguments))
  else:
    over = Sharding(sharding.mesh_of(dict(case.sizes), chips))
    params = jax.tree.map(placed, params, over.shardings(params, PARAMETERS))
    arguments = (params, shapes.state(network, case, over.layout), jax.ShapeDtypeStruct((), jnp.int32))
    lowered = over.jit(program, donate_argnums=1).lower(*arguments)
  return compiled(lowered)


def on(chip: Any, arguments: Any) -> Any:
  """Shapes that lie on one device."""
  return jax.tree.map(lambda leaf: placed(leaf, SingleDeviceSharding(chip)), arguments)


def placed(leaf: jax.ShapeDtypeStruct, where: SingleDeviceSharding | NamedSharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def compiled(lowered: Any) -> Compiled:
  """Compiles for a TPU, and reads off what the compiler plans."""
  with tempfile.TemporaryDirectory() as folder:
    program = _compiled(lowered, {"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
    # Not `as_text`: of a v5p's programs it cannot read back what is given to the sparse cores (libtpu 0.0.52).
    (text,) = Path(folder).glob("*after_codegen.txt")
    optimised = text.read_text(encoding="utf-8")
  plan = program.memory_analysis()
  return Compiled(
    plan.argument_size_in_bytes, plan.output_size_in_bytes, plan.alias_size_in_bytes, plan.temp_size_in_bytes,
    plan.generated_code_size_in_bytes, optimised,
  )  # fmt: skip


def _compiled(lowered: Any, options: Mapping[str, Any]) -> Any:
  try:
    return lowered.compile(compiler_options=dict(options))
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise ValueError(f"the compiler says that it does not fit: {str(error).splitlines()[0]}") from None
