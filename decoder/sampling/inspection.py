"""What can be told of a draw: log-probs, ranks, alternatives, and what each transform did.

An inspection is a pure function for one row, `Drawn -> pytree of fixed shapes`, that a strategy is given as a value and
maps over its rows. Those here are compared by their fields, so that equal ones share a compilation. What a row did not
ask for is cut off on the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decoder.sampling.selection import largest
from decoder.sampling.transforms import Context, LogitTransform
from decoder.types import Array


class Drawn(NamedTuple):
  """One row's draw and where it came from.

  raw_V: the model's float32 logits. offered_V: with −inf where masks (padding, a grammar) forbid, as the chain got
  them. kept_V: what the chain left and the token was drawn from. settings: the chain's state before it. context: the
  row before the token.
  """

  raw_V: Array
  offered_V: Array
  kept_V: Array
  token: Array
  settings: Any
  context: Context


class Logprobs(NamedTuple):
  """Of one token: its log-prob (float32, natural), its rank (1 is the most probable) and the most probable ids with
  their log-probs, best first. Among equal ones the lowest id comes first, in ranks as well."""

  logprob: Array
  rank: Array
  top_ids_C: Array
  top_logprobs_C: Array


def nothing(drawn: Drawn) -> None:
  """Nothing is asked."""


@dataclasses.dataclass(frozen=True)
class _Point:
  """Log-probs of the token among the logits `field` of Drawn, with `number` alternatives."""

  field: str
  number: int

  def __call__(self, drawn: Drawn) -> Logprobs:
    return logprobs(getattr(drawn, self.field), drawn.token, self.number)


def raw_logprobs(number: int) -> Callable[[Drawn], Logprobs]:
  """Log-probs by the model's own logits, before masks and transforms."""
  return _Point("raw_V", number)


def processed_logprobs(number: int) -> Callable[[Drawn], Logprobs]:
  """Log-probs by what was drawn from; −inf for what masks and transforms removed."""
  return _Point("kept_V", number)


@dataclasses.dataclass(frozen=True)
class Together:
  """Several inspections by name, as one that gives a dict."""

  parts: tuple[tuple[str, Callable[[Drawn], Any]], ...]

  def __call__(self, drawn: Drawn) -> dict[str, Any]:
    return {name: part(drawn) for name, part in self.parts}


def logprobs(logits_V: Array, token: Array, number: int) -> Logprobs:
  """Log-probs under softmax(logits_V) of `token` and of the `number` most probable ids (no more than there are)."""
  logits_V = jnp.where(logits_V == 0, 0.0, logits_V)  # a partial sort puts +0 before −0; they are one value
  normaliser = jax.nn.logsumexp(logits_V)
  mine, ids_V = logits_V[token], jnp.arange(logits_V.shape[0])
  before_V = (logits_V > mine) | ((logits_V == mine) & (ids_V < token))
  top_C, ids_C = lax.top_k(logits_V, min(number, logits_V.shape[0]))
  return Logprobs(mine - normaliser, 1 + jnp.sum(before_V, dtype=jnp.int32), ids_C, top_C - normaliser)


class Explained(NamedTuple):
  """What became of the vocabulary on the way to a draw, after the masks and after each link of the chain (K of them).

  before: the drawn token's probability by the model. kept_K: tokens that are possible. removed_K: that were and are
  no longer. best_removed_K: whether the most probable before is one of these. probability_K: of the drawn token.
  """

  before: Array
  kept_K: Array
  removed_K: Array
  best_removed_K: Array
  probability_K: Array


@dataclasses.dataclass(frozen=True)
class _Explain:
  """Takes a chain's update apart; compared by it."""

  update: Any

  def __call__(self, drawn: Drawn) -> Explained:
    rows = []
    before_V = drawn.raw_V
    for after_V in (drawn.offered_V, *self.update.steps(drawn.offered_V, drawn.settings, drawn.context)):
      possible_V = after_V > -jnp.inf
      removed_V = (before_V > -jnp.inf) & ~possible_V
      best_removed = removed_V[largest(before_V)]
      probability = jax.nn.softmax(after_V)[drawn.token]
      rows.append((jnp.sum(possible_V), jnp.sum(removed_V), best_removed, probability))
      before_V = after_V
    return Explained(jax.nn.softmax(drawn.raw_V)[drawn.token], *(jnp.stack(column) for column in zip(*rows)))


def explain(chain: LogitTransform) -> Callable[[Drawn], Explained]:
  """What each link of the chain did, by running them one by one."""
  return _Explain(chain.update)
