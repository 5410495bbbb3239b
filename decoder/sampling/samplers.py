"""The draw itself.

Gumbel-max: the token with the largest logit + noise is a draw from softmax(logits) (Gumbel 1954; Maddison et al. 2014,
arXiv:1411.0030). The noise of an id depends on the key and the id alone, so a rounding difference between batch
shapes moves a draw only where two noisy logits all but tie, and noise is made only for the ids that may win.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from decoder.sampling.selection import FEW, head, largest, only_if
from decoder.types import Array, Key


def categorical(key: Key, logits_V: Array) -> Array:
  """One token (int32) from softmax(logits_V). −inf is never drawn unless everything is −inf.

  Noise is made for nothing where one token alone is possible, for the few that are left where filters bound them, and
  else for all: the same noise each time, so the draw does not depend on which.
  """
  size = logits_V.shape[0]
  possible = jnp.sum((logits_V > -jnp.inf).astype(jnp.float32))
  words = jax.random.key_data(key)
  many = possible > FEW

  def all_noisy(x_V: Array, words: Array) -> Array:
    return x_V + noise(words, jnp.arange(size, dtype=jnp.uint32))

  def among_few(_: Array, x_V: Array, words: Array) -> Array:
    top_C, ids_C = head(x_V)
    return ids_C[jnp.argmax(top_C + noise(words, ids_C.astype(jnp.uint32)))].astype(jnp.int32)

  token = largest(only_if(many, all_noisy, logits_V, words))
  return only_if((possible > 1) & ~many, among_few, token, logits_V, words)


def noise(words: Array, ids: Array) -> Array:
  """Gumbel noise, float32, for token ids (uint32) under a key's two words: threefry with the id as its counter.

  The largest noises decide a draw, so the uniform they come from is fine near its end: −log(−log1p(−v)), v near 0.
  """
  hashed = threefry_2x32(words, jnp.concatenate([jnp.zeros_like(ids), ids]))
  bits = hashed[: ids.shape[0]] ^ hashed[ids.shape[0] :]
  v = (bits.astype(jnp.float32) + 0.5) * np.float32(2**-32)
  # v may round up to 1, whose logarithm is not finite; the float below it is as likely.
  return -jnp.log(-jnp.log1p(-jnp.minimum(v, np.float32(1 - 2**-24))))


def request_key(seed: int, sample: int = 0) -> Key:
  """The key of one sample of a request; every draw folds its token's absolute position into it."""
  return jax.random.fold_in(jax.random.key(seed), sample)
