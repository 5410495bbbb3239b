"""Mirostat 2: a filter that steers the text's surprise; the one transform whose state changes with what is drawn."""

import jax.numpy as jnp
import numpy as np

from decoder.sampling.selection import only_if
from decoder.sampling.transforms import Filter, LogitTransform, check
from decoder.sampling.truncation import first_positive, keep_above
from decoder.types import Array


def mirostat(tau: float | None, rate: float = 0.1) -> LogitTransform:
  """Keeps tokens whose surprise, in bits, is ≤ μ; after a draw, μ moves against what that token's surprise among
  those kept exceeded `tau` by: μ −= rate · (surprise − tau), from 2·tau on (Basu et al. 2020, arXiv:2007.14966, its
  second algorithm). None is off. Its state cannot be rolled back by a shorter length."""
  tau = 0.0 if tau is None else tau
  check("mirostat_tau", tau, lambda x: 0 <= x < 100, "a number of bits in (0, 100), or None for off")
  check("mirostat_eta", rate, lambda x: 0 < x <= 10, "a number in (0, 10]")
  state = (np.float32(tau), np.float32(rate), np.float32(2 * tau))
  return LogitTransform(lambda: state, Filter(first_positive, _mirostat), _steer)


def _mirostat(logits_N: Array, ids_N: Array, state: tuple, chance: Array) -> Array:
  _, _, surprise = state
  x_N = logits_N - jnp.max(logits_N)
  log_N = x_N - jnp.log(jnp.sum(jnp.exp(x_N)))
  return keep_above(logits_N, log_N, -surprise * np.float32(np.log(2)))


def _steer(state: tuple, token: Array, logits_V: Array) -> tuple:
  def move(state: tuple, token: Array, logits_V: Array) -> tuple:
    tau, rate, surprise = state
    odds = jnp.sum(jnp.exp(logits_V - logits_V[token]))  # 1/p of the token
    return tau, rate, surprise - rate * (jnp.log2(odds) - tau)

  return only_if(first_positive(state), move, state, token, logits_V)
