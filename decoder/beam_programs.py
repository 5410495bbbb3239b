"""Programs that search with beams: prompts are read as without, into a cache with room for every beam's tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decoder.programs import CHUNK, SMALLEST_CHUNK, Compiler, Programs, bucket, signature
from decoder.reader import Request
from decoder.settings import Settings
from decoder.strategies import Early, Forest, Plan, Rules, Search, State, beam, forest, run
from decoder.strategies.loop import Run
from decoder.types import NONE, Array

_EARLY = {True: Early.FULL, False: Early.HEURISTIC, "never": Early.EXACT}
_SMALLEST_NEW = 16
_FEW_FORCED = 8


class BeamPrograms(Programs):
  """`begin` is as without beams; `read_prompts` reads prompts but for their last tokens; then `spread` and `search`."""

  def __init__(
    self, network: Any, params: Any, settings: Settings, full: bool, inspect: Callable, vocab_size: int | None,
    compiler: Compiler,
  ):  # fmt: skip
    super().__init__(network, params, settings, full, inspect, vocab_size, compiler)
    chains = settings.beam_chains(full)
    self.plan = Plan(
      settings.num_beams, *chains, settings.num_beam_groups, vocab_size=vocab_size, inspect=inspect,
      width=network.vocab_size,
    )  # fmt: skip
    self._search = beam(network.model, self.plan)

  def numbers(self, settings: Settings) -> Any:
    """The states of law and limits for one row with these settings."""
    return tuple(chain.init() for chain in settings.beam_chains(self._full))

  def read_prompts(self, state: State, lengths: Sequence[int]) -> State:
    """Reads prompts of so many tokens, in chunks."""
    longest = max(lengths)
    size = min(bucket(longest, SMALLEST_CHUNK), CHUNK)
    for start in range(0, longest, size):
      start_B = np.full(state.length_B.shape, start, np.int32)
      state = self._chunk(size, state, start_B)(state, start_B)
    return state

  def spread(self, state: State, fields: dict[str, Any], new: int) -> Search:
    """The search that goes on from prompts that have been read, for `new` tokens at most. fields: of `beam_fields`."""

    def program(layers: Any, cache: Any, fields: dict[str, Any]) -> Search:
      return self._search.init(cache.replace(layers=layers), **fields, new=new)

    # Of the cache its buffers alone are given away: its table becomes a larger one.
    arguments = (state.cache.layers, state.cache.replace(layers=()), {**fields, "key_B": state.key_B})
    key = ("spread", new, state.cache.capacity, state.cache.form, signature(arguments[2]))
    return self._compile(key, "the start of a search", program, 0, *arguments)(*arguments)

  def search(self, search: Search, limit: int) -> Run:
    """Up to `limit` ≤ LOOP further steps."""

    def program(params: Any, search: Search, limit: Array) -> Run:
      return run(self._search, params, search, limit, search.logprobs_BWN.shape[2])

    rest = search.replace(cache=None)
    key = ("search", search.cache.capacity, search.cache.form, signature(rest))
    return self._compile_with_params(key, "the beam search", program, search, np.int32(0))(search, np.int32(limit))


def beam_fields(requests: Sequence[Request], fields: dict[str, Any]) -> dict[str, Any]:
  """What `BeamPrograms.spread` takes, from what `fields_of` makes of the same requests."""
  rows, lacking = fields["length_B"].shape[0], fields["length_B"].shape[0] - len(requests)
  asked = [request.settings for request in requests]
  trees, roots = _forest(requests)
  forced = bucket(max(len(one.forced_tokens) for one in asked), _FEW_FORCED)
  forced_BF = np.full((rows, forced), NONE, np.int32)
  for row, one in enumerate(asked):
    forced_BF[row, : len(one.forced_tokens)] = one.forced_tokens
  columns = {
    "alpha": (np.float32, [one.length_penalty for one in asked]),
    "gnmt": (bool, [one.length_norm == "gnmt" for one in asked]),
    "early": (np.int8, [_EARLY[one.early_stopping] for one in asked]),
    "patience": (np.float32, [one.patience for one in asked]),
    "shortest": (np.int32, [one.min_new_tokens + 1 for one in asked]),
    "sampled": (bool, [one.temperature > 0 for one in asked]),
    "diversity": (np.float32, [one.diversity_penalty for one in asked]),
    "root": (np.int32, roots),
  }
  padded = {name: np.array([*values, *values[:1] * lacking], kind) for name, (kind, values) in columns.items()}
  kept = {name: fields[name] for name in ("context_BL", "length_B", "limit_B", "ends_BE", "settings")}
  return {**kept, "rules": Rules(**padded, forced_F=forced_BF), "forest": trees}


def room_for(requests: Sequence[Request]) -> int:
  """New tokens that every text of these requests has room for."""
  return bucket(max(request.limit - len(request.prompt_ids) for request in requests), _SMALLEST_NEW)


def _forest(requests: Sequence[Request]) -> tuple[Forest | None, list[int]]:
  """The tries of those that have continuations, and by request its root."""
  having = [row for row, request in enumerate(requests) if request.settings.continuations is not None]
  roots = [NONE] * len(requests)
  if not having:
    return None, roots
  trees, found = forest([requests[row].settings.continuations for row in having])
  for row, root in zip(having, found):
    roots[row] = root
  return trees, roots
