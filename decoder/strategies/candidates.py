"""Which continuations a beam search keeps: for one group of beams, then for the groups of an example in turn.

A candidate is a beam and a token. Candidates are ranked jointly over all beams of a group, of equals the lower beam and
then the lower id first. The best that do not end a text live on, so that no beam is lost to an end; those that end one
are finished only if they are among the group's best candidates of all kinds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decoder.sampling.selection import head
from decoder.types import Array


class Picked(NamedTuple):
  """Candidates, best first. there_W: whether it is one; there may be fewer than beams."""

  parent_W: Array
  token_W: Array
  there_W: Array


def rank(rank_WV: Array, ends_E: Array) -> tuple[Picked, Picked]:
  """(those that live on, the best of all kinds), as many as beams each. rank_WV: what they are ranked by; −inf is
  impossible. ends_E: the ids that end a text, and NONE."""
  beams = rank_WV.shape[0]
  # Of any beam so many hold as many that go on as there are beams, whichever of them are ends.
  value_WC, token_WC = jax.vmap(lambda rank_V: head(rank_V, beams + ends_E.shape[0]))(rank_WV)
  ends_WC = jnp.any(token_WC[..., None] == ends_E[None, None], axis=-1)

  def best(value_WC: Array) -> Picked:
    value_W, at_W = _top(value_WC.reshape(-1), beams)
    parent_W, token_W = at_W // value_WC.shape[1], jnp.take(token_WC.reshape(-1), at_W)
    return Picked(parent_W.astype(jnp.int32), token_W.astype(jnp.int32), value_W > -jnp.inf)

  return best(jnp.where(ends_WC, -jnp.inf, value_WC)), best(value_WC)


def rank_groups(rank_WV: Array, ends_E: Array, groups: int, diversity: Array) -> tuple[Picked, Picked]:
  """`rank` for each group after the other: a token that beams of earlier groups took at this step loses `diversity` for
  each of them (Vijayakumar et al. 2016, arXiv:1610.02424, Hamming diversity)."""
  if groups == 1:
    return rank(rank_WV, ends_E)
  beams, size = rank_WV.shape
  each = beams // groups

  def one(taken_V: Array, rank_PV: Array) -> tuple[Array, tuple[Picked, Picked]]:
    live, best = rank(rank_PV - diversity * taken_V[None], ends_E)
    return taken_V.at[jnp.where(live.there_W, live.token_W, size)].add(1.0, mode="drop"), (live, best)

  _, picked = lax.scan(one, jnp.zeros(size, jnp.float32), rank_WV.reshape(groups, each, size))
  offset_G1 = jnp.arange(groups, dtype=jnp.int32)[:, None] * each

  def together(part: Picked) -> Picked:
    part = part._replace(parent_W=part.parent_W + offset_G1)
    return jax.tree.map(lambda x: x.reshape(-1), part)

  live, best = picked
  return together(live), together(best)


def _top(values: Array, number: int) -> tuple[Array, Array]:
  """The largest `number`, filled up with −inf, and where they are."""
  found, at = lax.top_k(values, min(number, values.shape[0]))
  lacking = number - found.shape[0]
  return jnp.pad(found, (0, lacking), constant_values=-jnp.inf), jnp.pad(at, (0, lacking))
