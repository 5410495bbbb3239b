"""χ²: 200,000 draws through the full chain follow the law that the oracle computes, for every filter and penalty."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import oracle
from sampling.full_chain_test import context_of
from sampling.oracle import Row
from scipy import stats

from decoder.sampling import SamplingSettings, categorical

DRAWS = 200_000
LOGITS = np.array([1.5, 0.0, -1.0, 1.4, 0.7, -3.0, 0.2, -np.inf], np.float32)
ROW = Row((1, 2, 4, 1, 2, 4, 1, 2), 3, (0, 5), 9)


@functools.partial(jax.jit, static_argnums=0)
def _draws(update, logits_V, state, context, keys):
  def draw(key):
    return categorical(key, update(logits_V, state, context._replace(key=key)))

  return jax.vmap(draw)(keys)


def counts(settings, seed=0):
  chain = SamplingSettings(**{"temperature": 1.0, **settings}).chain(True)
  keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.arange(DRAWS))
  state = jax.tree.map(jnp.asarray, chain.init())
  drawn = _draws(chain.update, jnp.asarray(LOGITS), state, context_of(ROW), keys)
  return np.bincount(np.asarray(drawn), minlength=len(LOGITS))


def p_value(observed, expected):
  possible = expected > 0
  if observed[~possible].any():
    return 0.0
  return stats.chisquare(observed[possible], expected[possible] * observed.sum()).pvalue if possible.sum() > 1 else 1.0


def law(*steps):
  left = LOGITS
  for name, *numbers in steps:
    left = oracle.apply(name, numbers, left, ROW)
  return oracle.law(np.asarray(left, np.float64))


CASES = {
  "temperature": (dict(temperature=0.7), [("temperature", 0.7)]),
  "dynamic temperature": (dict(temperature=0.9, dynatemp_range=0.5), [("dynamic_temperature", 0.9, 0.5)]),
  "top_k": (dict(top_k=3), [("top_k", 3)]),
  "top_p": (dict(top_p=0.8), [("top_p", 0.8)]),
  "min_p": (dict(min_p=0.2), [("min_p", 0.2)]),
  "typical": (dict(typical_p=0.6), [("typical", 0.6)]),
  "epsilon": (dict(epsilon_cutoff=0.1), [("epsilon", 0.1)]),
  "eta": (dict(eta_cutoff=0.2), [("eta", 0.2)]),
  "top_n_sigma": (dict(top_n_sigma=1.0), [("top_n_sigma", 1.0)]),
  "mirostat": (dict(mirostat_tau=1.1), [("mirostat", 2.2)]),
  "repetition": (dict(repetition_penalty=1.7), [("repetition", 1.7)]),
  "presence": (dict(presence_penalty=0.9), [("presence", 0.9)]),
  "frequency": (dict(frequency_penalty=0.4), [("frequency", 0.4)]),
  "dry": (dict(dry_multiplier=0.5, dry_base=1.2), [("dry", 0.5, 1.2)]),
  "no_repeat_ngram": (dict(no_repeat_ngram_size=3), [("no_repeat_ngram", 3)]),
  "logit_bias": (dict(logit_bias={0: -1.0, 6: 2.0}), [("logit_bias", {0: -1.0, 6: 2.0})]),
  "bad_words": (dict(bad_words=[[1, 2, 0], [3]]), [("bad_words", [[1, 2, 0], [3]])]),
  "length_decay": (dict(length_decay=(1, 1.2)), [("length_decay", 1, 1.2)]),
  "many": (
    dict(temperature=1.5, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
    [("repetition", 1.2), ("temperature", 1.5), ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)],
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_oracle_s_law(name):
  settings, steps = CASES[name]
  assert p_value(counts(settings), law(*steps)) > 0.001


@pytest.mark.parametrize("name", [name for name in CASES if name != "mirostat"])
def test_the_setting_matters(name):
  """Negative control: without it the law is another one."""
  assert p_value(counts({}), law(*CASES[name][1])) < 0.001


@pytest.mark.parametrize(("probability", "threshold"), [(0.3, 0.1), (1.0, 0.1), (0.5, 0.3)])
def test_xtc_acts_as_often_as_asked(probability, threshold):
  acting, idle = law(("xtc", threshold)), law()
  observed = counts(dict(xtc_probability=probability, xtc_threshold=threshold))
  assert p_value(observed, probability * acting + (1 - probability) * idle) > 0.001
  if threshold == 0.1:
    assert p_value(observed, (probability * 0.95) * acting + (1 - probability * 0.95) * idle) < 0.001, "control"


def test_xtc_and_the_draw_are_independent():
  """One key serves both: what is drawn among equals may not depend on whether XTC acted."""
  chain = SamplingSettings(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.2).chain(True)
  logits = np.array([1.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], np.float32)
  keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(jnp.arange(DRAWS))
  state, context = jax.tree.map(jnp.asarray, chain.init()), context_of(ROW)
  drawn = np.asarray(_draws(chain.update, jnp.asarray(logits), state, context, keys))
  off = np.asarray(_draws(chain.update, jnp.asarray(logits),
                          jax.tree.map(jnp.asarray, SamplingSettings(temperature=1.0).chain(True).init()),
                          context, keys))  # fmt: skip
  acted = drawn != off
  table = np.array([[np.sum(acted & (drawn == token)) for token in range(2, 8)]])
  assert stats.chisquare(table[0]).pvalue > 0.001


def test_mirostat_moves_as_its_paper_says():
  """The surprise of what is drawn, among what was kept, steers the next step."""
  chain = SamplingSettings(temperature=1.0, mirostat_tau=1.5, mirostat_eta=0.3).chain(True)
  state, most = jax.tree.map(jnp.asarray, chain.init()), 3.0
  step = jax.jit(lambda state, context: _step(chain, state, context))
  for number in range(30):
    kept, token, state = step(state, context_of(ROW, number))
    must, may = oracle.bounds("mirostat", most, LOGITS)
    got = set(np.nonzero(np.asarray(kept) > -np.inf)[0].tolist())
    assert must <= got <= may
    probability = oracle.law(np.where(np.isin(np.arange(8), list(got)), LOGITS.astype(np.float64), -np.inf))
    most -= 0.3 * (-np.log2(probability[int(token)]) - 1.5)
  assert most != 3.0


def _step(chain, state, context):
  kept = chain.update(jnp.asarray(LOGITS), state, context)
  token = categorical(context.key, kept)
  return kept, token, chain.observe(state, token, kept)
