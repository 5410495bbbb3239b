"""Programs that speculate: prompts are read as by others, and the loop emits several tokens a step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoder.drafters import Drafter, step_costs
from decoder.models.registry import Network
from decoder.programs import Programs, signature
from decoder.result import Speculated
from decoder.sampling import Drawn
from decoder.settings import Settings
from decoder.strategies import (
  Accompanied,
  Both,
  State,
  accompanied,
  announced,
  answered,
  autoregressive,
  branching,
  drafted,
  drafting,
  lookup,
  speculative,
  unread,
)
from decoder.types import Array, Emission, Strategy


class SpeculatingPrograms(Programs):
  """`Programs` whose loop guesses ahead, as `settings.speculate` says. drafter: who guesses; None: the text itself."""

  def __init__(
    self, network: Network, params: Any, settings: Settings, full: bool, inspect: Callable, vocab_size: int | None,
    compiler: Any, drafter: Drafter | None = None,
  ):  # fmt: skip
    self._drafter, chain, alone = drafter, settings.chain(full), network.model
    costs = step_costs(params)
    self._proposer = lookup(costs=costs)
    if drafter is not None:
      network = network._replace(model=accompanied(network.model, drafter.companion))
      params, self.cache_type = Both(params, drafter.params), Accompanied
      self._proposer = drafted(drafter.companion, chain, vocab_size, drafter.each, costs)
    super().__init__(network, params, settings, full, inspect, vocab_size, compiler)
    self.block, self._memory = settings.draft_tokens + 1, self._proposer.init
    self._guessing = functools.partial(
      speculative, network.model, chain, size=settings.draft_tokens, vocab_size=vocab_size, inspect=inspect
    )
    self._further = self._guessing(self._proposer)
    if tree := settings.draft_tree:
      self.block, self._memory = len(tree) + 1, unread(tree, drafter.features, network.dtype)
      self._further = branching(alone, drafter.companion, chain, tree, vocab_size, inspect)

    def inspect_first(drawn: Drawn) -> Any:
      return inspect(drawn._replace(settings=drawn.settings.settings))

    self._strategy = autoregressive(network.model, drafting(chain, self._memory), vocab_size, inspect_first)

  def numbers(self, settings: Settings) -> Any:
    return drafting(settings.chain(self._full), self._memory).init()

  def speculated(self, state: State) -> list[Speculated]:
    so_far = state.settings
    counts = self.placement.fetch((so_far.steps, so_far.drafted, so_far.accepted))
    return [Speculated(*map(int, row)) for row in zip(*counts)]

  def takes(self, cache: Any) -> bool:
    if self._drafter is None or not super().takes(cache):
      return super().takes(cache)
    mine = jax.eval_shape(lambda: self._drafter.companion.allocate(cache.batch, cache.capacity))
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(memory)] for memory in (mine, cache.memory)]
    return jax.tree.structure(mine) == jax.tree.structure(cache.memory) and shapes[0] == shapes[1]

  def guesses(self, state: State) -> list[np.ndarray]:
    """Waits for the device."""
    tokens_BJ, positions_BJ = self.placement.fetch((state.tokens_BT, state.positions_BT))
    return [tokens[1:][positions[1:] >= 0] for tokens, positions in zip(tokens_BJ, positions_BJ)]

  def draw_further(self, state: State, judgement: Any, masks_BJW: np.ndarray) -> tuple[State, Emission]:
    arguments = (state.cache, state.replace(cache=None), judgement, masks_BJW)
    return self._draw_further(*arguments)(*arguments)

  def prepare_further(self, state: State) -> None:
    super().prepare_further(state)
    guessed, judgement = jax.eval_shape(self._further.forward, self._params, state)
    masks_BJW = self.open_masks(*judgement.raw_BJV.shape[:2])
    self._draw_further(guessed.cache, guessed.replace(cache=None), judgement, masks_BJW)

  def _draw_further(self, cache: Any, rest: State, judgement: Any, masks_BJW: Any) -> Callable:
    def program(cache: Any, rest: State, judgement: Any, masks_BJW: Array) -> tuple[State, Emission]:
      return self._further.draw(rest.replace(cache=cache), judgement, self._allowed(masks_BJW))

    key = ("draw further", cache.form, signature(rest))
    return self._compile(key, "the masked draws", program, 0, cache, rest, judgement, masks_BJW)

  def _allocate(self, rows: int, capacity: int, fields: dict[str, Any]) -> Any:
    cache = super()._allocate(rows, capacity, fields)
    if self._drafter is None:
      return cache
    return Accompanied.around(cache, self._drafter.companion.allocate(rows, capacity))

  def _asking(self, number: Array) -> Strategy:
    return answered(self._guessing(announced(self._proposer, number)), number, self._allowed)
