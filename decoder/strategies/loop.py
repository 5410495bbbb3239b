"""Loops over a strategy's step: `run` on the device, `stream` on the host. They know only Emissions."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from decoder.types import Array, Emission, Info, Params, Strategy


class Run(NamedTuple):
  """state: as the loop left it. tokens_BN, count_B: what each row emitted, valid before its count."""

  state: Any
  emission: Emission


def run(strategy: Strategy, params: Params, state: Any, limit: Array, size: int) -> Run:
  """Up to `limit` steps (traced) in one `lax.while_loop`, until every row has finished.

  size: tokens a row that the result has room for; steps × tokens per step must fit. The final state is returned, so
  that a donated one is updated in place: without it the cache is copied.
  """
  batch = state.finish_B.shape[0]
  rows = jnp.arange(batch)[:, None]

  def going(carry: tuple) -> Array:
    state, _, _, steps = carry
    return (steps < limit) & jnp.any(state.finish_B == 0)

  def body(carry: tuple) -> tuple:
    state, tokens_BN, count_B, steps = carry
    state, emission = strategy.step(params, state)
    offset = jnp.arange(emission.tokens_BN.shape[1])[None]
    slots = jnp.where(offset < emission.count_B[:, None], count_B[:, None] + offset, size)
    tokens_BN = tokens_BN.at[rows, slots].set(emission.tokens_BN, mode="drop")
    return state, tokens_BN, count_B + emission.count_B, steps + 1

  start = (state, jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch,), jnp.int32), jnp.int32(0))
  state, tokens_BN, count_B, _ = lax.while_loop(going, body, start)
  return Run(state, Emission(tokens_BN, count_B, Info(state.finish_B)))


def stream(step: Callable, params: Params, state: Any) -> Iterator[tuple[Any, Emission]]:
  """A host loop over a (jitted, donating) step: yields (state, emission) until every row has finished.

  A reader may send() back a changed state, one with rows released, say; what it yielded is spent by then.
  """
  running = True
  while running:
    state, emission = step(params, state)
    changed = yield state, emission
    state = state if changed is None else changed
    running = bool((emission.info.finish_B == 0).any()) and bool((state.finish_B == 0).any())
