"""Mixture of experts: each token is read by the few of E networks that a router chooses for it, by Mixtral's rule
(Jiang et al. 2024, arXiv:2401.04088, section 2.1).

Two ways compute the same. `_every` multiplies by all experts, those not chosen by zero: it is plain products, which
XLA partitions over experts with one sum at the end. `_chosen` reads only the experts that some token chose: what a
decode step waits for is reading weights. How many tokens there are, and whether the program is to be partitioned, is
known when it is traced, and decides.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decoder.ops import stacked
from decoder.ops.kernels import build, products
from decoder.ops.linear import linear, swiglu
from decoder.types import Array, QTensor


class Experts(NamedTuple):
  """Weights of all experts, one expert after the other: gate and up [E·F, D], down [E·D, F]."""

  gate: Array | QTensor
  up: Array | QTensor
  down: Array | QTensor


def route(x: Array, router_ED: Array | QTensor, number: int) -> Array:
  """How much each expert's answer counts for each token of x [..., D]: [..., E], float32.

  The softmax over all experts, of which the `number` largest stay, divided by their sum; the others are zeros. Of
  equals, the lowest ids are chosen.
  """
  logits = linear(x.astype(jnp.float32), router_ED)  # f32: bf16 makes ties, and which expert it is decides much
  probabilities = jax.nn.softmax(logits, axis=-1)
  largest, ids = lax.top_k(probabilities, number)
  among = jnp.any(jax.nn.one_hot(ids, logits.shape[-1], dtype=bool), axis=-2)
  return jnp.where(among, probabilities / jnp.sum(largest, axis=-1, keepdims=True), 0.0)


def mixture(x: Array, router_ED: Array | QTensor, experts: Experts, number: int, residual: Array) -> Array:
  """residual + Σₑ shareₑ · downₑ(silu(gateₑ(x)) · upₑ(x)), for x and residual [..., D] and the shares of `route`.

  An expert whose share is 0 leaves no trace, whatever it would answer.
  """
  share, tokens = route(x, router_ED, number), x.size // x.shape[-1]
  if build.partitioned():
    return _every(x, _everywhere(share), experts, residual)
  # Blocks of few bits that are striped for the CPU's kernels are read by these, however many tokens there are.
  few = tokens <= products.FEW or getattr(experts.down, "striped", False)
  if few:
    return _chosen(x, share, experts, residual, number if tokens == 1 else None)
  return _every(x, share, experts, residual)


def _everywhere(share: Array) -> Array:
  """Each device has a token's shares of all experts: divided as the experts are, they would be computed with three
  exchanges of a few numbers, each as slow as one of many."""
  kept = jax.sharding.PartitionSpec.UNCONSTRAINED
  return lax.with_sharding_constraint(share, jax.sharding.PartitionSpec(*[kept] * (share.ndim - 1), None))


def _chosen(x: Array, share: Array, experts: Experts, residual: Array, number: int | None) -> Array:
  """number: how many experts the tokens chose together, None where that is not known before."""
  total = share.shape[-1]
  needed_E = jnp.any(share.reshape(-1, total) != 0, axis=0)
  order_E = jnp.argsort(~needed_E, stable=True).astype(jnp.int32)  # those needed before the others

  def add(step: Array, answer: Array) -> Array:
    expert = order_E[step]
    gate, up, down = (stacked.Part(weight, expert, total) for weight in experts)
    return linear(_scaled(swiglu(x, gate, up), share[..., expert]), down, None, answer)

  # A number known before spares a GPU the question, each time, whether to go on.
  return lax.fori_loop(0, jnp.sum(needed_E) if number is None else number, add, residual)


def _every(x: Array, share: Array, experts: Experts, residual: Array) -> Array:
  gate, up, down = (stacked.split(weight, share.shape[-1]) for weight in experts)
  by_expert = jax.vmap(products.dot, (None, 0), -2)
  hidden = _scaled(jax.nn.silu(by_expert(x, gate)) * by_expert(x, up), share)
  return residual + jnp.sum(jax.vmap(products.dot, (-2, 0))(hidden, down), axis=0)


def _scaled(hidden: Array, share: Array) -> Array:
  """hidden [..., F] times share [...], in hidden's type, and nothing where share is 0: what was not chosen may have
  overflowed."""
  share = share[..., None]
  return jnp.where(share == 0, 0.0, hidden * share).astype(hidden.dtype)
