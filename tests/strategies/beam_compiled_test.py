"""What must stay true of the compiled search: a reordering of beams moves no keys or values."""

import jax
import jax.numpy as jnp
import pytest
from beams import numbers, rules
from fixtures import begin, rand_lm
from sources import tiny

from decoder.cache import CROSS, allocate
from decoder.sampling import chain, min_new_tokens, repetition
from decoder.strategies import Plan, autoregressive, beam, run

SLOTS, BEAMS = 8192, 4  # the cache dwarfs all else
PLAN = Plan(BEAMS, chain(repetition(1.2)), chain(min_new_tokens(2)))


def sizes(program, *arguments):
  """(the compiled program's plan of memory, bytes of a layer's cache, bytes of all)."""
  plan = jax.jit(program, donate_argnums=1).lower(*arguments).compile().memory_analysis()
  layers = arguments[1].cache.layers
  layer = sum(x.nbytes for x in jax.tree.leaves(layers[0]))
  return plan, layer, layer * len(layers)


def started(rows=1):
  network, params = rand_lm()
  state = begin(network, [[1]] * rows, [32] * rows, capacity=SLOTS)
  context_BL = state.context_BL[:, :64]  # of the texts; the cache alone is large
  fields = (state.cache, context_BL, state.length_B, state.limit_B, state.ends_BE, state.key_B)
  strategy = beam(network.model, PLAN)
  return strategy, params, strategy.init(*fields, numbers(PLAN, rows), rules(rows), 31)


def test_a_search_updates_the_cache_in_place():
  strategy, params, search = started()
  plan, layer, cache = sizes(lambda p, s: run(strategy, p, s, 31, 31), params, search)
  assert plan.alias_size_in_bytes >= cache
  assert plan.temp_size_in_bytes < layer // 2


def test_what_was_read_of_a_source_is_not_copied_for_its_beams():
  """The cross cache stays one row a text, however many beams look at it."""
  network, params = tiny("nllb")
  cache = allocate(network.cache_spec, 1, 64, source=SLOTS)
  fields = (jnp.ones((1, 64), jnp.int32), *(jnp.full(1, n, jnp.int32) for n in (1, 32)), jnp.full((1, 1), 2, jnp.int32))
  plan = Plan(BEAMS, chain(), chain())
  strategy = beam(network.model, plan)
  search = strategy.init(cache, *fields, jax.random.key_data(jax.random.split(jax.random.key(0), 1)), numbers(plan, 1),
                         rules(1), 31)  # fmt: skip
  memory = jax.jit(lambda p, s: run(strategy, p, s, 31, 31), donate_argnums=1).lower(params, search).compile()
  memory = memory.memory_analysis()
  read = [
    x.nbytes for spec, layer in zip(network.cache_spec, cache.layers) if spec.group == CROSS for x in layer.values()
  ]
  assert memory.alias_size_in_bytes >= sum(read)
  assert memory.temp_size_in_bytes < read[0]


def test_reordering_rows_of_a_cache_would_copy_it():
  """Negative control: a row of cache for each beam, and `select` by parents in each step."""
  network, params = rand_lm()
  strategy = autoregressive(network.model, chain())
  state = begin(network, [[1]] * BEAMS, [32] * BEAMS, capacity=SLOTS)

  def reordered(params, state):
    def step(_, state):
      state, logits_BV = strategy.forward(params, state)
      parents_R = jnp.argsort(logits_BV[:, 0])
      return state.replace(cache=state.cache.select(parents_R))

    return jax.lax.fori_loop(0, 5, step, state)

  plan, layer, _ = sizes(reordered, params, state)
  assert plan.temp_size_in_bytes >= layer // 2


@pytest.mark.parametrize("rows", [1, 2])
def test_bytes_of_a_reordering(rows):
  """The table's, not the cache's."""
  cache = started(rows)[2].cache
  whole = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
  parents = jnp.zeros((rows, BEAMS), jnp.int32)

  def moved(change, *arguments):
    layouts_only = jax.jit(lambda cache, *rest: jax.tree.leaves(change(cache, *rest))).lower(cache, *arguments)
    return layouts_only.compile().cost_analysis()["bytes accessed"]

  following = moved(lambda cache, parents: cache.follow(parents).layouts, parents)
  copying = moved(lambda cache, rows_R: cache.select(rows_R), jnp.arange(rows))
  assert following < whole / 2
  assert copying > whole
