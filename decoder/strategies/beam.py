"""Beam search: W texts of an example are carried on together, and the best hypotheses that they end in are kept.

The beams of an example are a block of W tokens at one position of one row of the cache (`cache.branching`), so a prompt
is read and stored once, and what orders the beams anew moves no keys or values. `_advance` is written for one example
and mapped over the batch. Log-probs are of the law that `Plan.law` makes of the model's logits. What limits, a trie or
a mask of the host forbid is no candidate, but the rest is not scaled up for it: a score stays a sum of the law's own
log-probs. A forced token adds nothing: there was no choice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from decoder.cache import Cache
from decoder.sampling import Context, Drawn, LogitTransform, noise, nothing
from decoder.sampling.selection import only_if
from decoder.strategies import trie
from decoder.strategies.autoregressive import Finish
from decoder.strategies.beam_rules import Rules, attainable, enough, penalised
from decoder.strategies.candidates import Picked, rank_groups
from decoder.strategies.hypotheses import Hypotheses, merged, none_yet, ordered
from decoder.types import NONE, Array, Emission, Info, Model, Params, Strategy


class Plan(NamedTuple):
  """What a compiled search is made for; all else is data.

  beams: of an example, in `groups` groups of as many each. law: transforms that make probabilities of logits: biases,
  penalties, a temperature. limits: those that only forbid or force; they are given log-probs. vocab_size, inspect: as
  in `autoregressive`; `Drawn.kept_V` are the law's log-probs. width: of the model's logits, wanted where `inspect` is.
  """

  beams: int
  law: LogitTransform
  limits: LogitTransform
  groups: int = 1
  vocab_size: int | None = None
  inspect: Callable[[Drawn], Any] = nothing
  width: int = 0


@struct.dataclass
class Search:
  """What a search threads; every leaf but those of `forest` has a leading row axis, one row an example.

  tokens_BW, positions_BW: each beam's last token, not in the cache yet, and where it goes. context_BWL: each live text,
  prompt included, valid before length_B. prompt_B, limit_B, ends_BE, finish_B, key_B: as in `autoregressive.State`.
  settings: states of law and limits, [B, W, …]. sum_BW: log-probs of live texts; −inf: no text. logprobs_BWN, details:
  of their new tokens. node_BW: where each stands in the forest, NONE where that forbids nothing. best: hypotheses so
  far. count_BG: how many each group has found. open_BG: groups that still look for better ones.
  """

  cache: Cache
  tokens_BW: Array
  positions_BW: Array
  context_BWL: Array
  length_B: Array
  prompt_B: Array
  limit_B: Array
  ends_BE: Array
  finish_B: Array
  key_B: Array
  settings: Any
  rules: Rules
  sum_BW: Array
  logprobs_BWN: Array
  details: Any
  node_BW: Array
  best: Hypotheses
  count_BG: Array
  open_BG: Array
  forest: trie.Forest | None


def beam(model: Model, plan: Plan) -> Strategy:
  """The search as a strategy.

  init is `spread`, without its plan. A step emits nothing until an example's last one, which emits its best hypothesis;
  `hypotheses` has all of them. Logits, and a mask `allowed`, have a row for each beam, B · W. ValueError for beams that
  groups do not divide.
  """
  if plan.beams < 1 or plan.groups < 1 or plan.beams % plan.groups:
    raise ValueError(f"beams must be ≥ 1 and a multiple of groups, got {plan.beams} beams in {plan.groups} groups")

  def forward(params: Params, search: Search) -> tuple[Search, Array]:
    features_BWD, cache = model.forward(params, search.tokens_BW, search.positions_BW, search.cache)
    logits_RV = model.head(params, features_BWD.reshape(-1, features_BWD.shape[-1]))
    return search.replace(cache=cache), logits_RV.astype(jnp.float32)  # f32: sums of log-probs of rare tokens

  def draw(search: Search, logits_RV: Array, allowed_RV: Array | None = None) -> tuple[Search, Emission]:
    def by_beam(x_RV: Array | None) -> Array | None:
      return None if x_RV is None else x_RV.reshape(-1, plan.beams, x_RV.shape[-1])

    def one(search: Search, raw_WV: Array, host_WV: Array | None) -> tuple[Search, Array]:
      return _advance(plan, search, raw_WV, host_WV, forest)

    cache, forest = search.cache, search.forest
    before_B = search.finish_B
    shared = search.replace(cache=None, forest=None)
    search, parents_BW = jax.vmap(one)(shared, by_beam(logits_RV), by_beam(allowed_RV))
    search = search.replace(cache=cache.follow(parents_BW), forest=forest)
    return search, _emission(search, before_B)

  return Strategy(functools.partial(spread, plan), forward, draw)


def spread(
  plan: Plan, cache: Cache, context_BL: Array, length_B: Array, limit_B: Array, ends_BE: Array, key_B: Array,
  settings: Any, rules: Rules, new: int, forest: trie.Forest | None = None,
) -> Search:  # fmt: skip
  """A search whose rows hold prompts of `length_B` tokens in `context_BL`, all read into the cache but the last one.

  Fields are as in `autoregressive.init`. settings: states of (law, limits), leaves [B, …]. rules: leaves [B, …]. new:
  tokens that a text may get at most, limit_B − length_B or more. The cache must have room for the longest prompt and
  plan.beams × (limit − length) tokens; nothing of it is copied. Rows of length 0 are finished from the start.
  """
  batch, beams = length_B.shape[0], plan.beams

  def each(x: Array) -> Array:
    return jnp.repeat(x[:, None], beams, axis=1)

  finish_B = jnp.where(length_B == 0, Finish.RELEASED, jnp.where(length_B >= limit_B, Finish.LENGTH, Finish.RUNNING))
  running_B1 = (finish_B == Finish.RUNNING)[:, None]
  # Equal texts would stay equal: one in each group.
  first_BW = running_B1 & (jnp.arange(beams) % (beams // plan.groups) == 0)[None]
  last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
  search = Search(
    cache=cache.replace(extent_B=jnp.array(limit_B, copy=True)).spread(beams),  # copies: see `autoregressive.init`
    tokens_BW=each(jnp.take_along_axis(context_BL, last_B1, axis=1)[:, 0]),
    positions_BW=jnp.where(first_BW, last_B1, NONE),
    context_BWL=each(context_BL),
    length_B=length_B,
    prompt_B=jnp.array(length_B, copy=True),
    limit_B=limit_B,
    ends_BE=ends_BE,
    finish_B=finish_B.astype(jnp.int8),
    key_B=key_B,
    settings=jax.tree.map(lambda x: each(jnp.asarray(x)), settings),
    rules=rules,
    sum_BW=jnp.where(first_BW, 0.0, -jnp.inf),
    logprobs_BWN=jnp.zeros((batch, beams, new)),
    details=None,
    node_BW=each(rules.root),
    best=jax.tree.map(lambda x: jnp.repeat(x[None], batch, axis=0), none_yet(beams, new)),
    count_BG=jnp.zeros((batch, plan.groups), jnp.int32),
    open_BG=jnp.repeat(running_B1, plan.groups, axis=1),
    forest=forest,
  )
  first, second = (_told_of_none(plan, search, new) for _ in range(2))  # buffers of their own, to be donated
  return search.replace(details=first, best=search.best.replace(details=second))


def hypotheses(search: Search) -> Hypotheses:
  """All that were found, [B, W, …], the best first; score −inf where there are fewer."""
  return jax.vmap(ordered)(search.best)


class _Law(NamedTuple):
  """Of each beam [W, V]: the model's logits, those with −inf where the vocabulary is padded, the law's log-probs, and
  the log-probs of what may follow."""

  raw_WV: Array
  offered_WV: Array
  law_WV: Array
  kept_WV: Array


def _advance(
  plan: Plan, search: Search, raw_WV: Array, host_WV: Array | None, forest: trie.Forest | None
) -> tuple[Search, Array]:
  """One more token for the beams of one example, and by beam the one that it goes on from. Here and below the fields
  of `search` lack the axis B."""
  judged = _judge(plan, search, raw_WV, host_WV, forest)
  sound = jnp.all(jnp.isfinite(jnp.max(raw_WV, axis=1)) | (search.sum_BW == -jnp.inf))
  live, best = rank_groups(_ranks(search, judged.kept_WV), search.ends_BE, plan.groups, search.rules.diversity)
  last = search.length_B + 1 >= search.limit_B
  live, best = (one._replace(there_W=one.there_W & sound) for one in (live, best))
  live = live._replace(there_W=live.there_W & ~last)

  found = _ended(plan, search, judged, best, last)
  pool = merged(search.best, found, plan.groups)
  count_G = search.count_BG + jnp.sum((found.score_W > -jnp.inf).reshape(plan.groups, -1), axis=1, dtype=jnp.int32)
  sum_W = _totals(search, judged, live)
  open_G = search.open_BG & sound & ~_closing(plan, search, sum_W, pool, count_G)
  live = live._replace(there_W=live.there_W & jnp.repeat(open_G, plan.beams // plan.groups))

  parent_W = live.parent_W
  running = search.finish_B == Finish.RUNNING
  settings = _observed(plan, search, judged, live)
  logprobs_WN, details = _recorded(plan, search, judged, live)
  at_L = jnp.arange(search.context_BWL.shape[1])[None] == search.length_B
  search = search.replace(
    tokens_BW=live.token_W,
    positions_BW=jnp.where(live.there_W, search.length_B, NONE),
    context_BWL=jnp.where(at_L, live.token_W[:, None], search.context_BWL[parent_W]),
    length_B=search.length_B + running,
    finish_B=jnp.where(running, _finish(pool, open_G, sound), search.finish_B).astype(jnp.int8),
    settings=settings,
    sum_BW=jnp.where(live.there_W, sum_W, -jnp.inf),
    logprobs_BWN=logprobs_WN,
    details=details,
    node_BW=_walked(forest, search, live),
    best=pool,
    count_BG=count_G,
    open_BG=open_G,
  )
  return search, jnp.where(live.there_W, parent_W, NONE)


def _judge(plan: Plan, search: Search, raw_WV: Array, host_WV: Array | None, forest: trie.Forest | None) -> _Law:
  """What may follow each beam and how probable it is."""
  size = raw_WV.shape[1]
  known_V = jnp.arange(size) < (size if plan.vocab_size is None else plan.vocab_size)
  offered_WV = jnp.where(known_V[None], raw_WV, -jnp.inf)
  key = jax.random.fold_in(search.key_B, search.length_B)

  def one(offered_V: Array, settings: Any, tokens_L: Array) -> tuple[Array, Array]:
    context = Context(tokens_L, search.length_B, search.prompt_B, search.ends_BE, search.limit_B, key)
    law_V = jax.nn.log_softmax(plan.law.update(offered_V, settings[0], context))
    return law_V, plan.limits.update(law_V, settings[1], context)

  law_WV, kept_WV = jax.vmap(one)(offered_WV, search.settings, search.context_BWL)
  forced = _forced(search)
  if forest is not None:
    node_W = jnp.where(forced < 0, search.node_BW, NONE)  # continuations begin after what is forced
    follows_WV = jax.vmap(lambda node: trie.allowed(forest, node, search.ends_BE, size))(node_W)
    kept_WV = jnp.where(follows_WV, kept_WV, -jnp.inf)
  if host_WV is not None:
    kept_WV = jnp.where(host_WV, kept_WV, -jnp.inf)
  only_V = jnp.where(jnp.arange(size) == forced, 0.0, -jnp.inf)
  kept_WV = jnp.where(forced >= 0, only_V[None], kept_WV)
  return _Law(raw_WV, offered_WV, law_WV, kept_WV)


def _forced(search: Search) -> Array:
  """The token that must come next, NONE where it is free."""
  forced_F = search.rules.forced_F
  at_F = jnp.arange(forced_F.shape[0]) == search.length_B - search.prompt_B
  return jnp.max(jnp.where(at_F, forced_F, NONE), initial=NONE)


def _walked(forest: trie.Forest | None, search: Search, live: Picked) -> Array:
  """Where the beams stand in the forest after these tokens."""
  node_W = search.node_BW[live.parent_W]
  if forest is None:
    return node_W
  there_W = jax.vmap(lambda node, token: trie.follow(forest, node, token))(node_W, live.token_W)
  return jnp.where(_forced(search) < 0, there_W, node_W)


def _ranks(search: Search, kept_WV: Array) -> Array:
  """What candidates are ranked by: their sums, and with noise where they are drawn, without putting back (Gumbel-top-k,
  Kool et al. 2019, arXiv:1903.06059, section 2)."""
  beams, size = kept_WV.shape
  sum_W1 = search.sum_BW[:, None]
  rank_WV = jnp.where(sum_W1 > -jnp.inf, sum_W1 + kept_WV, -jnp.inf)
  words = jax.random.key_data(jax.random.fold_in(search.key_B, search.length_B))

  def noisy(rank_WV: Array, words: Array) -> Array:
    return rank_WV + noise(words, jnp.arange(beams * size, dtype=jnp.uint32)).reshape(beams, size)

  return only_if(search.rules.sampled, noisy, rank_WV, words)


def _added(judged: _Law, picked: Picked) -> Array:
  """What each candidate's token adds to its sum."""
  return jnp.where(picked.there_W, judged.kept_WV[picked.parent_W, picked.token_W], 0.0)


def _totals(search: Search, judged: _Law, picked: Picked) -> Array:
  """Their sums, without what only ranks them; −inf for none."""
  total_W = search.sum_BW[picked.parent_W] + _added(judged, picked)
  return jnp.where(picked.there_W, total_W, -jnp.inf)


def _ended(plan: Plan, search: Search, judged: _Law, best: Picked, last: Array) -> Hypotheses:
  """The hypotheses that the best candidates are, where they end a text or there is no room for more."""
  now = search.length_B - search.prompt_B + 1
  ends_W = jnp.any(best.token_W[:, None] == search.ends_BE[None], axis=1)
  score_W = penalised(search.rules, _totals(search, judged, best), now)
  new = search.logprobs_BWN.shape[1]
  at_1N = jnp.arange(new)[None] == now - 1
  context_WN = jnp.take(search.context_BWL, search.prompt_B + jnp.arange(new), axis=1, mode="clip")
  logprobs_WN, details = _recorded(plan, search, judged, best)
  return Hypotheses(
    jnp.where(at_1N, best.token_W[:, None], context_WN[best.parent_W]),
    logprobs_WN,
    jnp.full(best.token_W.shape, now, jnp.int32),
    jnp.where(best.there_W & (ends_W | last), score_W, -jnp.inf),
    jnp.where(ends_W, Finish.STOP, Finish.LENGTH).astype(jnp.int8),
    details,
  )


def _closing(plan: Plan, search: Search, sum_W: Array, pool: Hypotheses, count_G: Array) -> Array:
  """Which groups have found enough, or have no text to go on from."""
  size = plan.beams // plan.groups
  best_G, worst_G = sum_W.reshape(-1, size).max(axis=1), pool.score_W.reshape(-1, size)[:, -1]
  now, most = search.length_B - search.prompt_B + 1, search.limit_B - search.prompt_B
  bound_G = attainable(search.rules, best_G, now, most)
  return enough(search.rules, count_G, size, worst_G, bound_G) | (best_G == -jnp.inf)


def _finish(pool: Hypotheses, open_G: Array, sound: Array) -> Array:
  """How the example stands."""
  best = jnp.argmax(pool.score_W)
  found = jnp.where(pool.score_W[best] > -jnp.inf, pool.finish_W[best], Finish.ERROR)  # everything was forbidden
  return jnp.where(sound, jnp.where(jnp.any(open_G), Finish.RUNNING, found), Finish.ERROR)


def _recorded(plan: Plan, search: Search, judged: _Law, picked: Picked) -> tuple[Array, Any]:
  """log-probs and details of the texts with these tokens at their ends."""
  at = search.length_B - search.prompt_B

  def put(values_WN: Array, newest_W: Array) -> Array:
    here = (jnp.arange(values_WN.shape[1]) == at).reshape(1, -1, *(1,) * (values_WN.ndim - 2))
    return jnp.where(here, newest_W[:, None], values_WN[picked.parent_W])

  told = jax.vmap(plan.inspect)(_drawn(search, judged, picked))
  return put(search.logprobs_BWN, _added(judged, picked)), jax.tree.map(put, search.details, told)


def _drawn(search: Search, judged: _Law, picked: Picked) -> Drawn:
  """The candidates as draws, [W, …]."""
  key = jax.random.fold_in(search.key_B, search.length_B)
  parent_W = picked.parent_W

  def each(x: Array) -> Array:
    return jnp.broadcast_to(x, (parent_W.shape[0], *x.shape))

  tail = (search.length_B, search.prompt_B, search.ends_BE, search.limit_B, key)
  context = Context(search.context_BWL[parent_W], *(each(x) for x in tail))
  settings = jax.tree.map(lambda x: x[parent_W], search.settings)
  views = (judged.raw_WV[parent_W], judged.offered_WV[parent_W], judged.law_WV[parent_W])
  return Drawn(*views, picked.token_W, settings, context)


def _observed(plan: Plan, search: Search, judged: _Law, live: Picked) -> Any:
  """The chains' states after these tokens."""

  def one(settings: Any, token: Array, law_V: Array, kept_V: Array) -> Any:
    law, limits = settings
    return plan.law.observe(law, token, law_V), plan.limits.observe(limits, token, kept_V)

  settings = jax.tree.map(lambda x: x[live.parent_W], search.settings)
  return jax.vmap(one)(settings, live.token_W, judged.law_WV[live.parent_W], judged.kept_WV[live.parent_W])


def _told_of_none(plan: Plan, search: Search, new: int) -> Any:
  """Room for what `inspect` tells of the tokens of a batch."""

  def tell(search: Search, logits_WV: Array, picked: Picked) -> Any:
    law = _Law(logits_WV, logits_WV, logits_WV, logits_WV)
    return jax.vmap(plan.inspect)(_drawn(search, law, picked))

  rows, logits_BWV = search.tokens_BW, jnp.zeros((*search.tokens_BW.shape, plan.width))
  told = jax.eval_shape(jax.vmap(tell), search.replace(cache=None, forest=None), logits_BWV, Picked(rows, rows, rows))
  return jax.tree.map(lambda x: jnp.zeros((*rows.shape, new, *x.shape[2:]), x.dtype), told)


def _emission(search: Search, before_B: Array) -> Emission:
  """The best hypothesis of the examples that have ended in this step."""
  ended_B = (before_B == Finish.RUNNING) & ((search.finish_B == Finish.STOP) | (search.finish_B == Finish.LENGTH))
  index_B = jnp.argmax(search.best.score_W, axis=1)
  best = jax.tree.map(lambda x: jax.vmap(lambda x_W, index: x_W[index])(x, index_B), search.best)
  return Emission(best.tokens_WN, jnp.where(ended_B, best.length_W, 0), Info(search.finish_B, best.details))
