"""The draw itself.

Gumbel-max: the token with the largest logit + noise is a draw from softmax(logits) (Gumbel 1954; Maddison et al. 2014,
arXiv:1411.0030). The noise of an id depends on the key and the id alone, so a rounding difference between batch
shapes moves a draw only where two noisy logits all but tie.
"""

import jax
import jax.numpy as jnp

from decoder.sampling.transforms import largest, only_if
from decoder.types import Array, Key


def categorical(key: Key, logits_V: Array) -> Array:
  """One token (int32) from softmax(logits_V). −inf is never drawn unless everything is −inf.

  Where one token alone is possible no noise is made: greedy rows pay for an argmax only.
  """
  open_ = jnp.sum((logits_V > -jnp.inf).astype(jnp.float32)) > 1

  def noisy(x_V: Array) -> Array:
    return x_V + jax.random.gumbel(jax.random.clone(key), x_V.shape, jnp.float32)  # clone: used once, though in a loop

  return largest(only_if(open_, noisy, logits_V))


def request_key(seed: int, sample: int = 0) -> Key:
  """The key of one sample of a request; every draw folds its token's absolute position into it."""
  return jax.random.fold_in(jax.random.key(seed), sample)
