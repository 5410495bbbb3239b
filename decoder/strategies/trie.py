"""Which tokens may follow, where a text must be one of a list: tries as arrays, walked on the device.

Tries of several requests are one forest; a request is its root. A node's edges lie side by side, sorted by token, so
that finding one is a bisection and allowing all of them touches these only, not the vocabulary.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from decoder.types import NONE, Array

_SPAN = 64  # edges looked at together


@struct.dataclass
class Forest:
  """Edges of node n are numbers starts_M[n] … starts_M[n + 1] − 1: tokens_E and the nodes they lead to. whole_M:
  whether a text may end there. Padded with nodes without edges."""

  starts_M: Array
  tokens_E: Array
  nodes_E: Array
  whole_M: Array


def forest(tries: Sequence[Sequence[Sequence[int]]]) -> tuple[Forest, list[int]]:
  """The tries of lists of sequences, in numpy, and their roots. ValueError for a list without a sequence."""
  if not all(len(trie) for trie in tries):
    raise ValueError("a list of allowed continuations must hold at least one")
  children: list[dict[int, int]] = [{} for _ in tries]
  whole = [False] * len(tries)
  for root, sequences in enumerate(tries):
    for sequence in sequences:
      node = root
      for token in sequence:
        if token not in children[node]:
          children[node][token] = len(children)
          children.append({})
          whole.append(False)
        node = children[node][token]
      whole[node] = True
  nodes, edges = _bucket(len(children)), _bucket(len(children) - len(tries))
  starts_M = np.full(nodes + 1, len(children) - len(tries), np.int32)
  starts_M[: len(children)] = np.cumsum([0] + [len(one) for one in children[:-1]])
  tokens_E, nodes_E, whole_M = np.zeros(edges, np.int32), np.zeros(edges, np.int32), np.zeros(nodes, bool)
  whole_M[: len(whole)] = whole
  pairs = [pair for one in children for pair in sorted(one.items())]
  tokens_E[: len(pairs)], nodes_E[: len(pairs)] = [token for token, _ in pairs], [node for _, node in pairs]
  return Forest(starts_M, tokens_E, nodes_E, whole_M), list(range(len(tries)))


def allowed(trees: Forest, node: Array, ends_E: Array, size: int) -> Array:
  """[V]: what may follow at a node, the row's ends where a text may end. Everything at NONE."""
  free = node < 0
  begin, end = _edges(trees, node)
  ends_E = jnp.where(trees.whole_M[jnp.maximum(node, 0)] & (ends_E >= 0), ends_E, size)
  mask_V = jnp.full(size, free).at[ends_E].set(True, mode="drop")

  def more(carry: tuple) -> tuple:
    at, mask_V = carry
    edge_D = at + jnp.arange(_SPAN, dtype=jnp.int32)
    token_D = jnp.where(edge_D < end, jnp.take(trees.tokens_E, edge_D, mode="clip"), size)
    return at + _SPAN, mask_V.at[token_D].set(True, mode="drop")

  return lax.while_loop(lambda carry: carry[0] < end, more, (begin, mask_V))[1]


def follow(trees: Forest, node: Array, token: Array) -> Array:
  """The node that an allowed token leads to; the same one where there is none (an end, or a free row)."""
  begin, end = _edges(trees, node)

  def halve(_: int, bounds: tuple) -> tuple:
    low, high = bounds
    middle = (low + high) // 2
    before = (low < high) & (jnp.take(trees.tokens_E, middle, mode="clip") < token)
    return jnp.where(before, middle + 1, low), jnp.where(before, high, jnp.minimum(middle, high))

  at, _ = lax.fori_loop(0, trees.tokens_E.shape[0].bit_length(), halve, (begin, end))
  there = (at < end) & (jnp.take(trees.tokens_E, at, mode="clip") == token)
  return jnp.where(there, jnp.take(trees.nodes_E, at, mode="clip"), node)


def _edges(trees: Forest, node: Array) -> tuple[Array, Array]:
  """Where a node's edges begin and end; none at NONE."""
  begin, end = (jnp.take(trees.starts_M, jnp.maximum(node, 0) + step, mode="clip") for step in (0, 1))
  return begin, jnp.where(node == NONE, begin, end)


def _bucket(size: int) -> int:
  return max(64, 1 << max(size - 1, 0).bit_length())
