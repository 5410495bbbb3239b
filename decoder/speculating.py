"""Programs that speculate: prompts are read as by others, and the loop emits several tokens a step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoder.programs import Programs, signature
from decoder.result import Speculated
from decoder.sampling import Drawn
from decoder.settings import Settings
from decoder.strategies import Proposer, State, announced, answered, autoregressive, drafting, lookup, speculative
from decoder.types import Array, Emission, Strategy

PROPOSERS: dict[str, Callable[[], Proposer]] = {"lookup": lookup}


class SpeculatingPrograms(Programs):
  """`Programs` whose loop guesses ahead, as `settings.speculate` says."""

  def __init__(
    self, network: Any, params: Any, settings: Settings, full: bool, inspect: Callable, vocab_size: int | None,
    clock: Any,
  ):  # fmt: skip
    super().__init__(network, params, settings, full, inspect, vocab_size, clock)
    self._proposer, self.block, chain = PROPOSERS[settings.speculate](), settings.draft_tokens + 1, settings.chain(full)

    def inspect_first(drawn: Drawn) -> Any:
      return inspect(drawn._replace(settings=drawn.settings.settings))

    self._strategy = autoregressive(network.model, drafting(chain, self._proposer), vocab_size, inspect_first)
    self._guessing = functools.partial(
      speculative, network.model, chain, size=settings.draft_tokens, vocab_size=vocab_size, inspect=inspect
    )
    self._further = self._guessing(self._proposer)

  def numbers(self, settings: Settings) -> Any:
    return drafting(settings.chain(self._full), self._proposer).init()

  def speculated(self, state: State) -> list[Speculated]:
    so_far = state.settings
    counts = jax.device_get((so_far.steps, so_far.drafted, so_far.accepted))
    return [Speculated(*map(int, row)) for row in zip(*counts)]

  def guesses(self, state: State) -> list[np.ndarray]:
    """Waits for the device."""
    tokens_BJ, positions_BJ = jax.device_get((state.tokens_BT, state.positions_BT))
    return [tokens[1:][positions[1:] >= 0] for tokens, positions in zip(tokens_BJ, positions_BJ)]

  def draw_further(self, state: State, logits_BJV: Array, masks_BJW: np.ndarray) -> tuple[State, Emission]:
    arguments = (state.cache, state.replace(cache=None), logits_BJV, masks_BJW)
    return self._draw_further(*arguments)(*arguments)

  def prepare_further(self, state: State) -> None:
    super().prepare_further(state)
    guessed, logits_BJV = jax.eval_shape(self._further.forward, self._params, state)
    masks_BJW = self.open_masks(*logits_BJV.shape[:2])
    self._draw_further(guessed.cache, guessed.replace(cache=None), logits_BJV, masks_BJW)

  def _draw_further(self, cache: Any, rest: State, *judged: Any) -> Callable:
    def program(cache: Any, rest: State, logits_BJV: Array, masks_BJW: Array) -> tuple[State, Emission]:
      return self._further.draw(rest.replace(cache=cache), logits_BJV, self._allowed(masks_BJW))

    key = ("draw further", cache.form, signature(rest))
    return self._compile(key, "the masked draws", program, 0, cache, rest, *judged)

  def _asking(self, number: Array) -> Strategy:
    return answered(self._guessing(announced(self._proposer, number)), number, self._allowed)
