"""What weights in few bits cost in quality: logits and next-token laws against float32, teacher-forced on a text."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder.cache import Raw, allocate
from decoder.generate import LM
from decoder.types import Array

WINDOW = 256  # tokens read from an empty cache: bounds the logits held, at 49,152 ids, to 50 MB a model


class Quality(NamedTuple):
  """Over all positions: the largest and the mean absolute logit error, KL(reference ‖ other) in nats, mean and
  largest, and the share of positions where both would choose the same token."""

  max_error: float
  mean_error: float
  mean_kl: float
  max_kl: float
  same_choice: float
  tokens: int


def compare(reference: LM, other: LM, ids: Sequence[int]) -> Quality:
  """Reads windows of `ids` with both models. What is left of the last window is not read.

  Raises ValueError for less than a window.
  """
  if len(ids) < WINDOW:
    raise ValueError(f"wanted at least {WINDOW} tokens of text, got {len(ids)}; give a longer text")
  figures = [_figures(*pair) for pair in zip(_logits(reference, ids), _logits(other, ids))]
  error_WT, mean_WT, kl_WT, same_WT = np.stack(jax.device_get(figures), axis=1)
  kl_WT = np.maximum(kl_WT, 0.0)  # a sum of float32 terms may end just below 0
  return Quality(
    float(error_WT.max()), float(mean_WT.mean()), float(kl_WT.mean()), float(kl_WT.max()), float(same_WT.mean()),
    kl_WT.size,
  )  # fmt: skip


def _logits(lm: LM, ids: Sequence[int]) -> Iterator[Array]:
  """float32 logits [T, V] of one window after the other."""
  read = _reader(lm)
  for start in range(0, len(ids) - WINDOW + 1, WINDOW):
    yield read(lm.params, jnp.asarray([ids[start : start + WINDOW]], jnp.int32))


def _reader(lm: LM) -> Callable[[Any, Array], Array]:
  def read(params: Any, tokens_BT: Array) -> Array:
    cache = allocate(lm.network.cache_spec, 1, WINDOW, codec=Raw(lm.network.dtype, bits=True))
    features_BTD, _ = lm.model.forward(params, tokens_BT, jnp.arange(WINDOW, dtype=jnp.int32)[None], cache)
    return lm.model.head(params, features_BTD[0]).astype(jnp.float32)

  return jax.jit(read)


@jax.jit
def _figures(reference_TV: Array, other_TV: Array) -> tuple[Array, Array, Array, Array]:
  error_TV = jnp.abs(reference_TV - other_TV)
  p_TV, q_TV = (jax.nn.log_softmax(logits, axis=-1) for logits in (reference_TV, other_TV))
  kl_T = jnp.sum(jnp.exp(p_TV) * (p_TV - q_TV), axis=-1)
  same_T = reference_TV.argmax(-1) == other_TV.argmax(-1)
  return error_TV.max(-1), error_TV.mean(-1), kl_T, same_T.astype(jnp.float32)
