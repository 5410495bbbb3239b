"""Programs compiled for a TPU that is not there: the decode loop of a Llama-3-8B shape, and broken variants of it.

`libtpu` compiles for a described topology on any machine. `ask` runs in a process of its own, whose environment keeps
JAX on the CPU and libtpu away from chips and metadata servers.
"""

import contextlib
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from flax import struct

from decoder.cache import Contiguous
from decoder.measure import compiling, known, shapes, topologies
from decoder.models import registry
from decoder.ops import quantised
from decoder.sampling import chain, min_new_tokens, min_p, repetition, temperature, top_k, top_p
from decoder.strategies import Plan, Rules, autoregressive, beam, run
from decoder.types import Model, QTensor, Strategy

LLAMA_3_8B = known.config("llama-3-8b")
EXPERTS = {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
SLOTS = 2048
PLAN = Plan(4, chain(repetition(1.2)), chain(min_new_tokens(2)))


class Compiled(NamedTuple):
  """cache: bytes of the whole cache. plan: what the compiler plans."""

  cache: int
  plan: compiling.Compiled


class Program(NamedTuple):
  """What to compile. kind: of the weights, one of `quantised.KINDS` or bfloat16. variant: '', 'beams' and 'experts'
  (Mixtral's shape) are ours; 'undonated', 'written out' (weights dequantised before their products), 'two-axis
  scatter', 'reordered' (beams whose rows of cache are) and 'alone' (one row of a table, taken by itself) are broken."""

  kind: str = "int8"
  layers: int = 32
  variant: str = ""
  topology: str = "v5e:2x4"
  rows: int = 8


@struct.dataclass
class TwoAxes(Contiguous):
  """Writes by a scatter over (row, slot) alone, all heads at once."""

  def write(self, buffer, values_BTKH, positions_BT):
    rows, slots = jnp.arange(buffer.shape[0])[:, None], self._slots(positions_BT)
    return buffer.at[rows, :, slots].set(values_BTKH.astype(buffer.dtype), mode="drop")


@contextlib.contextmanager
def compiler():
  """A function Program -> Compiled, in a process whose environment is made for it."""
  with compiling.process() as call:
    yield lambda program: call(ask, program)


def ask(program: Program) -> Compiled:
  """Lowers and compiles for one chip of the topology."""
  config = {**LLAMA_3_8B, **(EXPERTS if program.variant == "experts" else {}), "num_hidden_layers": program.layers}
  network = registry.build(config, jnp.bfloat16)
  params = jax.tree.map(lambda leaf: _stored(leaf.shape, program.kind), registry.parameter_shapes(config))
  model = _written_out(network.model) if program.variant == "written out" else network.model
  link = chain(temperature(0.8), top_k(40), top_p(0.9), min_p(0.05))
  layout = TwoAxes if program.variant == "two-axis scatter" else Contiguous
  case = shapes.Case(program.kind, "bfloat16", program.rows, SLOTS)
  strategy, state = autoregressive(model, link), shapes.state(network, case, layout, link)
  if program.variant == "beams":
    strategy = beam(model, PLAN)
    state = jax.eval_shape(_spread, state)
  elif program.variant == "reordered":
    strategy = _reordered(strategy)
  chip = compiling.devices(topologies.find(program.topology))[0]
  arguments = compiling.on(chip, (params, state, jax.ShapeDtypeStruct((), jnp.int32)))
  donated = () if program.variant == "undonated" else 1
  loop = jax.jit(lambda params, state, limit: run(strategy, params, state, limit, 64), donate_argnums=donated)
  cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache.layers))
  taken = quantised._taken if program.variant == "alone" else quantised.take_rows
  with mock.patch.object(quantised, "take_rows", taken):
    return Compiled(cache, compiling.compiled(loop.lower(*arguments)))


def _stored(shape: tuple[int, ...], kind: str):
  """A parameter's shape and type, the tables in this kind too."""
  if kind not in quantised.KINDS or not quantised.fits(shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  return shapes.stored(shape, kind)


def _spread(state):
  """A search of the first rows, so few that all beams together are as many as the rows otherwise."""
  rows = state.length_B.shape[0] // PLAN.beams
  state = jax.tree.map(lambda leaf: leaf[:rows], state)
  zeros, ones, false = jnp.zeros(rows, jnp.int32), jnp.ones(rows), jnp.zeros(rows, bool)
  rules = Rules(ones, false, zeros.astype(jnp.int8), ones, zeros, false, ones, jnp.full((rows, 8), -1), zeros - 1)
  settings = (PLAN.law.init(), PLAN.limits.init())
  settings = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *jnp.shape(leaf))), settings)
  fields = (state.cache, state.context_BL[:, :512], state.length_B, state.limit_B, state.ends_BE, state.key_B)
  return beam(None, PLAN).init(*fields, settings, rules, 64)


def _reordered(strategy: Strategy) -> Strategy:
  """Beams without our layout: each has a row of cache, which moves."""

  def forward(params, state):
    state, logits_BV = strategy.forward(params, state)
    return state.replace(cache=state.cache.select(jnp.argsort(logits_BV[:, 0]))), logits_BV

  return Strategy(strategy.init, forward, strategy.draw)


def _written_out(model: Model) -> Model:
  """The model on weights that a barrier keeps from being dequantised within their products."""

  def plain(params):
    def of(leaf):
      return quantised.dequantise(leaf, jnp.bfloat16) if isinstance(leaf, QTensor) else leaf

    return jax.lax.optimization_barrier(jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, QTensor)))

  return Model(
    lambda params, *rest: model.forward(plain(params), *rest), lambda params, x: model.head(plain(params), x)
  )


def over_mesh(variant: str, config, case: shapes.Case, topology: topologies.Topology) -> compiling.Compiled:
  """`compiling.decode_loop`, whole ('') or broken: 'turned' (the second product of the MLP divided by its outputs) and
  'gathered' (the whole vocabulary's logits sent to every device)."""
  rules, build = compiling.PARAMETERS, registry.build
  if variant == "turned":
    rules = ((r"mlp/down/weight", ("mlp", None)), *rules)
  elif variant == "gathered":
    build = _gathering
  with mock.patch.object(compiling, "PARAMETERS", rules), mock.patch.object(compiling.registry, "build", build):
    return compiling.decode_loop(config, case, topology)


def _gathering(*arguments, build=registry.build):
  network = build(*arguments)

  def head(params, x):
    return jax.lax.with_sharding_constraint(network.model.head(params, x), jax.sharding.PartitionSpec())

  return network._replace(model=Model(network.model.forward, head))
