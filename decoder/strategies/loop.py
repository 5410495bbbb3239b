"""Loops over a strategy's step: `run` on the device, `stream` on the host. They know only Emissions."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decoder.types import Array, Emission, Info, Params, Strategy


class Run(NamedTuple):
  """state: as the loop left it. emission: what each row emitted in all steps, valid before its count."""

  state: Any
  emission: Emission


def run(strategy: Strategy, params: Params, state: Any, limit: Array, size: int) -> Run:
  """Up to `limit` steps (traced) in one `lax.while_loop`, until every row has finished.

  size: tokens a row that the result has room for; steps × tokens per step must fit. The final state is returned, so
  that a donated one is updated in place: without it the cache is copied.
  """
  batch = state.finish_B.shape[0]
  step = jax.jit(strategy.step, inline=True)  # traced once, though looked at twice
  rows = jnp.arange(batch)[:, None]

  def going(carry: tuple) -> Array:
    state, _, _, steps = carry
    return (steps < limit) & jnp.any(state.finish_B == 0)

  def body(carry: tuple) -> tuple:
    state, written, count_B, steps = carry
    state, emission = step(params, state)
    offset = jnp.arange(emission.tokens_BN.shape[1])[None]
    slots = jnp.where(offset < emission.count_B[:, None], count_B[:, None] + offset, size)
    written = jax.tree.map(lambda all_, new: all_.at[rows, slots].set(new, mode="drop"), written, _columns(emission))
    return state, written, count_B + emission.count_B, steps + 1

  columns = _columns(jax.eval_shape(step, params, state)[1])
  room = jax.tree.map(lambda x: jnp.zeros((batch, size, *x.shape[2:]), x.dtype), columns)
  state, written, count_B, _ = lax.while_loop(going, body, (state, room, jnp.zeros((batch,), jnp.int32), jnp.int32(0)))
  tokens_BN, details = written
  return Run(state, Emission(tokens_BN, count_B, Info(state.finish_B, details)))


def _columns(emission: Emission) -> tuple[Array, Any]:
  """What an emission says of each token: leaves [B, N, ...]."""
  return emission.tokens_BN, emission.info.details


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
