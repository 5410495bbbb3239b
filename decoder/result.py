"""What comes back of a request: its text and tokens, how it ended, and what was asked about each token."""

import dataclasses
import math
from typing import Any

from decoder.settings import Settings


@dataclasses.dataclass(frozen=True)
class Timings:
  """load_s, compile_s: seconds, neither is part of the others. ttft_ms: from the call to the first token on the host.
  tpot_ms: mean time of each further token, tokens_per_s its inverse times the rows decoded together. None where too
  few tokens were written to tell."""

  load_s: float
  compile_s: float
  ttft_ms: float | None
  tpot_ms: float | None
  tokens_per_s: float | None
  prompt_tokens_per_s: float | None
  prompt_tokens: int
  new_tokens: int


@dataclasses.dataclass(frozen=True)
class Alternative:
  """A token that was possible. token, bytes: its text and its bytes, special tokens as their markup; a token that is
  part of a character has U+FFFD in its text. None where there is no tokenizer. logprob: natural; −inf is impossible."""

  token: str | None
  bytes: bytes | None
  id: int
  logprob: float


@dataclasses.dataclass(frozen=True)
class TokenLogprob(Alternative):
  """A token of the text. rank: 1 is the most probable; among equals the lowest id comes first. alternatives: the most
  probable ones, best first, this one among them if it is one of them."""

  rank: int
  alternatives: tuple[Alternative, ...]


@dataclasses.dataclass(frozen=True)
class Change:
  """What one link of the chain did. kept: tokens still possible after it; removed: how many it took, best_removed:
  whether what it was given as most probable is one of them. probability: of the drawn token after it."""

  transform: str
  kept: int
  removed: int
  best_removed: bool
  probability: float


@dataclasses.dataclass(frozen=True)
class Explanation:
  """How a token came to be drawn. before, after: its probability by the model, and by what it was drawn from. kept:
  tokens it was drawn from. changes: by masks (padding of the vocabulary, a grammar), then by each transform."""

  token: str | None
  id: int
  before: float
  after: float
  kept: int
  changes: tuple[Change, ...]


@dataclasses.dataclass(frozen=True)
class Speculated:
  """What guessing ahead came to: steps after the first token, tokens guessed, and those of them that were kept. A step
  writes one token more than it keeps."""

  steps: int
  drafted: int
  accepted: int


@dataclasses.dataclass(frozen=True)
class Result:
  """One completion.

  token_ids: what was drawn, without the end token. finish_reason: 'stop', 'length', 'time' (max_time was over), 'error'
  (the model's logits were not finite, or nothing could follow) or 'cancelled'. stop_reason: of 'stop', the stop string,
  the id of the stop or end token, or 'dedent'; None where a constraint left nothing to add. truncated: 'context' where
  the context, not max_new_tokens, ended it; 'prompt' where prompt tokens were dropped. seed reproduces the text; sample
  is the number of this one among the prompt's.

  score: of a hypothesis of a search, see Settings; sample is then its place, 0 the best. speculated: where asked for.
  Only where asked for: logprobs and explanation, for each token drawn: token_ids, then the end token where it is not
  one of them; prompt_logprobs, for each of prompt_ids: None for the first, which nothing precedes, and where the logits
  were not finite.
  """

  text: str
  prompt_ids: tuple[int, ...]
  token_ids: tuple[int, ...]
  finish_reason: str
  stop_reason: str | int | None
  truncated: str | None
  seed: int
  settings: Settings
  timings: Timings
  sample: int = 0
  logprobs: tuple[TokenLogprob, ...] | None = None
  prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
  explanation: tuple[Explanation, ...] | None = None
  score: float | None = None
  speculated: Speculated | None = None

  def to_json(self) -> dict[str, Any]:
    """Plain data, for json.dumps; a log-prob of −inf is null."""
    plain = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "settings"}
    return {**plain, "settings": self.settings.describe()}


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, list | tuple | bytes):
    return [_plain(one) for one in value]
  return None if value == -math.inf else value
