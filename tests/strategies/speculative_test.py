"""Laws of speculation: whatever is guessed, the text is plain decoding's, and guesses that are right save steps."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import ABE, begin, few, prompts, rand_lm, table_lm
from scipy import stats

from decoder.sampling import chain, repetition, temperature, top_k
from decoder.strategies import Drafts, Finish, Proposer, autoregressive, drafting, lookup, run, speculative

SIZE = 3
ROWS, LIMITS, SEEDS = prompts([3, 9, 5]), [30, 25, 12], [7, 8, 9]
CHAINS = {
  "greedy": chain(temperature(0.0)),
  "sampled": chain(temperature(1.0)),
  "filtered": chain(repetition(1.3), temperature(0.7), top_k(5)),
}

_QUICK = [("wrong", "sampled"), ("lookup", "greedy"), ("right", "filtered"), ("half right", "sampled")]
GUESSED = few(sorted(itertools.product([guesses for guesses, _ in _QUICK], CHAINS), key=lambda x: x not in _QUICK), 4)


def proposer(guess):
  """Of a function (context_L, length, size) -> (tokens_K, count)."""

  def propose(params, state, size):
    tokens_BK, count_B = jax.vmap(lambda *row: guess(*row, size))(state.context_BL, state.length_B)
    return state, Drafts(tokens_BK.astype(jnp.int32), count_B.astype(jnp.int32))

  return Proposer(lambda: (), propose, lambda memory, drafted, accepted: memory)


def wrong(context_L, length, size):
  """Mostly wrong, and each row a number of its own."""
  return (context_L[length - 1] + length + jnp.arange(size)) % 60, (length * 7) % (size + 1)


def knowing(texts, right):
  """Guesses what plain decoding wrote, right so many times in four."""
  known_BL = np.zeros((len(texts), 64), np.int32)
  for row, text in enumerate(texts):
    known_BL[row, : len(text)] = text

  def propose(params, state, size):
    at_BK = jnp.minimum(state.length_B[:, None] + jnp.arange(size)[None], 63)
    tokens_BK = jnp.take_along_axis(jnp.asarray(known_BL), at_BK, axis=1)
    return state, Drafts(jnp.where(at_BK % 4 < right, tokens_BK, tokens_BK + 1), jnp.full(len(texts), size))

  return Proposer(lambda: (), propose, lambda memory, drafted, accepted: memory)


def plain_texts(name, rows=ROWS, limits=LIMITS, seeds=SEEDS, **more):
  network, params = rand_lm()
  strategy = autoregressive(network.model, CHAINS[name])
  state = begin(network, rows, limits, seeds=seeds, transforms=CHAINS[name], **more)
  state, first = jax.jit(strategy.step)(params, state)
  done, rest = jax.jit(lambda p, s: run(strategy, p, s, 40, 40))(params, state)
  return done, joined(first, rest)


def joined(*emissions):
  texts = [[] for _ in emissions[0].count_B]
  for emission in emissions:
    for text, tokens, count in zip(texts, np.asarray(emission.tokens_BN), emission.count_B):
      text += tokens[: int(count)].tolist()
  return texts


def strategies(model, link, guesses, size):
  """What reads prompts, what goes on, and the chain of both."""
  both = drafting(link, guesses.init)
  return autoregressive(model, both), speculative(model, link, guesses, size), both


def spoken(name, guesses, rows=ROWS, limits=LIMITS, seeds=SEEDS, size=SIZE, lm=None, steps=40, link=None, **more):
  """The final state, and the texts."""
  network, params = lm or rand_lm()
  first, further, both = strategies(network.model, link or CHAINS[name], guesses, size)

  def whole(params, state):
    state, emission = first.step(params, state)
    return run(further, params, state, steps, steps * (size + 1)), emission

  state = begin(network, rows, limits, seeds=seeds, transforms=both, **more)
  (done, rest), emission = jax.jit(whole)(params, state)
  return done, joined(emission, rest)


def whole_texts(texts, rows=ROWS):
  return [[*row, *text] for row, text in zip(rows, texts)]


@pytest.mark.parametrize(("guesses", "name"), GUESSED)
def test_the_text_is_plain_decodings_whatever_is_guessed(name, guesses):
  state, want = plain_texts(name)
  known = functools.partial(knowing, whole_texts(want))
  proposers = {"wrong": proposer(wrong), "lookup": lookup(1), "right": known(4), "half right": known(2)}
  done, got = spoken(name, proposers[guesses])
  assert got == want
  np.testing.assert_array_equal(done.length_B, state.length_B)
  held = np.asarray(done.cache.layouts["global"].positions_BS)
  for row, limit in enumerate(LIMITS):
    assert sorted(held[row][held[row] >= 0].tolist()) == list(range(limit - 1)), "all but the token drawn last"


def test_right_guesses_save_steps_and_no_more_is_claimed():
  _, want = plain_texts("sampled")
  texts = whole_texts(want)
  done, _ = spoken("sampled", knowing(texts, 4), steps=8)
  assert (np.asarray(done.finish_B) == Finish.LENGTH).all(), "27 tokens, the first apart"
  np.testing.assert_array_equal(done.settings.drafted, done.settings.accepted)
  slow, _ = spoken("sampled", knowing(texts, 0), steps=8)
  assert not (np.asarray(slow.finish_B) == Finish.LENGTH).all(), "negative control: wrong guesses save none"
  assert int(slow.settings.accepted.sum()) == 0 < int(slow.settings.drafted.sum())


def test_guesses_that_are_kept_unseen_are_found_out(monkeypatch):
  """Negative control of the test above: the comparison with the draft is what makes the text right."""
  _, want = plain_texts("sampled")
  monkeypatch.setattr(sys.modules["decoder.strategies.speculative"], "_kept", lambda token, draft: jnp.bool_(True))
  _, got = spoken("sampled", proposer(wrong))
  assert got != want


@pytest.mark.parametrize("size", few([7, 3, 1], 1))
def test_c84_an_end_within_a_block_ends_the_row_there(size):
  """C84: target script [5, E, 7, 8], drafts the same."""
  _, want = plain_texts("greedy", rows=[ROWS[0]], limits=[30], seeds=[1])
  end = want[0][5]
  first = want[0].index(end)
  texts = whole_texts(want, [ROWS[0]])
  done, got = spoken("greedy", knowing(texts, 4), [ROWS[0]], [30], [1], size, ends=(end,))
  assert got[0] == want[0][: first + 1]
  assert int(done.finish_B[0]) == Finish.STOP
  held = np.asarray(done.cache.layouts["global"].positions_BS[0])
  assert held.max() == len(ROWS[0]) + first - 1, "nothing of what was guessed after it"


def test_c87_top_k_1_is_greedy():
  _, want = plain_texts("greedy")
  _, got = spoken(None, proposer(wrong), link=chain(temperature(1.0), top_k(1)))
  assert got == want


def test_c92_the_block_is_cut_near_the_limit():
  """C92: 2 tokens left and 7 guesses."""
  limits = [len(row) + 2 for row in ROWS]
  done, got = spoken("sampled", knowing([[0] * 64] * 3, 4), limits=limits, size=7)
  assert [len(text) for text in got] == [2, 2, 2]
  assert got == [text[:2] for text in plain_texts("sampled")[1]]
  assert int(np.asarray(done.cache.layouts["global"].positions_BS).max()) < max(limits)


def test_c40_c90_seeds_count_and_repeat():
  """C40, C90: with speculation on, twenty seeds give different texts, and the same one the same."""
  rows, limits = [ROWS[0]] * 20, [20] * 20
  _, got = spoken("sampled", lookup(1), rows, limits, range(20))
  _, again = spoken("sampled", lookup(1), rows, limits, range(20))
  assert got == again
  assert len({tuple(text) for text in got}) > 10


def test_chi_square_of_three_tokens_jointly():
  """The law of plain decoding: 2·10⁵ draws of three tokens after ^ in TABLE-LM, guesses always 'a'."""
  draws, batch = 200_000, 5_000
  network, params = table_lm(ABE)
  guesses = proposer(lambda context_L, length, size: (jnp.ones(size), jnp.int32(size)))
  first, further, both = strategies(network.model, CHAINS["sampled"], guesses, 3)

  @jax.jit
  def texts(seeds_B):
    state = begin(network, [[0]] * batch, [4] * batch, transforms=both, capacity=8, ends=(3,))
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(0), seed))(seeds_B)
    state, _ = first.step(params, state.replace(key_B=keys))
    return run(further, params, state, 4, 16).state.context_BL[:, 1:4]

  seen = np.concatenate([np.asarray(texts(jnp.arange(n, n + batch))) for n in range(0, draws, batch)])
  expected = {}
  for a in (1, 2, 3):
    for b in (1, 2, 3) if a != 3 else (0,):
      for c in (1, 2, 3) if b in (1, 2) else (0,):
        chance = ABE[0, a] * (ABE[a, b] if b else 1) * (ABE[b, c] if c else 1)
        expected[a, b, c] = chance
  assert sum(expected.values()) == pytest.approx(1)
  found = {key: int((seen == key).all(axis=1).sum()) for key in expected}
  assert sum(found.values()) == draws, "nothing else is ever written"
  assert stats.chisquare(list(found.values()), [draws * p for p in expected.values()]).pvalue > 0.001
  off = {key: p * (1.03 if key[0] == 1 else 1) for key, p in expected.items()}
  scale = draws / sum(off.values())
  assert stats.chisquare(list(found.values()), [scale * p for p in off.values()]).pvalue < 0.001, "negative control"


@pytest.mark.parametrize(("alpha", "size"), [(0.5, 3), (0.8, 3), (0.8, 7)])
def test_tokens_a_step_are_those_of_the_formula(alpha, size):
  """(1 − α^(k+1)) / (1 − α) where every guess is kept with chance α (Leviathan et al., equation 1)."""
  table = np.tile([0, alpha, 1 - alpha], (3, 1))
  guesses = proposer(lambda context_L, length, size: (jnp.ones(size), jnp.int32(size)))
  rows, steps = 500, 12
  done, got = spoken("sampled", guesses, [[0]] * rows, [200] * rows, range(rows), size, table_lm(table), steps,
                     capacity=256)  # fmt: skip
  each = np.mean([len(text) - 1 for text in got]) / steps
  assert each == pytest.approx((1 - alpha ** (size + 1)) / (1 - alpha), rel=0.02)
  assert int(done.settings.accepted.sum()) / (steps * rows) == pytest.approx(each - 1, rel=0.05)


@pytest.mark.parametrize("size", [0, 2, 8, None])
def test_an_impossible_size_is_refused(size):
  network, _ = table_lm(ABE)
  with pytest.raises((ValueError, TypeError)):
    speculative(network.model, CHAINS["greedy"], lookup(), size)
