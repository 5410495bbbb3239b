"""A conversation whose cache lives on: each turn reads only what the cache does not hold yet."""

import threading
from collections.abc import Sequence
from typing import Any

from decoder.decoding import Decoding, Stream
from decoder.programs import SMALLEST_CAPACITY, bucket
from decoder.settings import Settings, gather_settings


class Session:
  """One row of cache and the ids it holds.

  A prompt that begins like what is held is read from where it differs, at least one token of it; the text is the same
  as without the session. The cache grows by doubling, up to the model's context.
  """

  def __init__(self, lm: Any, capacity: int | None = None):
    known = capacity is None or (isinstance(capacity, int) and not isinstance(capacity, bool))
    if not known or (capacity is not None and not 1 <= capacity <= lm.context):
      raise ValueError(f"a session's capacity is a number of tokens, 1 … {lm.context}, or None, got {capacity!r}")
    self._lm, self._capacity = lm, capacity or min(lm.context, 4 * SMALLEST_CAPACITY)
    self.clear()

  @property
  def held(self) -> int:
    """Tokens in the cache."""
    return len(self._ids)

  def clear(self) -> None:
    """Forgets everything."""
    self._cache, self._ids = None, ()

  def stream(self, prompt: Any, settings: Settings | None = None, **changes: Any) -> Stream:
    """Like LM.stream; read or close the stream before the next turn."""
    if self._ids and self._cache is None:
      raise RuntimeError("the last stream of this session has not ended; read it to its end or close() it")
    settings = gather_settings(settings, changes)
    request = self._lm.request(prompt, settings)
    wanted = min(bucket(request.reach, self._capacity), self._lm.context)
    programs = self._lm.programs([request.settings])
    if not programs.takes(self._cache):
      self.clear()
    # What is not read again cannot be told of.
    cache, held = self._cache, 0 if settings.prompt_logprobs else _shared(self._ids, request.prompt_ids)
    self._cache = None  # given away until the stream ends
    try:
      if cache is not None and cache.capacity < wanted:
        cache = programs.grow(cache, wanted)
      cancel = threading.Event()
      decoding = self._lm.start([request], capacity=wanted, cache=cache, held=held, cancel=cancel)
    except BaseException:  # a Ctrl-C while it compiles, say; what the cache is now, nobody knows
      self.clear()
      raise
    return Stream(decoding, self._lm.load_s, cancel, self._take_back)

  def _take_back(self, decoding: Decoding) -> None:
    self._cache, self._ids = decoding.state.cache, decoding.cached_ids()
    if not decoding.sound:
      self.clear()  # what is not finite would spread to every later turn


def _shared(held: Sequence[int], wanted: Sequence[int]) -> int:
  """Tokens at the start of `wanted` that need not be read; never all of them: something must be left to run."""
  common = 0
  for one, other in zip(held, wanted[:-1]):
    if one != other:
      break
    common += 1
  return common
