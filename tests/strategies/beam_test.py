"""Beam search: the cases C1 … C11, laws of scores and stopping, all against the oracle's search."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beams import (
  ABE_NEXT,
  MANY,
  NEW,
  NO_CHAIN,
  abe,
  after,
  agree,
  drawn_tables,
  logs,
  pair,
  plan,
  searched,
  stepped_lm,
)
from fixtures import V, cache_for, prompts, rand_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import beam_oracle as oracle

from decoder.cache import Branching
from decoder.sampling import chain, min_new_tokens
from decoder.strategies import Finish, Plan

EARLIES = (True, False, "never")


def spelt(hypotheses):
  return [("".join("^abE"[t] for t in text), score) for score, text, _ in hypotheses]


def same(got, want, tolerance=1e-4):
  assert [text for text, _ in spelt(got)] == [text for text, _ in want]
  np.testing.assert_allclose([score for score, _, _ in got], [score for _, score in want], atol=tolerance)


@pytest.mark.parametrize(("alpha", "other"), [(3.0, 20), (-1.0, 7), (0.5, 2)])
def test_C1_scores_do_not_depend_on_the_batch(alpha, other):
  beside = [0] * (other - 1) + [1]
  (alone,) = pair([[0]], alpha=alpha)
  together = pair([[0], beside], alpha=alpha)[0]
  assert [one[1] for one in alone] == [one[1] for one in together]
  np.testing.assert_allclose([one[0] for one in alone], [one[0] for one in together], atol=1e-6)


@pytest.mark.parametrize(
  ("first", "second", "want"),
  [([0], [0, 1, 0], [("bE", -0.5776), ("abE", -0.6040)]), ([1], [0, 2, 2, 1], None), ([2], [1, 0, 1, 0, 2], None)],
)
def test_C2_the_prompt_does_not_count(first, second, want):
  one, other = pair([first, second])
  assert one == other
  if want:
    same(one, want)
  agree(one, oracle.search(lambda text: ABE_NEXT(text or (first[-1],)), {3}, 6, 2))


@pytest.mark.parametrize(
  ("alpha", "early", "want"),
  [
    (2.0, True, [("abE", -0.2013), ("bE", -0.2888)]),
    (2.0, False, [("abE", -0.2013), ("bE", -0.2888)]),
    (2.0, "never", [("aaaabE", -0.1402), ("aaabE", -0.1588)]),
    (3.0, False, None),
    (1.5, "never", None),
  ],
)
def test_C3_what_is_attainable(alpha, early, want):
  (got,) = pair([[0]], alpha=alpha, early=early)
  if want:
    same(got, want)
  agree(got, oracle.search(ABE_NEXT, {3}, 6, 2, alpha, early=early))


@pytest.mark.parametrize(("beams", "alpha"), [(2, 1.0), (3, 0.0), (3, 2.0)])
def test_C7_scores_are_the_sums_of_their_log_probs(beams, alpha):
  (got,), _ = searched(*abe(), plan(beams), [[0]], 6, ends=(3,), alpha=alpha)
  assert len(got) == beams
  assert len({len(text) for _, text, _ in got}) > 1, "some are shorter than the limit"
  for score, text, each in got:
    assert len(text) == len(each)
    np.testing.assert_allclose(score * len(text) ** alpha, sum(each), atol=1e-5)
    np.testing.assert_allclose(each, [ABE_NEXT(text[:i])[token] for i, token in enumerate(text)], atol=1e-5)


@pytest.mark.parametrize(("alpha", "best", "score"), [(1.0, "bE", -0.5776), (0.0, "bE", -1.1552), (-1.0, "E", -2.3026)])
def test_C8_the_end_counts_to_the_length(alpha, best, score):
  """Exhaustively; not counting it, `abE` would be the best of the first, by −0.9059."""
  want = oracle.exhaustive(ABE_NEXT, {3}, 4, alpha)
  assert (*spelt(want[:1])[0],) == (best, pytest.approx(score, abs=1e-4))
  (got,), _ = searched(*abe(), MANY, [[0]], 4, ends=(3,), alpha=alpha, early="never")
  agree(got[:3], want[:3])
  uncounted = max(want, key=lambda one: sum(one[2]) / max(len(one[1]) - 1, 1))
  assert alpha != 1.0 or spelt([uncounted])[0][0] == "abE"


@pytest.mark.parametrize("end", [3, 2, 0])
def test_C10_no_id_stands_for_padding(end):
  """Id 0 is a token like others, also where it is the end, and texts of unequal length hold nothing past their ends."""
  tables = drawn_tables(end)
  (got,), search = searched(stepped_lm(), logs(tables), plan(3), [[0]], 5, ends=(end,), early="never")
  agree(got, oracle.search(after(tables), {end}, 5, 3, early="never"))
  assert len({len(text) for _, text, _ in got}) > 1
  assert any(0 in text for _, text, _ in got)
  assert float(jnp.abs(search.best.logprobs_WN).sum()) == pytest.approx(-sum(sum(one[2]) for one in got), abs=1e-4)


@pytest.mark.parametrize("alpha", [-1.0, -1.5, -2.0])
def test_C11_ends_are_finished_only_among_the_joint_best(alpha):
  """`E` alone is the true optimum, and third among the candidates of the first step."""
  (got,) = pair([[0]], alpha=alpha)
  assert spelt(oracle.exhaustive(ABE_NEXT, {3}, 6, alpha)[:1])[0][0] == "E"
  assert spelt(got[:1])[0][0] == "bE"
  if alpha == -1:
    assert got[0][0] == pytest.approx(-2.3104, abs=1e-4)
  agree(got, oracle.search(ABE_NEXT, {3}, 6, 2, alpha))


# The cache.

RAND_PROMPTS = prompts([3, 9, 5], size=10)
LIVELY = Plan(3, NO_CHAIN, NO_CHAIN, vocab_size=10)


@functools.cache
def recomputed(variant):
  """`next_logprobs` by prompt and limit, without a cache, over the first 10 ids of RAND-LM."""
  network, params = rand_lm(variant)

  @jax.jit
  def forward(tokens_BT, length, extent):
    positions_BT = jnp.where(jnp.arange(tokens_BT.shape[1]) < length, jnp.arange(tokens_BT.shape[1]), -1)[None]
    cache = cache_for(network, 1, 24).replace(extent_B=extent[None])
    features, _ = network.model.forward(params, tokens_BT, positions_BT, cache)
    return jax.nn.log_softmax(network.model.head(params, features[:, length - 1])[0, :10])

  @functools.cache
  def after(prompt, text):
    ids = np.zeros((1, 24), np.int32)
    ids[0, : len(prompt) + len(text)] = [*prompt, *text]
    logp = forward(ids, jnp.int32(len(prompt) + len(text)), jnp.int32(len(prompt) + NEW))
    return np.pad(np.asarray(logp, np.float64), (0, V - 10), constant_values=-np.inf)

  return after


VARIANTS = [
  "rope",
  *(pytest.param(v, marks=pytest.mark.slow) for v in ("absolute", "window", "gqa", "mixed", "dynamic")),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_C5_C6_beams_with_a_cache_are_those_without(variant):
  """Every layout of prompts, texts that diverge at once, and each beam's log-probs as if it were alone."""
  after = recomputed(variant)
  diverged = False
  for alpha, early in ((1.0, False), (-0.5, "never"), (2.0, True)):
    got, _ = searched(*rand_lm(variant), LIVELY, RAND_PROMPTS, NEW, ends=(4, 7), alpha=alpha, early=early)
    for prompt, mine in zip(RAND_PROMPTS, got):
      each = functools.partial(after, tuple(prompt))
      agree(mine, oracle.search(each, {4, 7}, NEW, 3, alpha, early=early))
      for _, text, steps in mine:
        np.testing.assert_allclose(steps, [each(text[:i])[t] for i, t in enumerate(text)], atol=1e-4)
    diverged |= any(len({text[0] for _, text, _ in mine}) > 1 for mine in got)
  assert diverged, "beams diverge at the first token"


@pytest.mark.parametrize("broken", ["not reordered", "shared"])
def test_C5_C6_broken_caches_are_found_out(monkeypatch, broken):
  """Negative controls: beams that keep the cache of others, and beams that see each other's tokens."""

  def shared(self, parents_BW):
    followed = follow(self, parents_BW)
    return followed.replace(positions_BWS=jnp.broadcast_to(
      followed.positions_BWS.max(axis=1, keepdims=True), followed.positions_BWS.shape))  # fmt: skip

  follow = Branching.follow
  monkeypatch.setattr(Branching, "follow", shared if broken == "shared" else lambda self, parents_BW: self)
  other = Plan(3, NO_CHAIN, chain(min_new_tokens(0)), vocab_size=10)  # another compilation
  got, _ = searched(*rand_lm(), other, RAND_PROMPTS, NEW, ends=(4, 7), early="never")
  each = functools.partial(recomputed("rope"), tuple(RAND_PROMPTS[1]))
  with pytest.raises(AssertionError):
    agree(got[1], oracle.search(each, {4, 7}, NEW, 3, early="never"))


# Laws.

seeds = st.integers(0, 2**32 - 1)
tables = seeds.map(drawn_tables)
alphas = st.sampled_from([-1.0, -0.5, 0.0, 0.3, 1.0, 1.7, 2.0])


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(-1, 2), st.booleans())
def test_as_many_beams_as_texts_are_exhaustive(seed, alpha, gnmt):
  """All texts, not the best alone."""
  table = drawn_tables(seed, size=3)
  named = dict(ends=(2,), alpha=alpha, gnmt=gnmt, early="never")
  got, _ = searched(stepped_lm(3), logs(table), MANY, [[0], [2, 1]], 3, **named)
  for first, mine in enumerate(got):
    want = oracle.exhaustive(after(table, first, 1 + first), {2}, 3, alpha, gnmt)
    assert len(want) == 15
    agree(mine, want)


def test_as_many_beams_as_texts_are_exhaustive_for_a_transformer():
  after = recomputed("rope")
  everything = Plan(10, NO_CHAIN, NO_CHAIN, vocab_size=10)
  got, _ = searched(*rand_lm(), everything, RAND_PROMPTS[:1], 2, ends=(4,), alpha=0.7, early="never")
  agree(got[0][:8], oracle.exhaustive(functools.partial(after, tuple(RAND_PROMPTS[0])), {4}, 2, 0.7)[:8])


@settings(max_examples=25, deadline=None)
@given(tables, alphas, st.booleans(), st.sampled_from(EARLIES), st.sampled_from([0.5, 1.0, 2.0]))
def test_any_search_is_the_oracles(table, alpha, gnmt, early, patience):
  """Three beams, too few to see everything."""
  named = dict(alpha=alpha, gnmt=gnmt, early=early, patience=patience)
  (got,), _ = searched(stepped_lm(), logs(table), plan(3), [[0]], 5, ends=(3,), **named)
  agree(got, oracle.search(after(table), {3}, 5, 3, **named))


@settings(max_examples=15, deadline=None)
@given(tables, alphas, st.booleans())
def test_never_stops_no_earlier_than_is_safe(table, alpha, gnmt):
  """The exact bound leaves what a search to the limit would find."""
  (got,), search = searched(
    stepped_lm(), logs(table), plan(3), [[0]], 5, ends=(3,), alpha=alpha, gnmt=gnmt, early="never"
  )
  whole = oracle.search(after(table), {3}, 5, 3, alpha, gnmt, early=True, patience=math.inf)
  agree(got, whole)
  assert int(search.length_B[0]) <= 6


def test_one_beam_is_greedy():
  for early in (True, False):
    got, _ = searched(*rand_lm(), Plan(1, NO_CHAIN, NO_CHAIN, vocab_size=10), RAND_PROMPTS, NEW, ends=(4,), early=early)
    for prompt, mine in zip(RAND_PROMPTS, got):
      text = ()
      while len(text) < NEW and text[-1:] != (4,):
        text = (*text, int(recomputed("rope")(tuple(prompt), text).argmax()))
      assert [one[1] for one in mine] == [text]


@pytest.mark.parametrize("ends", [(3,), (1, 3), ()])
def test_several_ends(ends):
  (got,), search = searched(*abe(), plan(3), [[0]], 4, ends=ends)
  agree(got, oracle.search(ABE_NEXT, set(ends), 4, 3))
  assert int(search.finish_B[0]) == (Finish.STOP if ends else Finish.LENGTH)
