"""What must stay true of the compiled loop that guesses ahead: it copies no cache, of the model or its companion."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest
from companions import companions, small_head, start
from fixtures import begin, rand_lm

from decoder.sampling import chain, temperature
from decoder.strategies import Both, accompanied, branching, drafted, drafting, lookup, run, speculative, unread

SLOTS = 8192  # the cache dwarfs all else
LINK = chain(temperature(0.0))


def lookups():
  network, params = rand_lm()
  proposer = lookup(1)
  state = begin(network, [[1]], [100], transforms=drafting(LINK, proposer.init), capacity=SLOTS)
  state = state.replace(context_BL=state.context_BL[:, :128], tokens_BT=state.tokens_BT[:, -1:],
                        positions_BT=state.positions_BT[:, -1:])  # fmt: skip
  return speculative(network.model, LINK, proposer, 7), params, state, 8


def accompanied_by(kind, tree=()):
  network, params = rand_lm()
  companion, more = small_head() if kind == "head" else companions(kind)
  proposer = drafted(companion, LINK, None, 0.0)
  memory = unread(tree, 32, jnp.float32) if tree else proposer.init
  state = start(network, companion, [[1]], [100], drafting(LINK, memory), capacity=SLOTS)
  state = state.replace(context_BL=state.context_BL[:, :128])
  if tree:
    return branching(network.model, companion, LINK, tree), Both(params, more), state, len(tree) + 1
  return speculative(accompanied(network.model, companion), LINK, proposer, 3), Both(params, more), state, 4


CASES = {
  "lookup": lookups,
  "head": lambda: accompanied_by("head"),
  "draft": lambda: accompanied_by("another"),
  "tree": lambda: accompanied_by("head", (2, 2)),
}


def compiled(strategy, params, state, most):
  program = jax.jit(lambda p, s, n: run(strategy, p, s, n, 4 * most), donate_argnums=1)
  return program.lower(params, state, jnp.int32(3)).compile()


def copies(program, state):
  """How often a buffer as large as a layer's keys is copied."""
  sizes = {
    ",".join(map(str, x.shape)) for x in jax.tree.leaves(state.cache) if x.nbytes >= SLOTS * 8 * 4 and x.ndim == 4
  }
  found = re.findall(r"= \w+\[([\d,]+)\][^=]* copy\(", program.as_text())
  return sum(one in sizes for one in found)


@pytest.mark.parametrize("case", CASES)
def test_the_cache_is_updated_in_place(case):
  strategy, params, state, most = CASES[case]()
  program = compiled(strategy, params, state, most)
  buffers = [x.nbytes for x in jax.tree.leaves(state.cache) if x.ndim == 4]
  assert program.memory_analysis().alias_size_in_bytes >= sum(buffers)
  assert program.memory_analysis().temp_size_in_bytes < min(buffers)
  assert copies(program, state) == 0


def test_rollback_to_an_old_cache_would_copy_it(monkeypatch):
  """Negative control. On JAX 0.10 a `lax.switch` over block lengths copies too; 0.12 has learned to do without."""
  module = sys.modules["decoder.strategies.speculative"]
  read = module._read

  def guarded(model, params, state, size):
    raw_BJV, cache = read(model, params, state, size)
    fine = jnp.all(jnp.isfinite(raw_BJV))
    return raw_BJV, jax.tree.map(lambda new, old: jnp.where(fine, new, old), cache, state.cache)

  monkeypatch.setattr(module, "_read", guarded)
  strategy, params, state, most = lookups()
  program = compiled(strategy, params, state, most)
  least = min(x.nbytes for x in jax.tree.leaves(state.cache) if x.ndim == 4)
  assert copies(program, state) > 0 or program.memory_analysis().temp_size_in_bytes >= least
