"""Companions of tiny models: draft models by their tables, a random head; and the laws that they must leave alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from fixtures import CONFIG, D, begin, prompts, rand_lm, table_lm
from scipy import stats

from decoder.cache import allocate
from decoder.models.draft_head import DraftHead, head_config
from decoder.models.llama import LlamaConfig
from decoder.models.registry import initialise
from decoder.sampling import Context, chain, repetition, temperature, top_k, top_p
from decoder.strategies import Accompanied, Head, autoregressive, feature_head, run, second_model

CHAINS = {
  "plain": chain(temperature(1.0)),
  "warm": chain(temperature(1.5)),
  "top_k": chain(temperature(0.8), top_k(4)),
  "top_p": chain(temperature(1.0), top_p(0.85)),
  "repetition": chain(repetition(1.4), temperature(0.9)),
}
DRAWS, BATCH, WIDE = 200_000, 10_000, 8


def laws(seed):
  """Next-token probabilities after each of 8 tokens."""
  table = np.random.default_rng(seed).dirichlet(np.full(WIDE, 0.7), WIDE)
  return (table + 0.003) / (table + 0.003).sum(axis=1, keepdims=True)


def draft_of(network):
  return second_model(network.model, lambda rows, capacity: allocate(network.cache_spec, rows, capacity))


def start(network, companion, rows, limits, transforms, capacity=64, seeds=None, **more):
  state = begin(network, rows, limits, transforms=transforms, capacity=capacity, seeds=seeds, **more)
  return state.replace(cache=Accompanied.around(state.cache, companion.allocate(len(rows), capacity)))


def processed(link, logits_V, context):
  state = begin(table_lm(laws(0))[0], [context], [len(context) + 4], transforms=link)
  one = Context(state.context_BL[0], state.length_B[0], state.prompt_B[0], state.ends_BE[0], state.limit_B[0],
                jax.random.key(0))  # fmt: skip
  return np.asarray(jax.nn.softmax(link.update(jnp.asarray(logits_V, jnp.float32), link.init(), one)), np.float64)


@functools.cache
def expected(name, seed):
  """The law of three tokens, by the chain applied to each prefix."""
  table, link = np.log(laws(seed)), CHAINS[name]
  law = np.zeros((WIDE,) * 3)
  for a, chance in enumerate(processed(link, table[0], [0])):
    if not chance:
      continue
    for b, second in enumerate(processed(link, table[a], [0, a])):
      if second:
        law[a, b] = chance * second * processed(link, table[b], [0, a, b])
  return law


def pvalue(counts, law):
  assert counts[law == 0].sum() == 0, "something impossible was written"
  likely = law * DRAWS >= 5
  found = [*counts[likely], counts[~likely].sum()]
  wanted = np.array([*law[likely], law[~likely].sum()]) * DRAWS
  keep = wanted > 0
  return stats.chisquare(np.array(found)[keep], wanted[keep] * (sum(np.array(found)[keep]) / wanted[keep].sum())).pvalue


# Companions of a model that has features and a cache


@functools.cache
def head_module(seed=3):
  """A random head for RAND-LM, which drafts every second token, and its parameters."""
  module = DraftHead(LlamaConfig.from_dict(head_config(CONFIG, range(0, 64, 2))), jnp.float32)
  params = initialise(module, jax.random.key(seed))
  return module, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)


@functools.cache
def small_head():
  """The same as a companion."""
  module, params = head_module()

  def forward(both, tokens_BT, features_BTD, positions_BT, cache):
    vectors_BTD = both.model["embed"]["weight"][tokens_BT]
    return module.apply({"params": both.companion}, vectors_BTD, features_BTD, positions_BT, cache)

  def logits(both, features_BD):
    return features_BD @ both.model["embed"]["weight"][::2].T

  def spread(both, logits_BR):
    return jnp.full((logits_BR.shape[0], 64), -jnp.inf).at[:, ::2].set(logits_BR)

  spec = module.cache_spec()
  head = Head(lambda rows, capacity: allocate(spec, rows, capacity), forward, logits, D, jnp.float32, spread)
  return feature_head(head), params


def companions(kind):
  """(companion, its parameters): a head, another model, or the model itself."""
  if kind == "head":
    return small_head()
  network, params = rand_lm("gqa" if kind == "another" else "rope")
  return draft_of(network), params


ROWS, LIMITS, SEEDS = prompts([3, 9, 5]), [30, 25, 12], [7, 8, 9]


def plain(link, rows=ROWS, limits=LIMITS):
  network, params = rand_lm()
  strategy = autoregressive(network.model, link)
  state = begin(network, rows, limits, seeds=SEEDS[: len(rows)], transforms=link, capacity=64)
  return jax.jit(lambda p, s: run(strategy, p, strategy.step(p, s)[0], 40, 40).state)(params, state)
