"""What is forbidden, favoured or forced by id: lists of tokens and of sequences, the row's ends and its length.

Lists are data: padded with NONE to a power of two, and generously, so that ordinary ones share a compilation. What
is forced stands although something before it has forbidden it.
"""

import numbers
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from decoder.sampling.penalties import Scope, begin, encoded, not_one
from decoder.sampling.selection import only_if
from decoder.sampling.transforms import Added, Context, LogitTransform, Skipped, check
from decoder.types import NONE, Array

_IDS = 128  # room for so many ids at least
_SEQUENCES, _TOKENS = 16, 8  # and for sequences, and tokens in each


def allowed_tokens(ids: Sequence[int] | None) -> LogitTransform:
  """Forbids all other tokens. None is off; an empty list is an error, since nothing could be drawn."""
  if ids is not None and len(ids) == 0:
    raise ValueError("allowed_tokens must hold at least one id, or be None for all, got none")
  state = padded_ids("allowed_tokens", ids or ())
  return LogitTransform(lambda: state, Skipped(any_ids, _allowed_tokens))


def suppress(ids: Sequence[int]) -> LogitTransform:
  """Forbids these tokens."""
  state = padded_ids("suppress_tokens", ids)
  return LogitTransform(lambda: state, Added(any_ids, _suppress))


def begin_suppress(ids: Sequence[int]) -> LogitTransform:
  """Forbids these as the first token that is written."""
  state = padded_ids("begin_suppress_tokens", ids)
  return LogitTransform(lambda: state, Added(any_ids, _begin_suppress))


def logit_bias(bias: Mapping[int, float]) -> LogitTransform:
  """Adds to the logits of these ids."""
  ids_N = padded_ids("logit_bias", tuple(bias))
  return LogitTransform(lambda: (ids_N, _biases("logit_bias", bias, ids_N.shape[0])), Added(any_first_ids, _logit_bias))


def sequence_bias(bias: Mapping[Sequence[int], float]) -> LogitTransform:
  """Adds to the logit of a sequence's last token where the row ends with the tokens before it."""
  sequences_NM = padded_sequences("sequence_bias", tuple(bias))
  state = (sequences_NM, _biases("sequence_bias", bias, sequences_NM.shape[0]))
  return LogitTransform(lambda: state, Added(any_first_ids, _sequence_bias))


def bad_words(sequences: Sequence[Sequence[int]], within: Scope = "all") -> LogitTransform:
  """Forbids the last token of each sequence where the row, or that part of it, ends with the tokens before it."""
  state = (padded_sequences("bad_words", sequences), encoded("bad_words_scope", within))
  return LogitTransform(lambda: state, Added(any_first_ids, _bad_words))


def min_new_tokens(number: int) -> LogitTransform:
  """Forbids every id that ends the row until so many tokens are written."""
  check("min_new_tokens", number, lambda n: n % 1 == 0 and 0 <= n < 2**31, "an integer ≥ 0")
  return LogitTransform(lambda: np.int32(number), Added(_some, _min_new_tokens))


def forced_bos(token: int | None) -> LogitTransform:
  """Makes this the first token that is written. None is off."""
  state = _one_id("forced_bos", token)
  return LogitTransform(lambda: state, Skipped(_an_id, _forced_bos))


def forced_eos(token: int | None) -> LogitTransform:
  """Makes this the last token before the row's limit. None is off."""
  state = _one_id("forced_eos", token)
  return LogitTransform(lambda: state, Skipped(_an_id, _forced_eos))


def length_decay(start: int = 0, factor: float = 1.0) -> LogitTransform:
  """Once more than `start` tokens are written, adds |x| · (factor^excess − 1) to the logit x of every id that ends the
  row (transformers' exponential_decay_length_penalty). A factor of 1 is off; above 1 favours the end."""
  check("length_decay", start, lambda n: n % 1 == 0 and 0 <= n < 2**31, "(tokens ≥ 0, factor)")
  check("length_decay", factor, lambda x: 0 < x <= 100, "(tokens, factor in (0, 100])")
  state = (np.float32(factor), np.int32(start))
  return LogitTransform(lambda: state, Skipped(not_one, _length_decay))


def padded_ids(name: str, ids: Sequence[int]) -> np.ndarray:
  """int32, padded with NONE. ValueError that names the setting for what is no id."""
  listed = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
  if not listed or not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
    raise ValueError(f"{name} must hold token ids, integers ≥ 0, got {ids!r}")
  padded_N = np.full(_bucket(len(ids), _IDS), NONE, np.int32)
  padded_N[: len(ids)] = ids
  return padded_N


def padded_sequences(name: str, sequences: Sequence[Sequence[int]]) -> np.ndarray:
  """int32, a sequence a row, padded with NONE. ValueError that names the setting."""
  listed = isinstance(sequences, Sequence) and not isinstance(sequences, str | bytes)
  if not listed or not all(isinstance(one, Sequence) and not isinstance(one, str) and len(one) for one in sequences):
    raise ValueError(f"{name} must hold sequences of at least one token id, got {sequences!r}")
  longest = max((len(one) for one in sequences), default=0)
  padded_NM = np.full((_bucket(len(sequences), _SEQUENCES), _bucket(longest, _TOKENS)), NONE, np.int32)
  for row, one in enumerate(sequences):
    padded_NM[row, : len(one)] = padded_ids(name, one)[: len(one)]
  return padded_NM


def _bucket(size: int, smallest: int) -> int:
  return max(smallest, 1 << max(size - 1, 0).bit_length())


def _biases(name: str, bias: Mapping, size: int) -> np.ndarray:
  for value in bias.values():
    check(name, value, lambda x: abs(x) < 2.0**100, "a finite number for each token; to forbid one use bad_words")
  padded_N = np.zeros(size, np.float32)
  padded_N[: len(bias)] = list(bias.values())
  return padded_N


def _one_id(name: str, token: int | None) -> np.int32:
  if token is None:
    return np.int32(NONE)
  return padded_ids(name, (token,))[0]


def any_ids(ids: Array) -> Array:
  return ids.ravel()[0] >= 0


def any_first_ids(state: tuple) -> Array:
  return any_ids(state[0])


def _some(number: Array) -> Array:
  return number > 0


def _an_id(token: Array) -> Array:
  return token >= 0


def _among(ids_N: Array, size: int) -> Array:
  """Whether each token is listed."""
  return jnp.zeros(size, bool).at[jnp.where(ids_N < 0, size, ids_N)].set(True, mode="drop")


def _allowed_tokens(logits_V: Array, ids_N: Array, context: Context) -> Array:
  return jnp.where(_among(ids_N, logits_V.shape[0]), logits_V, -jnp.inf)


def _banned(ids_N: Array) -> tuple[Array, Array]:
  return ids_N, jnp.full(ids_N.shape, -jnp.inf, jnp.float32)


def _suppress(ids_N: Array, context: Context) -> tuple[Array, Array]:
  return _banned(ids_N)


def _begin_suppress(ids_N: Array, context: Context) -> tuple[Array, Array]:
  return _banned(jnp.where(context.length == context.prompt, ids_N, NONE))


def _logit_bias(state: tuple, context: Context) -> tuple[Array, Array]:
  return state


def _completing(sequences_NM: Array, context: Context, start: Array | int = 0) -> Array:
  """The last token of each sequence whose other tokens end the row, from `start` on;
  NONE for the rest."""
  size_N = jnp.sum((sequences_NM >= 0).astype(jnp.int32), axis=1)
  column_M = jnp.arange(sequences_NM.shape[1])
  at_NM = context.length - (size_N[:, None] - 1) + column_M[None]
  last_N = jnp.take_along_axis(sequences_NM, jnp.maximum(size_N - 1, 0)[:, None], axis=1)[:, 0]
  said_NM = jnp.take(context.tokens_L, at_NM, mode="clip")
  agree_NM = ((said_NM == sequences_NM) & (at_NM >= start)) | (column_M[None] >= size_N[:, None] - 1)
  return jnp.where(jnp.all(agree_NM, axis=1) & (size_N > 0), last_N, NONE)


def _sequence_bias(state: tuple, context: Context) -> tuple[Array, Array]:
  sequences_NM, bias_N = state
  return _completing(sequences_NM, context), bias_N


def _bad_words(state: tuple, context: Context) -> tuple[Array, Array]:
  sequences_NM, within = state
  return _banned(_completing(sequences_NM, context, begin(within, context)))


def _min_new_tokens(number: Array, context: Context) -> tuple[Array, Array]:
  early = context.length - context.prompt < number
  return _banned(jnp.where(early, context.ends_E, NONE))


def _force(logits_V: Array, token: Array, now: Array) -> Array:
  def force(logits_V: Array, token: Array) -> Array:
    return jnp.where(jnp.arange(logits_V.shape[0]) == token, 0.0, -jnp.inf)

  return only_if(now, force, logits_V, token)


def _forced_bos(logits_V: Array, token: Array, context: Context) -> Array:
  return _force(logits_V, token, (token >= 0) & (context.length == context.prompt))


def _forced_eos(logits_V: Array, token: Array, context: Context) -> Array:
  return _force(logits_V, token, (token >= 0) & (context.length == context.limit - 1))


def _length_decay(logits_V: Array, state: tuple, context: Context) -> Array:
  factor, start = state
  excess = jnp.maximum(context.length - context.prompt - start, 0)
  ends_E = jnp.where(context.ends_E < 0, logits_V.shape[0], context.ends_E)
  x_E = jnp.take(logits_V, ends_E, mode="clip")
  gain_E = jnp.abs(x_E) * (factor ** excess.astype(jnp.float32) - 1)
  raised_E = jnp.where(x_E > -jnp.inf, x_E + gain_E, x_E)  # a forbidden end stays so
  return logits_V.at[ends_E].set(raised_E, mode="drop")
