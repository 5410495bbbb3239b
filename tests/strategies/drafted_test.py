"""Laws of guesses that are drawn: the law is plain decoding's, and as many are kept as two laws have in common."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from companions import (
  BATCH,
  CHAINS,
  DRAWS,
  LIMITS,
  ROWS,
  SEEDS,
  WIDE,
  companions,
  draft_of,
  expected,
  laws,
  plain,
  processed,
  pvalue,
  small_head,
  start,
)
from fixtures import rand_lm, table_lm
from scipy import stats

from decoder.cache import LayerSpec, allocate
from decoder.sampling import categorical, chain, temperature
from decoder.strategies import (
  Both,
  Head,
  accompanied,
  autoregressive,
  drafted,
  drafting,
  feature_head,
  run,
  speculative,
)
from decoder.strategies.speculative import COSTS

JUDGING = sys.modules["decoder.strategies.judging"]
FREE = 0.0  # what a guess costs, so that as many are made as there is room for


def joint(target, draft, link, size=3, tokens=3, each=FREE, costs=(1.0,) * 4):
  """How often each text of so many tokens after token 0 is written in DRAWS draws, [8, 8, 8]. draft: the table of a
  draft model, or another companion with its parameters."""
  network, params = table_lm(target)
  if isinstance(draft, tuple):
    companion, other_params = draft
  else:
    other, other_params = table_lm(draft)
    companion = draft_of(other)
  proposer = drafted(companion, link, None, each, costs)
  model, both = accompanied(network.model, companion), Both(params, other_params)
  further = speculative(model, link, proposer, size)
  first = autoregressive(model, drafting(link, proposer.init))

  @jax.jit
  def texts(seeds_B):
    limit = tokens + 1
    state = start(network, companion, [[0]] * BATCH, [limit] * BATCH, drafting(link, proposer.init), capacity=8)
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(0), seed))(seeds_B)
    state, _ = first.step(both, state.replace(key_B=keys))
    return run(further, both, state, limit, 4 * limit).state.context_BL[:, 1:limit]

  seen = np.concatenate([np.asarray(texts(jnp.arange(n, n + BATCH))) for n in range(0, DRAWS, BATCH)])
  return np.bincount(seen @ (WIDE ** np.arange(tokens)[::-1]), minlength=WIDE**tokens).reshape((WIDE,) * tokens)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [name if name == "top_p" else pytest.param(name, marks=SLOW) for name in CHAINS])
def test_chi_square_of_three_tokens_jointly(name):
  """2·10⁵ draws at V = 8, after a draft model with a law of its own."""
  assert pvalue(joint(laws(1), laws(2), CHAINS[name]), expected(name, 1)) > 1e-4


def head_of_tables():
  """A random head for TABLE-LM, whose features are its log-probabilities; it drafts six of the eight tokens."""
  rng = np.random.default_rng(5)
  mix, token, out = (jnp.asarray(rng.normal(size=(WIDE, WIDE)), jnp.float32) for _ in range(3))

  def forward(both, tokens_BT, features_BTD, positions_BT, cache):
    return jnp.tanh(features_BTD @ both.companion["mix"] + both.companion["token"][tokens_BT]), cache.claim(
      positions_BT
    )

  def logits(both, features_BD):
    return (features_BD @ both.companion["out"]).at[:, 6:].set(-jnp.inf)

  def empty(rows, capacity):
    return allocate((LayerSpec("global", 1, 1),), rows, capacity)

  params = {"mix": mix * 0.2, "token": token, "out": out}
  return feature_head(Head(empty, forward, logits, WIDE, jnp.float32)), params


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=SLOW) for name in ("top_k", "top_p"))])
@pytest.mark.slow
def test_chi_square_after_a_head(name):
  """A head that follows the model's features, over fewer tokens than the model has."""
  assert pvalue(joint(laws(1), head_of_tables(), CHAINS[name]), expected(name, 1)) > 1e-4


@SLOW
@pytest.mark.parametrize("draft", ["the same", "near", "nothing in common"])
def test_chi_square_whatever_the_draft(draft):
  near = 0.9 * laws(1) + 0.1 * laws(2)
  apart = np.where(laws(1) > 0.1, 1e-6, 1.0)
  draft = {"the same": laws(1), "near": near, "nothing in common": apart / apart.sum(axis=1, keepdims=True)}[draft]
  assert pvalue(joint(laws(1), draft, CHAINS["plain"]), expected("plain", 1)) > 1e-4


@SLOW
def test_chi_square_where_guessing_stops_when_the_draft_is_unsure():
  """Whether a guess is made depends on how sure the draft is, and not on what it draws."""
  assert pvalue(joint(laws(1), laws(2), CHAINS["plain"], each=0.3, costs=COSTS), expected("plain", 1)) > 1e-4


def test_c86_an_argmax_draft_judged_by_q_is_found_out(monkeypatch):
  """C86, negative control: guesses are the draft's best, and yet the ratio uses its law."""
  best = lambda key, logits_V: (jnp.argmax(logits_V).astype(jnp.int32), jax.nn.log_softmax(logits_V))  # noqa: E731
  monkeypatch.setattr(sys.modules["decoder.strategies.drafted"], "draft", best)
  assert pvalue(joint(laws(1), laws(2), CHAINS["plain"]), expected("plain", 1)) < 1e-9


def test_c89_drawing_from_p_after_a_refusal_is_found_out(monkeypatch):
  """C89, negative control: what is not kept is replaced by a draw from p, not from what p has more than q."""
  monkeypatch.setattr(JUDGING, "_more", lambda kept_V, p_V, q_V: kept_V)
  assert pvalue(joint(laws(1), laws(2), CHAINS["plain"]), expected("plain", 1)) < 1e-9


def test_a_guess_that_depends_on_what_replaces_it_is_found_out(monkeypatch):
  """Negative control: a guess drawn with the very noise that draws what replaces it."""
  again = lambda key, logits_V: (categorical(key, logits_V), jax.nn.log_softmax(logits_V))  # noqa: E731
  monkeypatch.setattr(sys.modules["decoder.strategies.drafted"], "draft", again)
  assert pvalue(joint(laws(1), laws(2), CHAINS["plain"]), expected("plain", 1)) < 1e-9


@pytest.mark.parametrize("size", [5, 256, 700])
def test_guesses_have_the_law_that_they_are_said_to_have(size):
  logits = np.random.default_rng(size).normal(size=size) * 2
  logits[::7] = -np.inf
  keys = jax.random.split(jax.random.key(0), 100_000)
  logits_V = jnp.asarray(logits, jnp.float32)  # an argument: XLA would take minutes to fold constants
  drawn = jax.jit(jax.vmap(lambda key, logits_V: JUDGING.draft(key, logits_V)[0], in_axes=(0, None)))(keys, logits_V)
  told = JUDGING.draft(keys[0], logits_V)[1]
  counts = np.bincount(drawn, minlength=size)
  law = np.exp(logits) / np.exp(logits).sum()
  assert counts[law == 0].sum() == 0
  np.testing.assert_allclose(np.exp(told), law, rtol=1e-5)
  likely = law * 100_000 >= 5
  found, wanted = [*counts[likely], counts[~likely].sum() + 1e-9], [*law[likely], law[~likely].sum() + 1e-14]
  wanted = np.array(wanted) * sum(found) / sum(wanted)
  assert stats.chisquare(found, wanted).pvalue > 1e-4


def test_c89_equal_laws_leave_no_residue_and_no_nan():
  """C89: p == q: what p has more is nothing, in rounding; then p itself."""
  law_V = jnp.log(jnp.asarray(laws(1)[0], jnp.float32))
  more_V = JUDGING._more(law_V, law_V, law_V)
  np.testing.assert_array_equal(more_V, law_V)


@pytest.mark.parametrize("name", ["plain", "top_k", "warm"])
def test_c91_as_many_are_kept_as_the_laws_have_in_common(name):
  """C91: of the first guess Σ min(p, q); drawing p and comparing would keep Σ p·q."""
  link, rows = CHAINS[name], 20_000
  p, q = (processed(link, np.log(laws(seed)[0]), [0, 0]) for seed in (1, 2))
  network, params = table_lm(np.tile(laws(1)[0], (WIDE, 1)))
  other, other_params = table_lm(np.tile(laws(2)[0], (WIDE, 1)))
  companion = draft_of(other)
  proposer = drafted(companion, link, None, FREE, (1.0,) * 4)
  model, both = accompanied(network.model, companion), Both(params, other_params)
  state = start(
    network, companion, [[0]] * rows, [8] * rows, drafting(link, proposer.init), capacity=8, seeds=range(rows)
  )
  state, _ = jax.jit(autoregressive(model, drafting(link, proposer.init)).step)(both, state)
  state, _ = jax.jit(speculative(model, link, proposer, 1).step)(both, state)
  kept = float(np.mean(np.asarray(state.settings.accepted)))
  assert np.asarray(state.settings.drafted).min() == 1
  assert 0.95 * np.minimum(p, q).sum() <= kept <= 1.05 * np.minimum(p, q).sum()
  assert kept > 1.2 * (p * q).sum()


def spoken(kind, link, size=3, rows=ROWS, limits=LIMITS, steps=40):
  network, params = rand_lm()
  companion, more = companions(kind)
  proposer = drafted(companion, link, None, FREE, (1.0,) * 4)
  model, both = accompanied(network.model, companion), Both(params, more)
  first, further = autoregressive(model, drafting(link, proposer.init)), speculative(model, link, proposer, size)

  def whole(both, state):
    return run(further, both, first.step(both, state)[0], steps, steps * (size + 1)).state

  state = start(network, companion, rows, limits, drafting(link, proposer.init), seeds=SEEDS[: len(rows)])
  return jax.jit(whole)(both, state), companion, both


@pytest.mark.parametrize("kind", ["head", "another", "the same"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)])
def test_greedy_text_is_plain_decodings(kind, size):
  link = chain(temperature(0.0))
  want, (done, _, _) = plain(link), spoken(kind, link, size)
  np.testing.assert_array_equal(done.context_BL, want.context_BL)
  np.testing.assert_array_equal(done.length_B, want.length_B)
  assert int(done.settings.drafted.sum()) > 0
  if kind == "the same":
    np.testing.assert_array_equal(done.settings.accepted, done.settings.drafted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "another"])
def test_a_companion_remembers_the_text_and_nothing_it_guessed(kind):
  """After any number of refused guesses: what it would say next is what it says having read the text at once."""
  link = chain(temperature(1.0))
  done, companion, both = spoken(kind, link)
  network, _ = rand_lm()
  model = accompanied(network.model, companion)
  kept_B = done.length_B - 1
  positions_BT = jnp.arange(64)[None] + jnp.zeros((3, 1), jnp.int32)
  positions_BT = jnp.where(positions_BT < kept_B[:, None], positions_BT, -1)
  fresh = start(network, companion, ROWS, LIMITS, drafting(link, drafted(companion, link, None, FREE).init))
  _, cache = model.forward(both, done.context_BL, positions_BT, fresh.cache)
  last_B = jnp.take_along_axis(done.context_BL, kept_B[:, None], axis=1)[:, 0]
  now, *_ = companion.guess(both, last_B, kept_B, done.cache.memory)
  want, *_ = companion.guess(both, last_B, kept_B, cache.memory)
  np.testing.assert_allclose(now, want, rtol=1e-4, atol=1e-4)
  spoiled = done.cache.memory.truncate(kept_B - 2)
  other, *_ = companion.guess(both, last_B, kept_B, spoiled)
  assert not np.allclose(other, want, rtol=1e-3, atol=1e-3), "negative control: two tokens forgotten"


@pytest.mark.slow
def test_a_head_is_fed_with_the_models_features_in_whatever_chunks_it_reads():
  network, params = rand_lm()
  companion, more = small_head()
  model, both = accompanied(network.model, companion), Both(params, more)
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 24)))
  place = jnp.broadcast_to(jnp.arange(24), (2, 24))

  def read(chunks):
    cache = start(network, companion, [[1]] * 2, [30] * 2, chain(temperature(1.0))).cache
    for begins, ends, pad in chunks:
      positions = jnp.pad(place[:, begins:ends], ((0, 0), (pad, 0)), constant_values=-1)
      _, cache = model.forward(both, jnp.pad(tokens_BT[:, begins:ends], ((0, 0), (pad, 0))), positions, cache)
    return companion.guess(both, tokens_BT[:, 0], jnp.full(2, 24), cache.memory)[0]

  whole = read([(0, 24, 0)])
  for chunks in ([(0, 16, 8), (16, 24, 0)], [(0, 5, 3), (5, 6, 0), (6, 23, 15), (23, 24, 0)]):
    np.testing.assert_allclose(read(chunks), whole, rtol=1e-4, atol=1e-4)
  assert not np.allclose(read([(0, 16, 0)]), whole, atol=1e-3), "negative control: the end was not read"
