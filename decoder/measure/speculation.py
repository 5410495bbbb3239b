"""Does guessing ahead pay? The same prompts with it and without, in turn, and the time of a token of each."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from decoder.generate import LM

_LONGEST = 64  # tokens of what a text may go on repeating
_TIMES = 3  # that it must have stood there


@dataclasses.dataclass(frozen=True)
class Compared:
  """Of one prompt. tokens: scored. plain_ms, ahead_ms: of a token, medians over rounds. ratios: plain to ahead, by
  round. each: tokens a step. kept: share of guesses. same: whether the texts are equal."""

  name: str
  tokens: int
  plain_ms: float
  ahead_ms: float
  ratios: tuple[float, ...]
  each: float
  kept: float
  same: bool

  @property
  def ratio(self) -> float:
    return statistics.median(self.ratios)


def before_repeating(ids: Sequence[int]) -> int:
  """How many tokens there are before a text repeats itself to its end: what stands there a first time counts."""
  for period in range(1, _LONGEST + 1):
    same = 0
    while same < len(ids) - period and ids[-1 - same] == ids[-1 - same - period]:
      same += 1
    if same >= period * (_TIMES - 1):
      return len(ids) - same
  return len(ids)


def compare(
  lm: LM,
  prompts: Sequence[tuple[str, str]],
  ahead: dict[str, Any],
  *,
  tokens: int,
  rounds: int,
  told: Callable[[Compared], None] = lambda one: None,
  **settings: Any,
) -> list[Compared]:
  """prompts: (name, message of a user). ahead: the settings of guessing ahead; settings: those of both.

  A text of up to `tokens` tokens is written once, and scored as far as it goes before it ends or repeats itself; then
  both write as much, in turn, `rounds` times. Prompts of which fewer than 8 tokens can be scored are left out.
  """
  compared = []
  for name, message in prompts:
    prompt = [{"role": "user", "content": message}]
    first = lm.generate(prompt, max_new_tokens=tokens, **settings)
    scored = before_repeating(first.token_ids)
    if scored < 8:
      continue
    both = dict(settings, max_new_tokens=scored)
    lm.generate(prompt, **both, **ahead)  # compiles
    times, ratios = [], []
    for _ in range(rounds):
      plain, guessed = lm.generate(prompt, **both), lm.generate(prompt, **both, **ahead)
      times.append((plain.timings.tpot_ms, guessed.timings.tpot_ms))
      ratios.append(times[-1][0] / times[-1][1])
    told_of = guessed.speculated
    one = Compared(
      name, scored, *(statistics.median(column) for column in zip(*times)), tuple(ratios),
      (told_of.steps + told_of.accepted) / max(told_of.steps, 1), told_of.accepted / max(told_of.drafted, 1),
      plain.token_ids == guessed.token_ids,
    )  # fmt: skip
    compared.append(one)
    told(one)
  return compared
