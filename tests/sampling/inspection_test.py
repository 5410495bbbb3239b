"""Log-probs of a draw against float64, ties, and that an inspection leaves the text alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import begin, prompts, rand_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.sampling import Together, chain, logprobs, processed_logprobs, raw_logprobs, temperature, top_k
from decoder.strategies import autoregressive, run


def oracle(logits_V, token, number):
  """By sorting everything, in float64: log-prob, rank, alternatives."""
  x_V = np.asarray(logits_V, np.float64)
  peak = x_V.max()
  logprob_V = x_V - peak - np.log(np.exp(x_V - peak).sum())
  order = sorted(range(len(x_V)), key=lambda i: (-x_V[i], i))
  return logprob_V[token], order.index(token) + 1, order[:number], logprob_V[order[:number]]


few = st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 1.0, 30.0])  # ties, both zeros, removed tokens


@given(st.lists(few, min_size=2, max_size=40).filter(lambda x: max(x) > -np.inf), st.data())
@settings(max_examples=60, deadline=None)
def test_logprob_rank_and_alternatives_are_the_oracles(logits, data):
  token = data.draw(st.sampled_from([i for i, x in enumerate(logits) if x > -np.inf]))
  logits_V = np.zeros(40, np.float32) - np.inf  # one shape, one compilation
  logits_V[: len(logits)] = logits
  got = jax.jit(logprobs, static_argnums=2)(logits_V, token, 5)
  logprob, rank, top, top_logprobs = oracle(logits_V, token, 5)
  assert got.logprob == pytest.approx(logprob, abs=1e-5)
  assert (int(got.rank), got.top_ids_C.tolist()) == (rank, top)
  np.testing.assert_allclose(got.top_logprobs_C, top_logprobs, atol=1e-5)


def test_a_whole_vocabulary_and_no_alternatives():
  logits_V = jax.random.normal(jax.random.key(1), (49152,)) * 5
  for token in (0, 17, 49151):
    got, (logprob, rank, *_) = logprobs(logits_V, token, 0), oracle(logits_V, token, 0)
    assert got.logprob == pytest.approx(logprob, rel=1e-5)
    assert (int(got.rank), got.top_ids_C.shape) == (rank, (0,))
  assert logprobs(jnp.zeros(3), 2, 20).top_ids_C.tolist() == [0, 1, 2], "no more than there are"


def test_run_collects_what_each_step_tells():
  """In one loop, in single steps, and against the oracle on the logits a step by itself sees; the text stays."""
  network, params = rand_lm()
  link = chain(temperature(0.7), top_k(9))
  inspect = Together((("raw", raw_logprobs(3)), ("processed", processed_logprobs(1))))
  rows, limits = prompts([3, 9]), [12, 14]
  plain = autoregressive(network.model, link)
  strategy = autoregressive(network.model, link, None, inspect)
  logits = autoregressive(network.model, link, None, lambda drawn: (drawn.raw_V, drawn.kept_V))

  def decode(strategy):
    state = begin(network, rows, limits, transforms=link)
    state, _ = jax.jit(strategy.step)(params, state)
    return jax.jit(lambda p, s: run(strategy, p, s, 20, 20))(params, state).emission

  told, free, seen = decode(strategy), decode(plain), decode(logits)
  np.testing.assert_array_equal(told.tokens_BN, free.tokens_BN)
  assert free.info.details is None
  for b in range(2):
    assert int(told.count_B[b]) == limits[b] - len(rows[b]) - 1
    for n in range(int(told.count_B[b])):
      for name, number, logits_BNV in (("raw", 3, seen.info.details[0]), ("processed", 1, seen.info.details[1])):
        got = jax.tree.map(lambda x, b=b, n=n: x[b, n], told.info.details[name])
        logprob, rank, top, top_logprobs = oracle(logits_BNV[b, n], int(told.tokens_BN[b, n]), number)
        assert got.logprob == pytest.approx(logprob, abs=1e-5)
        assert (int(got.rank), got.top_ids_C.tolist()) == (rank, top)
        np.testing.assert_allclose(got.top_logprobs_C, top_logprobs, atol=1e-5)
  raw, processed = told.info.details["raw"], told.info.details["processed"]
  assert not np.allclose(raw.logprob[0, :8], processed.logprob[0, :8]), "negative control: two different laws"
