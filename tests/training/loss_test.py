"""Cross-entropy against its definition, and the loss of a translator against log-probs of its own decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import few
from sources import V, padded, sources, tiny

from decoder.cache import allocate
from decoder.training.loss import Pairs, cross_entropy, positions, translation_loss

START = 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_its_definition(smoothing):
  rng = np.random.default_rng(0)
  logits_NV, targets_N = rng.normal(size=(5, 7)).astype(np.float32), np.array([3, -1, 0, 6, -1])
  law_NV = np.exp(logits_NV.astype(np.float64))
  law_NV /= law_NV.sum(axis=1, keepdims=True)
  want = 0.0
  for law_V, target in zip(law_NV, targets_N):
    if target >= 0:
      asked_V = np.full(7, smoothing / 7)
      asked_V[target] += 1 - smoothing
      want -= asked_V @ np.log(law_V)
  total, number = cross_entropy(jnp.asarray(logits_NV), jnp.asarray(targets_N), smoothing)
  assert float(total) == pytest.approx(want, rel=1e-5)
  assert float(number) == 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_its_gradient_is_that_of_the_definition(smoothing):
  rng = np.random.default_rng(1)
  logits_NV, targets_N = jnp.asarray(rng.normal(size=(5, 7)), jnp.float32), jnp.array([3, -1, 0, 6, -1])

  def plain(logits_NV):
    logp_NV = jax.nn.log_softmax(logits_NV)
    asked_NV = (1 - smoothing) * jax.nn.one_hot(targets_N, 7) + smoothing / 7
    return -jnp.sum(jnp.where(targets_N[:, None] >= 0, asked_NV * logp_NV, 0.0))

  got = jax.grad(lambda logits_NV: cross_entropy(logits_NV, targets_N, smoothing)[0])(logits_NV)
  np.testing.assert_allclose(got, jax.grad(plain)(logits_NV), atol=1e-6)


def test_positions_say_where_there_are_tokens():
  np.testing.assert_array_equal(positions(jnp.array([[5, 0, -1], [-1, -1, -1]])), [[0, 1, -1], [-1, -1, -1]])


@pytest.mark.parametrize("name", few(["nllb", "t5"], 1))
def test_the_loss_is_that_of_decoding_token_by_token(name):
  network, params = tiny(name)
  texts, targets = sources(9, 4), [[*ids, 1] for ids in sources(5, 3, seed=1)]
  pairs = Pairs(*(np.stack([np.pad(ids, (0, 16 - len(ids)), constant_values=-1) for ids in rows])
                  for rows in (texts, targets, targets)))  # fmt: skip
  total, number = jax.jit(translation_loss(network, START))(params, pairs)
  want = 0.0
  for text, target in zip(texts, targets):
    cache = network.encode(params, *padded([text]), allocate(network.cache_spec, 1, 16, source=16))
    for step, (shown, asked) in enumerate(zip([START, *target], target)):
      features, cache = network.model.forward(params, jnp.array([[shown]]), jnp.array([[step]]), cache)
      want -= float(jax.nn.log_softmax(network.model.head(params, features[:, 0])[0])[asked])
  assert float(number) == sum(map(len, targets))
  assert float(total) == pytest.approx(want, rel=1e-4)
  moved = pairs._replace(shown_BT=(pairs.shown_BT + 1) % V)
  assert abs(float(translation_loss(network, START)(params, moved)[0]) - want) > 0.1, (
    "negative control: shown another text"
  )
