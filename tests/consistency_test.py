"""The matrix: model × layout × codec × strategy. A new one of any is one line here.

Every cell must write what the reference writes: the model without a cache, recomputing the whole text for every token.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import VARIANTS, begin, blocks_of, cache_for, prompts, ragged, rand_lm

from decoder.cache import Raw
from decoder.sampling import chain, temperature
from decoder.strategies import autoregressive, run

MODELS = [*VARIANTS]
LAYOUTS = {"contiguous": blocks_of(256), "small blocks": blocks_of(5)}
CODECS = {"raw": Raw(jnp.float32), "bfloat16": Raw(jnp.bfloat16), "bits": Raw(jnp.bfloat16, bits=True)}
CLEAR = {"raw": 1e-3, "bfloat16": 3e-2, "bits": 3e-2}  # a margin that what a codec loses cannot turn
GREEDY = chain(temperature(0.0))
STRATEGIES = {"autoregressive": lambda network: autoregressive(network.model, GREEDY)}

ROWS, NEW = prompts([3, 11]), 10
_EVERYDAY = {
  (model, "small blocks", "raw", "autoregressive") for model in ("absolute", "mixed", "dynamic", "experts")
} | {("rope", "contiguous", "raw", "autoregressive")}
CELLS = [
  pytest.param(*cell, marks=[] if cell in _EVERYDAY else pytest.mark.slow, id="-".join(cell))
  for cell in itertools.product(MODELS, LAYOUTS, CODECS, STRATEGIES)
]


def margins(model, rows):
  """By row: the largest logit's id after each prefix, and its margin over the second, all in one uncached pass."""
  network, params = rand_lm(model)

  @jax.jit
  def forward(tokens_BT, positions_BT):
    cache = cache_for(network, len(rows), 24).replace(extent_B=jnp.array([len(row) for row in rows]))
    features, _ = network.model.forward(params, tokens_BT, positions_BT, cache)
    return jax.vmap(lambda x: network.model.head(params, x), 1, 1)(features)

  tokens, positions = ragged(rows)
  logits = np.asarray(forward(tokens, positions))
  top = np.sort(logits, axis=-1)
  return logits.argmax(-1), top[..., -1] - top[..., -2]


@pytest.mark.parametrize(("model", "layout", "codec", "strategy"), CELLS)
def test_every_combination_writes_what_the_model_says(model, layout, codec, strategy):
  network, params = rand_lm(model)
  plan = STRATEGIES[strategy](network)
  state = begin(
    network, ROWS, [len(r) + NEW for r in ROWS], transforms=GREEDY, capacity=24,
    layout=LAYOUTS[layout], codec=CODECS[codec],
  )  # fmt: skip

  @jax.jit
  def program(params, state):
    state, _ = plan.step(params, state)  # reads the prompts
    return run(plan, params, state, NEW, NEW).state

  done = program(params, state)
  assert done.length_B.tolist() == [len(r) + NEW for r in ROWS]
  written = [np.asarray(done.context_BL)[b, len(row) : len(row) + NEW].tolist() for b, row in enumerate(ROWS)]
  best, margin = margins(model, [row + new for row, new in zip(ROWS, written)])
  for b, row in enumerate(ROWS):
    at = slice(len(row) - 1, len(row) - 1 + NEW)
    agree = best[b, at] == np.array(written[b])
    assert agree[margin[b, at] > CLEAR[codec]].all()
    assert agree.mean() >= 0.9, "few near ties"
