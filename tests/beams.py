"""A beam search on the tiny models: prompts read, searched in one program, told as (score, text, log-probs)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from fixtures import ABE, begin, table_lm

from decoder.cache import Contiguous, LayerSpec
from decoder.models.registry import Network
from decoder.sampling import chain, min_new_tokens, repetition
from decoder.strategies import Early, Plan, Rules, autoregressive, beam, hypotheses, pending, run
from decoder.types import Model

ROWS, NEW = 4, 7
EARLY = {True: Early.FULL, False: Early.HEURISTIC, "never": Early.EXACT}


def rules(rows, *, alpha=1.0, gnmt=False, early=False, patience=1.0, shortest=1, sampled=False, diversity=0.0,
          forced=(), root=-1):  # fmt: skip
  """The same for every row; root may be an array of one a row."""
  fields = (
    np.float32(alpha), np.bool_(gnmt), np.int8(EARLY[early]), np.float32(patience), np.int32(shortest),
    np.bool_(sampled), np.float32(diversity), np.array([*forced, *[-1] * 4][:4], np.int32), np.asarray(root, np.int32),
  )  # fmt: skip
  root_B = np.broadcast_to(np.resize(fields[-1], rows), rows)
  return Rules(*(jnp.broadcast_to(x, (rows, *x.shape)) for x in fields[:-1]), jnp.asarray(root_B))


def numbers(plan, rows, law=None, limits=None):
  """States of law and limits, from the chains' own `init` or from others like them."""
  pair = ((law or plan.law).init(), (limits or plan.limits).init())
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *np.shape(x))), pair)


@functools.cache
def stepped_lm(size: int = 4) -> Network:
  """A TABLE-LM with another table at each position, so that no two texts are equally probable; parameters {"log":
  [24, size, size]}."""

  def forward(params, tokens_BT, positions_BT, cache):
    return params["log"][jnp.clip(positions_BT, 0, 23), tokens_BT], cache.claim(positions_BT)

  model = Model(forward, lambda params, features_BD: features_BD)
  return Network(model, (LayerSpec("global", 1, 1),), size, 24, jnp.float32)


@functools.cache
def strategy_of(model, plan):
  return beam(model, plan)


@functools.cache
def programs(model, plan):
  """Two jitted functions: one that reads what is pending, and one from prompts that have been read to the end."""
  strategy, reader = strategy_of(model, plan), autoregressive(model, chain())

  @jax.jit
  def search(params, fields, settings, rules, forest=None):
    return run(strategy, params, strategy.init(*fields, settings, rules, NEW, forest), NEW, NEW)

  return jax.jit(lambda params, state: reader.forward(params, state)[0]), search


def searched(network, params, plan, prompts, new, *, ends=(), seeds=None, forest=None, law=None, limits=None,
             layout=Contiguous, **named):  # fmt: skip
  """(by prompt the hypotheses, the best first; the Search at its end) for `new` tokens at most.

  law, limits: chains whose numbers are used instead of the plan's own. named: as for `rules`. One program for up to
  ROWS prompts of any lengths up to 24 and up to NEW tokens.
  """
  rows = [*prompts, *[[]] * (ROWS - len(prompts))]
  read, search = programs(network.model, plan)
  lengths = [len(row) + new for row in prompts] + [0] * (ROWS - len(prompts))
  state = begin(
    network, rows, lengths, ends=[*ends, *[-1] * (2 - len(ends))], seeds=[*(seeds or range(ROWS)), *[0] * ROWS][:ROWS],
    capacity=24 + plan.beams * NEW, layout=layout,
  )  # fmt: skip
  if max(map(len, prompts)) > 1:
    state = read(params, pending(state.replace(length_B=state.length_B - 1), jnp.zeros(ROWS, jnp.int32), 24))
  numbers_ = numbers(plan, ROWS, law, limits)
  fields = (state.cache, state.context_BL, state.prompt_B, state.limit_B, state.ends_BE, state.key_B)
  done = search(params, fields, numbers_, rules(ROWS, **named), forest)
  return told(done.state)[: len(prompts)], done.state


def told(search):
  """By row: (score, text, log-probs) of each hypothesis."""
  best = jax.device_get(hypotheses(search))
  rows = []
  for b, scores_W in enumerate(best.score_W):
    texts = []
    for w in np.flatnonzero(scores_W > -np.inf):
      length = int(best.length_W[b, w])
      tokens, each = best.tokens_WN[b, w, :length], best.logprobs_WN[b, w, :length]
      texts.append((float(scores_W[w]), tuple(tokens.tolist()), tuple(each.tolist())))
    rows.append(texts)
  return rows


def agree(got, want, tolerance=1e-4):
  """The same texts in the same order with the same scores and log-probs; rivals within rounding may change places."""
  assert len(got) == len(want), (got, want)
  for mine, other in zip(got, want):
    np.testing.assert_allclose(mine[0], other[0], atol=tolerance, rtol=1e-5)
    if mine[1] != other[1]:
      rivals = [one for one in want if one[1] == mine[1]]
      assert rivals, (mine, want)
      np.testing.assert_allclose(mine[0], rivals[0][0], atol=tolerance, rtol=1e-5)
    else:
      np.testing.assert_allclose(mine[2], other[2], atol=tolerance)


NO_CHAIN = chain()


@functools.cache
def abe():
  return table_lm(ABE)


@functools.cache
def plan(beams, groups=1):
  return Plan(beams, NO_CHAIN, NO_CHAIN, groups)


MANY = Plan(32, chain(repetition(1.0)), chain(min_new_tokens(0)))  # more than there are texts of three of three ids


def pair(prompt_rows, new=6, **named):
  """TABLE-LM with two beams; E ends."""
  return searched(*abe(), plan(2), prompt_rows, new, ends=(3,), **named)[0]


def drawn_tables(seed, size=4, peaked=0.7):
  """Of a `stepped_lm`."""
  return np.random.default_rng(seed).dirichlet(np.full(size, peaked), (24, size))


def logs(tables):
  """The parameters of a `stepped_lm`."""
  return {"log": jnp.log(jnp.asarray(tables, jnp.float32))}


def after(tables, first=0, start=1):
  """`next_logprobs` of a `stepped_lm` after a prompt of `start` tokens, the last of which is `first`."""
  with np.errstate(divide="ignore"):
    log = np.log(np.asarray(tables, np.float64))
  return lambda text: log[start - 1 + len(text), text[-1] if text else first]


def next_of(table):
  """`next_logprobs` of a TABLE-LM after its prompt `^`."""
  with np.errstate(divide="ignore"):
    log = np.log(np.asarray(table, np.float64))
  return lambda text: log[text[-1] if text else 0]


ABE_NEXT = next_of(ABE)
