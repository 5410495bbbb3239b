"""Programs of encoder–decoders: the same as others, on a cache that an encoder has written to before anything else."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from decoder.beam_programs import BeamPrograms
from decoder.cache import Cache
from decoder.programs import SMALLEST_CHUNK, Programs, bucket, signature
from decoder.reader import Request
from decoder.strategies import State
from decoder.types import NONE, Array

_FIELDS = ("source_BS", "source_length_B")


class EncodedPrograms(Programs):
  """`Programs` that take `source_fields` with the others."""

  def begin(self, capacity: int, fields: dict[str, Any], cache: Any = None) -> Any:
    """Reads the sources, too."""
    state = super().begin(capacity, fields, cache)
    return self._encode(state, *(fields[name] for name in _FIELDS))

  def _encode(self, state: State, source_BS: np.ndarray, length_B: np.ndarray) -> State:
    def program(params: Any, state: State, source_BS: Array, length_B: Array) -> State:
      positions_1S = jnp.arange(source_BS.shape[1], dtype=jnp.int32)[None]
      positions_BS = jnp.where(positions_1S < length_B[:, None], positions_1S, NONE)
      return state.replace(cache=self._network.encode(params, source_BS, positions_BS, state.cache))

    arguments = (state, source_BS, length_B)
    key, what = ("encode", source_BS.shape, signature(state)), f"sources of {source_BS.shape[1]} tokens"
    return self._compile_with_params(key, what, program, *arguments)(*arguments)

  def _allocate(self, rows: int, capacity: int, fields: dict[str, Any]) -> Cache:
    return super()._allocate(rows, capacity, fields, source=fields["source_BS"].shape[1])


class EncodedBeamPrograms(EncodedPrograms, BeamPrograms):
  """Both at once: the beams of a text look at one row of its source."""


def source_fields(requests: Sequence[Request], rows: int) -> dict[str, np.ndarray]:
  """What `EncodedPrograms.begin` takes besides the rest; nothing for a model without an encoder."""
  longest = max(len(request.source_ids) for request in requests)
  if not longest:
    return {}
  source_BS, length_B = np.zeros((rows, bucket(longest, SMALLEST_CHUNK)), np.int32), np.zeros(rows, np.int32)
  for row, request in enumerate(requests):
    source_BS[row, : len(request.source_ids)] = request.source_ids
    length_B[row] = len(request.source_ids)
  return dict(zip(_FIELDS, (source_BS, length_B)))
