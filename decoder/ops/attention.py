"""Attention of a few query tokens over a long cache, one block of slots at a time.

Each block is folded into a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867; flash-decoding's split form,
arXiv:2205.14135), so temporaries are one block wide, only blocks that hold tokens are read, and partial results over
disjoint keys merge exactly. What a key may be seen by follows from positions alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from decoder.types import Array

_HIDDEN = -1e30  # finite: −inf − −inf is NaN in the running maximum of a query that sees nothing yet


class Query(NamedTuple):
  """What a layer asks of its cache.

  q_BTNH: queries, not yet rotated. positions_BT: theirs; NONE sees nothing and returns zeros.
  scale: factor on the scores. window: a query at t sees t − window + 1 … t; None: everything before it.
  softcap: scores become softcap · tanh(score / softcap), or None (Gemma 2, arXiv:2408.00118).
  rotate: (x_BTNH, positions_BT) -> x_BTNH, the rotary embedding; None for models without one.
  bias: (positions_BT, kv_positions as for `visible`) -> what is added to the scores [B, N, T, S], or None. A pytree
    (`jax.tree_util.Partial`), so that its arrays reach programs for several devices as operands.
  """

  q_BTNH: Array
  positions_BT: Array
  scale: float
  window: int | None = None
  softcap: float | None = None
  rotate: Callable | None = None
  bias: Callable | None = None


class Partial(NamedTuple):
  """A softmax in the making, float32: over the keys seen so far, peak_BKQ is the largest score, mass_BKQ the sum of
  exp(score − peak), value_BKQH the values weighted likewise."""

  peak_BKQ: Array
  mass_BKQ: Array
  value_BKQH: Array


def fold_heads(x_BTNH: Array, kv_heads: int) -> Array:
  """[B, T, N, H] -> [B, K, Q, H] with Q = T·G, so that query heads sharing a key head become rows of one product."""
  B, T, N, H = x_BTNH.shape
  return x_BTNH.reshape(B, T, kv_heads, N // kv_heads, H).swapaxes(1, 2).reshape(B, kv_heads, -1, H)


def unfold_heads(x_BKQH: Array, tokens: int) -> Array:
  """The inverse of `fold_heads`."""
  B, K, Q, H = x_BKQH.shape
  return x_BKQH.reshape(B, K, tokens, Q // tokens, H).swapaxes(1, 2).reshape(B, tokens, -1, H)


def visible(positions_BT: Array, kv_positions: Array, window: int | None) -> Array:
  """[B, T, S]: which keys a query may see. kv_positions: [B, S], or [B, T, S] where each query has its own."""
  q, kv = positions_BT[:, :, None], kv_positions if kv_positions.ndim == 3 else kv_positions[:, None, :]
  seen = (kv >= 0) & (kv <= q)
  return seen if window is None else seen & (q - kv < window)


def empty(q_BKQH: Array) -> Partial:
  """The softmax over no keys at all: the neutral element of `merge`."""
  rows = q_BKQH.shape[:3]
  return Partial(
    jnp.full(rows, _HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(q_BKQH.shape, jnp.float32)
  )


def absorb(
  partial: Partial, q_BKQH: Array, query: Query, k_BKSH: Array, v_BKSH: Array, seen_BTS: Array,
  bias_BNTS: Array | None = None,
) -> Partial:  # fmt: skip
  """Folds one block of keys and values into the running softmax. q_BKQH: folded and rotated queries. bias_BNTS: what
  `query.bias` says of these keys."""
  # f32: scores of a long context differ by less than bf16 resolves
  scores = jnp.einsum("bkqh,bksh->bkqs", q_BKQH, k_BKSH, preferred_element_type=jnp.float32) * query.scale
  if query.softcap is not None:
    scores = query.softcap * jnp.tanh(scores / query.softcap)
  if bias_BNTS is not None:
    scores = scores + fold_heads(bias_BNTS.swapaxes(1, 2), k_BKSH.shape[1])
  group = q_BKQH.shape[2] // seen_BTS.shape[1]
  seen_B1QS = jnp.repeat(seen_BTS, group, axis=1)[:, None]
  scores = jnp.where(seen_B1QS, scores, _HIDDEN)
  peak = jnp.maximum(partial.peak_BKQ, scores.max(axis=-1))
  weights = jnp.where(seen_B1QS, jnp.exp(scores - peak[..., None]), 0.0)
  shrink = jnp.exp(partial.peak_BKQ - peak)
  # A forgotten slot may hold NaN, and 0 · NaN is NaN: what nobody sees counts as 0.
  v_BKSH = jnp.where(seen_BTS.any(axis=1)[:, None, :, None], v_BKSH, 0)
  value = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32)
  return Partial(
    peak,
    partial.mass_BKQ * shrink + weights.sum(axis=-1),
    partial.value_BKQH * shrink[..., None] + value,
  )


def merge(one: Partial, other: Partial) -> Partial:
  """The softmax over two disjoint sets of keys."""
  peak = jnp.maximum(one.peak_BKQ, other.peak_BKQ)
  a, b = jnp.exp(one.peak_BKQ - peak), jnp.exp(other.peak_BKQ - peak)
  value = one.value_BKQH * a[..., None] + other.value_BKQH * b[..., None]
  return Partial(peak, one.mass_BKQ * a + other.mass_BKQ * b, value)


def finish(partial: Partial) -> Array:
  """[B, K, Q, H] float32; zeros for a query that saw no key."""
  return partial.value_BKQH / jnp.where(partial.mass_BKQ > 0, partial.mass_BKQ, 1.0)[..., None]


def attend(query: Query, kv_heads: int, read: Callable, first: Array, last: Array, partial: Partial | None) -> Array:
  """Attention over the blocks first … last − 1 (traced int32) and what `partial` already holds: [B, T, N, H].

  query: with q already rotated. read: block index -> (k_BKSH, v_BKSH, kv_positions) of that block, positions as
  for `visible`.
  """
  return finished(query, absorb_blocks(query, kv_heads, read, first, last, partial))


def absorb_blocks(
  query: Query, kv_heads: int, read: Callable, first: Array, last: Array, partial: Partial | None
) -> Partial:
  """The softmax that `attend` finishes."""
  q_BKQH = fold_heads(query.q_BTNH, kv_heads)

  def body(index: Array, running: Partial) -> Partial:
    k, v, kv_positions = read(index)
    seen_BTS = visible(query.positions_BT, kv_positions, query.window)
    bias_BNTS = None if query.bias is None else query.bias(query.positions_BT, kv_positions)
    return absorb(running, q_BKQH, query, k, v, seen_BTS, bias_BNTS)

  return lax.fori_loop(first, last, body, empty(q_BKQH) if partial is None else partial)


def finished(query: Query, partial: Partial) -> Array:
  """What a softmax over all keys gives the query: [B, T, N, H], in its type."""
  return unfold_heads(finish(partial), query.q_BTNH.shape[1]).astype(query.q_BTNH.dtype)


def attend_both_ways(query: Query, k_BTKH: Array, v_BTKH: Array) -> Array:
  """Attention of a block of tokens among themselves, each to all, as encoders have it: [B, T, N, H]. Tokens at NONE see
  nothing and are not seen. Scores of all pairs exist at once: B · N · T² floats."""
  q_BKQH = fold_heads(query.q_BTNH, k_BTKH.shape[2])
  there_BT = query.positions_BT >= 0
  seen_BTS = there_BT[:, :, None] & there_BT[:, None, :]
  bias_BNTS = None if query.bias is None else query.bias(query.positions_BT, query.positions_BT)
  k_BKSH, v_BKSH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
  done = absorb(empty(q_BKQH), q_BKQH, query, k_BKSH, v_BKSH, seen_BTS, bias_BNTS)
  return unfold_heads(finish(done), query.q_BTNH.shape[1]).astype(query.q_BTNH.dtype)
