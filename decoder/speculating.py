"""Programs that speculate: prompts are read as by others, and the loop emits several tokens a step."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoder.drafters import Drafter
from decoder.models.registry import Network
from decoder.programs import LOOP, Programs, signature
from decoder.result import Speculated
from decoder.sampling import Drawn
from decoder.settings import Settings
from decoder.strategies import (
  Accompanied,
  Both,
  State,
  accompanied,
  autoregressive,
  branching,
  drafted,
  drafting,
  lookup,
  run,
  speculative,
  unread,
)
from decoder.strategies.loop import Run
from decoder.types import Array


class SpeculatingPrograms(Programs):
  """`Programs` whose loop guesses ahead, as `settings.speculate` says. drafter: who guesses; None: the text itself."""

  def __init__(
    self, network: Network, params: Any, settings: Settings, full: bool, inspect: Callable, vocab_size: int | None,
    clock: Any, drafter: Drafter | None = None,
  ):  # fmt: skip
    self._drafter, chain, alone = drafter, settings.chain(full), network.model
    proposer = lookup()
    if drafter is not None:
      network = network._replace(model=accompanied(network.model, drafter.companion))
      params, self.cache_type = Both(params, drafter.params), Accompanied
      proposer = drafted(drafter.companion, chain, vocab_size, drafter.each)
    super().__init__(network, params, settings, full, inspect, vocab_size, clock)
    self._memory, self._most = proposer.init, settings.draft_tokens + 1  # tokens that a step may write
    self._further = speculative(network.model, chain, proposer, settings.draft_tokens, vocab_size, inspect)
    if tree := settings.draft_tree:
      self._memory, self._most = unread(tree, drafter.features, network.dtype), len(tree) + 1
      self._further = branching(alone, drafter.companion, chain, tree, vocab_size, inspect)

    def inspect_first(drawn: Drawn) -> Any:
      return inspect(drawn._replace(settings=drawn.settings.settings))

    self._strategy = autoregressive(network.model, drafting(chain, self._memory), vocab_size, inspect_first)

  def numbers(self, settings: Settings) -> Any:
    return drafting(settings.chain(self._full), self._memory).init()

  def speculated(self, state: State) -> list[Speculated]:
    so_far = state.settings
    counts = jax.device_get((so_far.steps, so_far.drafted, so_far.accepted))
    return [Speculated(*map(int, row)) for row in zip(*counts)]

  def takes(self, cache: Any) -> bool:
    if self._drafter is None or not super().takes(cache):
      return super().takes(cache)
    mine = jax.eval_shape(lambda: self._drafter.companion.allocate(cache.batch, cache.capacity))
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(memory)] for memory in (mine, cache.memory)]
    return jax.tree.structure(mine) == jax.tree.structure(cache.memory) and shapes[0] == shapes[1]

  def _allocate(self, rows: int, capacity: int, fields: dict[str, Any]) -> Any:
    cache = super()._allocate(rows, capacity, fields)
    if self._drafter is None:
      return cache
    return Accompanied.around(cache, self._drafter.companion.allocate(rows, capacity))

  def _loop(self, state: State) -> Callable:
    def program(params: Any, state: State, limit: Array) -> Run:
      return run(self._further, params, state, limit, LOOP * self._most)

    return self._compile_with_params(("loop", signature(state)), "the speculating loop", program, state, np.int32(0))
