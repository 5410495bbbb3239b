"""How probable is a given text? Log-probs of continuations, read with their prompts and never drawn."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from decoder.decoding import fields_of
from decoder.programs import SMALLEST_CAPACITY, bucket
from decoder.prompts import told_rows
from decoder.reader import Request, is_batch
from decoder.report import size_for, told_logprobs
from decoder.result import TokenLogprob
from decoder.settings import MOST_ALTERNATIVES, Settings

_ROWS = 8  # texts read together: rows of a batch bound its cache


@dataclasses.dataclass(frozen=True)
class Score:
  """tokens: of the continuation, each with its log-prob and rank. total: the sum of the log-probs (natural), −inf where
  the model rules the continuation out. prompt_ids: what came before."""

  prompt_ids: tuple[int, ...]
  tokens: tuple[TokenLogprob, ...]
  total: float

  @property
  def mean(self) -> float:
    """Per token."""
    return self.total / len(self.tokens)


def score(lm: Any, prompt: Any, continuation: Any, number: int) -> Any:
  """See `LM.score`."""
  if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MOST_ALTERNATIVES:
    raise ValueError(f"logprobs must be an integer 0 … {MOST_ALTERNATIVES}, got {number!r}")
  pairs, many = _pairs(prompt, continuation)
  texts = [_encode(lm, *pair) for pair in pairs]
  scores: list[Any] = [None] * len(texts)
  order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))  # alike lengths together: less padding
  for start in range(0, len(order), _ROWS):
    chosen = order[start : start + _ROWS]
    for index, told in zip(chosen, _read(lm, [texts[i][0] for i in chosen], number)):
      scores[index] = _score(lm, *texts[index], told, number)
  return scores if many else scores[0]


def _pairs(prompt: Any, continuation: Any) -> tuple[list[tuple[Any, Any]], bool]:
  several, choices = (is_batch(value) and len(value) > 0 for value in (prompt, continuation))
  if not several and not choices:
    return [(prompt, continuation)], False
  prompts = list(prompt) if several else [prompt] * len(continuation)
  continuations = list(continuation) if choices else [continuation] * len(prompts)
  if len(prompts) != len(continuations):
    raise ValueError(f"got {len(continuations)} continuations for {len(prompts)} prompts; give one for all or one each")
  return list(zip(prompts, continuations)), True


def _encode(lm: Any, prompt: Any, continuation: Any) -> tuple[tuple[int, ...], int]:
  """The ids of both, and how many are the prompt's."""
  if isinstance(prompt, str) and isinstance(continuation, str):
    before, ids = lm.encode(prompt) if prompt else (), lm.encode(prompt + continuation)
    border = next((n for n, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
    border = max(border, int(lm.tokenizer.bos_id == ids[0]))
  else:
    before = lm.encode(prompt)
    border, ids = len(before), (*before, *lm.encode(continuation, add_bos=False))
  if border == 0:
    raise ValueError("the first token has no log-prob, since nothing precedes it; give a prompt, or a model with a BOS")
  if border == len(ids):
    raise ValueError(f"the continuation {continuation!r} has no tokens; there is nothing to score")
  if len(ids) > lm.context:
    raise ValueError(f"prompt and continuation have {len(ids)} tokens, the context holds {lm.context}; shorten them")
  return ids, border


def _read(lm: Any, texts: Sequence[Sequence[int]], number: int) -> list[Any]:
  """What is told of each text's tokens but the first."""
  settings = Settings()
  capacity = min(bucket(max(len(ids) for ids in texts), SMALLEST_CAPACITY), lm.context)
  # A row at its limit would read nothing.
  requests = [Request(tuple(ids), settings, 0, 0, len(ids) + 1, (), None, None) for ids in texts]
  programs = lm.programs([settings])
  state, parts = programs.begin(capacity, fields_of(requests, programs, capacity, held=0)), []
  lengths = [len(ids) for ids in texts]
  for chunk in (*programs.chunks(lengths), 0):
    state, _, told = programs.tell_chunk(state, lengths, size_for(number), chunk)
    parts.append(told)
  return told_rows(programs.placement.fetch, parts, lengths)


def _score(lm: Any, ids: Sequence[int], border: int, told: Any, number: int) -> Score:
  tokens = told_logprobs(ids[1:], told, number, lm.tokenizer)[border - 1 :]
  if None in tokens:
    raise FloatingPointError(f"the model's logits are not finite before token {border + tokens.index(None)}")
  return Score(tuple(ids[:border]), tokens, math.fsum(one.logprob for one in tokens))
