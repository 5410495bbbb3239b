"""The words everything else is written in: axis letters, a model, an emission, a strategy.

Axis letters end the names of arrays, in order; the suffix is the shape:
  B rows          T new tokens      S cache slots    N query heads    K key/value heads
  G queries per key/value head      H head size      D model size     F inner size
  V vocabulary    L context length  E end ids, or experts  Q = T·G query rows of one key/value head
A lower-case letter is half of, or a part of, its axis (h = H/2).

Positions are the only metadata: int32, absolute, NONE (−1) where there is no token. A write at NONE is dropped
and a key at NONE is never attended, so padding, finished rows and empty slots need no masks of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct

Array = jax.Array
Key = jax.Array  # a typed PRNG key, `jax.random.key`
Params = Any  # a nested dict of arrays, named like the checkpoint

NONE = -1  # the position that stands for "no token here"


@struct.dataclass
class QTensor:
  """A weight [F, D] in few bits: data in a parameter's place, known to `ops.linear` and `ops.quantised` only.

  kind: one of `ops.quantised.KINDS`. shape: (F, D), what it stands for. striped: whether 16 outputs lie side by side,
  as the CPU kernels stream them, or each by itself. `ops.quantised` tells the order of values, scales and minimums;
  minimums are None for kinds without. Values may be padded to whole stripes.
  """

  values: Array
  scales: Array
  minimums: Array | None
  kind: str = struct.field(pytree_node=False)
  shape: tuple[int, int] = struct.field(pytree_node=False)
  striped: bool = struct.field(pytree_node=False)

  ndim = 2


class Model(NamedTuple):
  """All that a strategy knows of a network.

  forward: (params, tokens_BT, positions_BT, cache) -> (features_BTD, cache). Tokens at position NONE leave no trace.
  head: (params, features_BD) -> logits_BV. Apart from `forward`, so that prefill pays the head for one row's last
    token only, and so that trained heads can read the features.
  Both are pure; the cache that comes back replaces the one that went in.
  """

  forward: Callable
  head: Callable


class Info(NamedTuple):
  """What is known of an emission besides its tokens.

  finish_B: int8, how a row stands after it: one of `strategies.autoregressive.Finish`.
  details: a pytree of whatever was asked about each token (log-probs, say), its leaves [B, N, ...] like `tokens_BN`.
  """

  finish_B: Array
  details: Any = None


class Emission(NamedTuple):
  """0..N tokens a row, the result of one step.

  tokens_BN: int32; only `tokens_BN[b, :count_B[b]]` means anything.
  count_B: int32, 0 for a row that had already finished.
  """

  tokens_BN: Array
  count_B: Array
  info: Info


class Strategy(NamedTuple):
  """How tokens come out of a model: pure functions over a State pytree, known to loops, streams and schedulers.

  init: (cache, request fields) -> State.
  forward: (params, state) -> (state, logits_BV). Reads the state's pending tokens into the cache. Where it reads
    guesses too, logits_BJV: after the last token and after each of them.
  draw: (state, logits_BV, allowed_BV=None) -> (state, Emission). Chooses what comes next, without parameters;
    `allowed_BV` (bool, of the logits' shape) is a mask computed on the host while `forward` ran.
  """

  init: Callable
  forward: Callable
  draw: Callable

  def step(self, params: Params, state: Any) -> tuple[Any, Emission]:
    """Both halves: the pure step that `lax.while_loop` threads."""
    return self.draw(*self.forward(params, state))
