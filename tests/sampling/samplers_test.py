"""The law of a draw, by χ² against exact laws; and what its noise may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from decoder.sampling import Context, categorical, chain, min_p, request_key, temperature, top_k, top_p

DRAWS = 200_000
LOGITS = np.array([1.5, 0.0, -1.0, 1.5, 0.7, -3.0, 0.2, -np.inf], np.float32)
CONTEXT = Context(jnp.zeros(1, jnp.int32), jnp.int32(0), jnp.int32(0))
CHAINS = {
  "greedy": chain(temperature(0.0)),
  "temperature": chain(temperature(0.7)),
  "top_k": chain(temperature(1.3), top_k(3)),
  "top_p": chain(temperature(1.0), top_p(0.8)),
  "min_p": chain(temperature(1.0), min_p(0.2)),
  "all": chain(temperature(1.5), top_k(5), top_p(0.9), min_p(0.1)),
}


def counts(link, logits=LOGITS, seed=0):
  """How often each token is drawn, one fresh key a draw: of one request, its successive positions."""
  processed = link.update(jnp.asarray(logits), link.init(), CONTEXT)

  @jax.jit
  def draw(seed):
    key = request_key(seed)
    return jax.vmap(lambda i: categorical(jax.random.fold_in(key, i), processed))(jnp.arange(DRAWS))

  return np.bincount(np.asarray(draw(seed)), minlength=len(logits))


def softmax(x):
  weight = np.exp(np.where(x > -np.inf, x - x.max(), -np.inf))
  return weight / weight.sum()


def law(name):
  """The exact law, filters by hand: ids in the order of LOGITS are 0, 3, 4, 6, 1, 2, 5."""
  x = LOGITS.astype(np.float64)
  if name == "greedy":
    return np.eye(8)[0]
  if name == "temperature":
    return softmax(x / 0.7)
  if name == "top_k":
    return softmax(np.where(np.isin(np.arange(8), [0, 3, 4]), x / 1.3, -np.inf))
  if name == "top_p":  # .345 .345 .155 … : the third reaches .8
    return softmax(np.where(np.isin(np.arange(8), [0, 3, 4]), x, -np.inf))
  if name == "min_p":  # e^(0.2 − 1.5) = .27, e^(0 − 1.5) = .22, e^(−1 − 1.5) = .08
    return softmax(np.where(np.isin(np.arange(8), [0, 3, 4, 6, 1]), x, -np.inf))
  # T=1.5: e^0, e^0, e^−.53, e^−.87, e^−1 → .286 .286 .168 .12 .105 (of five): .9 needs all five; none is below .1
  return softmax(np.where(np.isin(np.arange(8), [0, 3, 4, 6, 1]), x / 1.5, -np.inf))


def p_value(observed, expected):
  possible = expected > 0
  if observed[~possible].any():
    return 0.0
  if possible.sum() == 1:
    return 1.0
  return stats.chisquare(observed[possible], expected[possible] * observed.sum()).pvalue


@pytest.mark.parametrize("name", CHAINS)
def test_draws_follow_the_exact_law(name):
  assert p_value(counts(CHAINS[name]), law(name)) > 0.001


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "all"])
def test_a_law_slightly_wrong_would_be_seen(name):
  """Negative control: a temperature 6 % off."""
  first, *rest = CHAINS[name].init()
  wrong = CHAINS[name]._replace(init=lambda: (np.float32(first * 1.06), *rest))
  assert p_value(counts(wrong), law(name)) < 0.001


@pytest.mark.parametrize("k", [0, -1, None])
def test_C13_top_k_off_draws_all_eight(k):
  for logits in (np.zeros(8), np.log([0.1, 0.2, 0.3, 0.05, 0.05, 0.1, 0.1, 0.1]), np.log([8, 4, 2, 1, 1, 1, 1, 1])):
    drawn = counts(chain(temperature(1.0), top_k(k)), logits.astype(np.float32))
    assert (drawn > 0).all()
    assert p_value(drawn, np.exp(logits) / np.exp(logits).sum()) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize(("k", "kept"), [(0, 600), (40, 40), (300, 300)])
def test_draws_of_many_tokens_follow_the_law(k, kept):
  """More than a list of the largest holds, fewer, and more after a filter: each is another way to draw."""
  logits = np.random.default_rng(3).normal(size=600).astype(np.float32)
  left = jax.jit(chain(temperature(1.0), top_k(k)).update)(logits, chain(temperature(1.0), top_k(k)).init(), CONTEXT)
  assert int(jnp.sum(left > -jnp.inf)) == kept
  key = request_key(5)
  draw = jax.jit(lambda x: jax.lax.map(lambda i: categorical(jax.random.fold_in(key, i), x), jnp.arange(DRAWS),
                                       batch_size=1000))  # fmt: skip
  most = np.argsort(-logits, kind="stable")[:kept]
  expected = softmax(np.where(np.isin(np.arange(600), most), logits.astype(np.float64), -np.inf))
  assert p_value(np.bincount(np.asarray(draw(left)), minlength=600), expected) > 0.001
  assert p_value(np.bincount(np.asarray(draw(left / 1.08)), minlength=600), expected) < 0.001, "negative control"


@jax.jit
def _many(seed, logits_V):
  key = request_key(seed)
  return jax.vmap(lambda i: categorical(jax.random.fold_in(key, i), logits_V))(jnp.arange(20_000))


@pytest.mark.parametrize(("seed", "slope"), [(7, 0.0), (0, 0.02), (2**32 - 1, 0.05)])
def test_C14_successive_draws_are_independent(seed, slope):
  """64 steps of one request under uniform logits, and the lag-1 autocorrelation of many."""
  tokens = np.asarray(_many(np.uint32(seed), slope * jnp.arange(64.0)))
  assert len(set(tokens[:64].tolist())) >= 8
  centred = tokens - tokens.mean()
  correlation = (centred[1:] * centred[:-1]).mean() / centred.var()
  assert abs(correlation) < 4 / np.sqrt(len(tokens))


@jax.jit
def _greedy(seeds, logits_V):
  processed = temperature(0.0).update(logits_V, np.float32(0), CONTEXT)
  return jax.vmap(lambda s: categorical(request_key(s), processed))(seeds)


@pytest.mark.parametrize(
  ("logits", "first"), [((1.0, 5.0, 5.0, 2.0), 1), ((3.0, 3.0, 3.0, 3.0), 0), ((-9.0, -8.0, -9.0, -8.0), 1)]
)
def test_C17_greedy_over_many_seeds(logits, first):
  drawn = _greedy(jnp.arange(100, dtype=jnp.uint32), jnp.array(logits))
  assert set(np.asarray(drawn).tolist()) == {first}


@pytest.mark.parametrize("size", [10, 64, 1000, 50_000])
def test_an_ids_noise_does_not_depend_on_the_vocabulary(size):
  """Ten live tokens, then masked ones: the same draws whatever V."""
  logits = np.full(size, -np.inf, np.float32)
  logits[:10] = np.linspace(0, 1, 10)
  draw = jax.jit(jax.vmap(lambda s: categorical(request_key(s), jnp.asarray(logits))))
  drawn = np.asarray(draw(jnp.arange(64, dtype=jnp.uint32)))
  want = jax.vmap(lambda s: categorical(request_key(s), jnp.asarray(logits[:10])))(jnp.arange(64, dtype=jnp.uint32))
  np.testing.assert_array_equal(drawn, want)
  assert len(set(drawn.tolist())) > 5


def test_samples_and_seeds_have_different_keys():
  keys = {tuple(jax.random.key_data(request_key(seed, sample)).tolist()) for seed in range(20) for sample in range(20)}
  assert len(keys) == 400


def test_a_small_shift_of_logits_moves_few_draws():
  """Why noise is per id: rounding noise between batch shapes must not change texts."""
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(size=1000), jnp.float32)
  nudged = logits + jnp.asarray(rng.normal(size=1000) * 1e-6, jnp.float32)
  draw = jax.jit(lambda x: jax.vmap(lambda s: categorical(request_key(s), x))(jnp.arange(2000, dtype=jnp.uint32)))
  assert int(jnp.sum(draw(logits) != draw(nudged))) <= 1
