"""Programs under guidance: the same as without, for a model that has read a negative prompt as well."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from decoder.models.registry import Network, feature_size
from decoder.programs import CHUNK, SMALLEST_CHUNK, Programs, bucket, signature
from decoder.reader import Request
from decoder.strategies import GuidedCache, State, guided, read_negative
from decoder.types import Array


class GuidedPrograms(Programs):
  """`Programs` that take `negative_fields` with the others, and hold two rows of cache for each of the batch."""

  cache_type = GuidedCache

  def __init__(self, network: Network, params: Any, *rest: Any):
    super().__init__(network._replace(model=guided(network.model, network.dtype)), params, *rest)
    self._plain = network.model
    self._features = feature_size(network, params)

  def begin(self, capacity: int, fields: dict[str, Any], cache: Any = None) -> Any:
    """Reads the negative prompts, too."""
    negative = {name: fields[name] for name in fields if name.startswith("negative_")}
    state = super().begin(capacity, {name: fields[name] for name in fields if name not in negative}, cache)
    tokens_BM = negative.pop("negative_BM")
    for start in range(0, tokens_BM.shape[1], CHUNK):
      state = self._read_negative(state, tokens_BM[:, start : start + CHUNK], np.int32(start), negative)
    return state

  def _read_negative(self, state: State, tokens_BT: np.ndarray, start: np.int32, negative: dict[str, Any]) -> State:
    def program(params: Any, state: State, tokens_BT: Array, start: Array, negative: dict[str, Any]) -> State:
      prompt_B = jnp.array(state.prompt_B, copy=True)  # a State is donated, and no buffer can be given away twice
      cache = state.cache.replace(prompt_B=prompt_B, scale_B=negative["negative_scale_B"])
      return state.replace(
        cache=read_negative(self._plain, params, cache, tokens_BT, start, negative["negative_length_B"])
      )

    arguments = (state, tokens_BT, start, negative)
    key, what = ("negative", tokens_BT.shape, signature(state)), f"negative prompts of {tokens_BT.shape[1]} tokens"
    return self._compile_with_params(key, what, program, *arguments)(*arguments)

  def _allocate(self, rows: int, capacity: int, fields: dict[str, Any]) -> GuidedCache:
    return GuidedCache.around(super()._allocate(2 * rows, capacity, fields), self._features)


def negative_fields(requests: Sequence[Request], rows: int) -> dict[str, np.ndarray]:
  """What `GuidedPrograms.begin` takes besides the rest; nothing if no request is guided."""
  if not any(request.guided for request in requests):
    return {}
  longest = max(len(request.negative_ids) for request in requests)
  width = -(-longest // CHUNK) * CHUNK if longest > CHUNK else bucket(longest, SMALLEST_CHUNK)
  fields = {
    "negative_BM": np.zeros((rows, width), np.int32),
    "negative_length_B": np.zeros(rows, np.int32),
    "negative_scale_B": np.ones(rows, np.float32),
  }
  for row, request in enumerate(requests):
    fields["negative_BM"][row, : len(request.negative_ids)] = request.negative_ids
    fields["negative_length_B"][row] = len(request.negative_ids)
    fields["negative_scale_B"][row] = request.settings.guidance_scale
  return fields
