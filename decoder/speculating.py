"""Programs that speculate: prompts are read as by others, and the loop emits several tokens a step."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoder.programs import LOOP, Programs, signature
from decoder.result import Speculated
from decoder.sampling import Drawn
from decoder.settings import Settings
from decoder.strategies import Proposer, State, autoregressive, drafting, lookup, run, speculative
from decoder.strategies.loop import Run
from decoder.types import Array

PROPOSERS: dict[str, Callable[[], Proposer]] = {"lookup": lookup}


class SpeculatingPrograms(Programs):
  """`Programs` whose loop guesses ahead, as `settings.speculate` says."""

  def __init__(
    self, network: Any, params: Any, settings: Settings, full: bool, inspect: Callable, vocab_size: int | None,
    clock: Any,
  ):  # fmt: skip
    super().__init__(network, params, settings, full, inspect, vocab_size, clock)
    self._proposer, self._size, chain = PROPOSERS[settings.speculate](), settings.draft_tokens, settings.chain(full)

    def inspect_first(drawn: Drawn) -> Any:
      return inspect(drawn._replace(settings=drawn.settings.settings))

    self._strategy = autoregressive(network.model, drafting(chain, self._proposer), vocab_size, inspect_first)
    self._further = speculative(network.model, chain, self._proposer, self._size, vocab_size, inspect)

  def numbers(self, settings: Settings) -> Any:
    return drafting(settings.chain(self._full), self._proposer).init()

  def speculated(self, state: State) -> list[Speculated]:
    so_far = state.settings
    counts = jax.device_get((so_far.steps, so_far.drafted, so_far.accepted))
    return [Speculated(*map(int, row)) for row in zip(*counts)]

  def _loop(self, state: State) -> Callable:
    def program(params: Any, state: State, limit: Array) -> Run:
      return run(self._further, params, state, limit, LOOP * (self._size + 1))

    return self._compile_with_params(("loop", signature(state)), "the speculating loop", program, state, np.int32(0))
