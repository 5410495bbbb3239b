"""What must stay true of compiled code: nothing recompiles beyond the buckets, and no step copies the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import Letters, begin, facade, prompts, rand_lm

from decoder.cache import Contiguous
from decoder.ops import quantised
from decoder.ops.kernels import build
from decoder.sampling import chain, min_p, temperature, top_k, top_p
from decoder.strategies import autoregressive, run


class Compilations:
  """Counts what the backend compiles while open."""

  def __enter__(self):
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def _listen(self, event, seconds, **_):
    self.count += event.endswith("backend_compile_duration")

  def __exit__(self, *_):
    unregister = getattr(jax.monitoring, "unregister_event_duration_listener", None)
    if unregister:
      unregister(self._listen)


def test_the_counter_counts():
  """Negative control."""
  with Compilations() as compiled:
    jax.jit(lambda x: x * 3 + 1)(jnp.zeros(7))
  assert compiled.count >= 1


def test_C122_nothing_recompiles_beyond_the_buckets():
  """Prompts of 1 … 200 tokens and changing settings: one program a power of two from 16 to 256, one loop, one begin."""
  lm = facade(*rand_lm(), Letters.build())
  rows = prompts(list(range(1, 201)), size=60)
  settings = [
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=5, seed=1, max_new_tokens=2),
    dict(temperature=1.3, top_p=0.9, min_p=0.1, ignore_eos=True),
    dict(temperature=1e-3, top_k=-1, top_p=0.5, stop=("AB", "C")),
  ]
  with Compilations() as compiled:
    for number, row in enumerate(rows):
      lm.generate(row, **{"max_new_tokens": 4, **settings[number % 4]})
  assert compiled.count <= 5 + 1 + 1
  with Compilations() as compiled:
    for row in rows[::23]:
      "".join(lm.stream(row, max_new_tokens=7, temperature=0.9, seed=5))
  assert compiled.count == 0


def rounded(params, kind):
  """The parameters with all weights that fit in few bits."""
  return jax.tree.map(
    lambda leaf: (
      quantised.quantise(np.asarray(leaf), kind, striped=build.ready()) if quantised.fits(leaf.shape) else leaf
    ),
    params,
  )


def memory(donate, kind=None):
  """Sizes of the decode step's compiled program at a capacity where the cache dwarfs all else."""
  network, params = rand_lm()
  params = rounded(params, kind) if kind else params
  link = chain(temperature(1.0), top_k(3), top_p(0.9), min_p(0.1))
  strategy = autoregressive(network.model, link)
  state = begin(network, [[1]], [100], transforms=link, capacity=8192, layout=Contiguous)
  program = jax.jit(lambda p, s, n: run(strategy, p, s, n, 64), donate_argnums=1 if donate else ())
  analysis = program.lower(params, state, jnp.int32(5)).compile().memory_analysis()
  layer = sum(x.nbytes for x in jax.tree.leaves(state.cache.layers[0]))
  return analysis, layer, layer * len(state.cache.layers)


@pytest.mark.parametrize("kind", [None, "int8", "q4_1"])
def test_a_step_updates_the_cache_in_place(kind):
  analysis, layer, cache = memory(donate=True, kind=kind)
  assert analysis.alias_size_in_bytes >= cache
  assert analysis.temp_size_in_bytes < layer


def test_without_donation_the_cache_is_copied():
  """Negative control."""
  analysis, _, cache = memory(donate=False)
  assert analysis.alias_size_in_bytes < cache
  assert analysis.output_size_in_bytes >= cache


@pytest.mark.parametrize("field", ["tokens", "positions"])
def test_padding_and_lengths_are_data(field):
  """Other tokens and other raggedness run the same program."""
  network, params = rand_lm()
  strategy = autoregressive(network.model, chain(temperature(0.0)))
  step = jax.jit(strategy.step)
  step(params, begin(network, prompts([3, 9]), [20, 20]))
  with Compilations() as compiled:
    rows = prompts([3, 9], seed=5) if field == "tokens" else prompts([9, 1])
    state = begin(network, rows, [20, 20])
    compiled.count = 0
    step(params, state)
  assert compiled.count == 0
