"""The cache of training: the same logits as any other, and gradients that finite differences agree with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import cache_for, few, rand_lm
from sources import padded, sources, tiny

from decoder.cache import Whole, allocate

IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 0, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, -1, -1, -1]], np.int32)


def language_logits(params, network, cache):
  features_BTD, _ = network.model.forward(params, jnp.asarray(IDS), jnp.asarray(POSITIONS), cache)
  return network.model.head(params, features_BTD.reshape(-1, features_BTD.shape[-1]))


def translated_logits(params, network, cache):
  return language_logits(params, network, network.encode(params, *padded(sources(9, 5)), cache))


def whole(network):
  return allocate(network.cache_spec, 2, network.context, layout=Whole, encoded=Whole)


def check_the_same(logits, network, params, cache):
  there = POSITIONS.reshape(-1) >= 0
  got, want = (np.asarray(logits(params, network, one))[there] for one in (whole(network), cache))
  np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("variant", ["rope", "gqa", "window", "absolute"])
def test_a_language_model_says_the_same(variant):
  network, params = rand_lm(variant)
  check_the_same(language_logits, network, params, cache_for(network, 2, 16))


@pytest.mark.parametrize("name", ["t5", "nllb"])
def test_a_translator_says_the_same(name):
  network, params = tiny(name)
  check_the_same(translated_logits, network, params, allocate(network.cache_spec, 2, 16, source=16))


@pytest.mark.parametrize("name", few(["nllb", "t5"], 1))
def test_gradients_are_those_of_decoding(name):
  """Outside of jit the loop of the other cache has a length, and can be run backwards."""
  network, params = tiny(name)

  def loss(params, cache):
    logp_NV = jax.nn.log_softmax(translated_logits(params, network, cache))
    return jnp.sum(jnp.where(jnp.asarray(POSITIONS.reshape(-1) >= 0)[:, None], logp_NV, 0.0)) / 64

  got = jax.jit(jax.grad(loss))(params, whole(network))
  want = jax.grad(loss)(params, allocate(network.cache_spec, 2, 16, source=16))
  for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(mine, theirs, atol=1e-4 * (1 + float(jnp.abs(theirs).max())))
  assert max(float(jnp.abs(slope).max()) for slope in jax.tree.leaves(want["encoder"])) > 0.01


def test_the_cache_of_decoding_has_no_gradient():
  """Why there is another: the loop over filled blocks has no length before it runs."""
  network, params = tiny("nllb")
  cache = allocate(network.cache_spec, 2, 16, source=16)
  with pytest.raises(ValueError, match="Reverse-mode differentiation"):
    jax.jit(jax.grad(lambda params: jnp.sum(translated_logits(params, network, cache))))(params)
