"""How far is a model from a text? Cross-entropy, token by token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decoder.cache import Whole, allocate
from decoder.models.registry import Network
from decoder.types import NONE, Array


class Pairs(NamedTuple):
  """Texts and what is to be written of them. source_BS, target_BT: ids, NONE after the end; the target's end token is
  one of them. shown_BT: the target as the decoder is shown it, before it is moved on by one token; it differs from
  target_BT where noise is wanted."""

  source_BS: Any
  target_BT: Any
  shown_BT: Any


def cross_entropy(logits_NV: Array, targets_N: Array, smoothing: float = 0.0) -> tuple[Array, Array]:
  """Sum over the targets that are not NONE, in nats, and their number, both float32.

  smoothing: share of the target's probability that is spread evenly over the vocabulary (Szegedy et al. 2016,
  arXiv:1512.00567); 0 gives −Σ log p.
  """
  there_N = targets_N != NONE
  loss_N = _cross_entropy(logits_NV.astype(jnp.float32), targets_N, smoothing)
  return jnp.sum(jnp.where(there_N, loss_N, 0.0)), jnp.sum(there_N, dtype=jnp.float32)


@jax.custom_vjp
def _cross_entropy(logits_NV: Array, targets_N: Array, smoothing: Any) -> Array:
  return _forward(logits_NV, targets_N, smoothing)[0]


def _forward(logits_NV: Array, targets_N: Array, smoothing: Any) -> tuple[Array, tuple]:
  mass_N = jax.nn.logsumexp(logits_NV, axis=1)
  mine_N = jnp.take_along_axis(logits_NV, jnp.maximum(targets_N, 0)[:, None], axis=1)[:, 0]
  loss_N = mass_N - (1 - smoothing) * mine_N - smoothing * jnp.mean(logits_NV, axis=1)
  return loss_N, (logits_NV, targets_N, smoothing, mass_N)


def _backward(kept: tuple, slope_N: Array) -> tuple:
  """p − q in one pass over the logits, which are most of what a step of a small model writes and reads."""
  logits_NV, targets_N, smoothing, mass_N = kept
  size = logits_NV.shape[1]
  asked_NV = jnp.where(jnp.arange(size)[None] == targets_N[:, None], 1 - smoothing, 0.0) + smoothing / size
  return slope_N[:, None] * (jnp.exp(logits_NV - mass_N[:, None]) - asked_NV), None, None


_cross_entropy.defvjp(_forward, _backward)


def translation_loss(network: Network, start: int) -> Any:
  """(params, pairs, smoothing) -> (sum, number) for an encoder–decoder whose texts begin from the token `start`."""

  def loss(params: Any, pairs: Pairs, smoothing: float = 0.0) -> tuple[Array, Array]:
    rows = pairs.source_BS.shape[0]
    cache = allocate(network.cache_spec, rows, network.context, layout=Whole, encoded=Whole)
    cache = network.encode(params, jnp.maximum(pairs.source_BS, 0), positions(pairs.source_BS), cache)
    first_B1 = jnp.full((rows, 1), start, jnp.int32)
    shown_BT = jnp.concatenate([first_B1, pairs.shown_BT[:, :-1]], axis=1)
    there_BT = positions(pairs.target_BT)  # as many are shown as asked: the start in front, the end token left out
    features_BTD, _ = network.model.forward(params, jnp.maximum(shown_BT, 0), there_BT, cache)
    logits_NV = network.model.head(params, features_BTD.reshape(-1, features_BTD.shape[-1]))
    return cross_entropy(logits_NV, pairs.target_BT.reshape(-1), smoothing)

  return loss


def positions(ids_BT: Array) -> Array:
  """0, 1, 2 … where there are tokens, NONE where there are none."""
  return jnp.where(ids_BT != NONE, jnp.arange(ids_BT.shape[1], dtype=jnp.int32), NONE)
