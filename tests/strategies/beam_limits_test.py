"""Beam search: what may follow a text, groups, draws, and how an example ends, against the oracle's own search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beams import (
  ABE_NEXT,
  MANY,
  NO_CHAIN,
  abe,
  after,
  agree,
  drawn_tables,
  logs,
  next_of,
  numbers,
  pair,
  plan,
  rules,
  searched,
  stepped_lm,
  strategy_of,
)
from compiled_test import Compilations
from fixtures import ABE, begin, table_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import beam_oracle as oracle

from decoder.sampling import chain, min_new_tokens, noise, raw_logprobs, repetition, request_key
from decoder.strategies import Finish, Plan, beam, forest, hypotheses, stream

EARLIES = (True, False, "never")
seeds = st.integers(0, 2**32 - 1)
tables = seeds.map(drawn_tables)
alphas = st.sampled_from([-1.0, -0.5, 0.0, 0.3, 1.0, 1.7, 2.0])


# What may follow.


@pytest.mark.parametrize("alpha", [1.0, -1.0])
def test_the_shortest_length_forbids_ends_without_scaling_the_rest(alpha):
  (got,), _ = searched(
    *abe(), MANY, [[0]], 4, ends=(3,), alpha=alpha, early="never", shortest=3, limits=chain(min_new_tokens(2))
  )
  agree(got[:6], oracle.exhaustive(ABE_NEXT, {3}, 4, alpha, shortest=3)[:6])


def test_C30_penalties_act_on_logits():
  """A logit of +2 is halved to 1 and probabilities follow from that; doubling its log-prob would be something else."""
  logits = np.array([2.0, 1.5, -1.0, 0.5])
  table = np.tile(np.exp(logits) / np.exp(logits).sum(), (4, 1))
  params = {"log": jnp.asarray(np.tile(logits, (4, 1)), jnp.float32)}

  def penalised(text):
    seen = [*{0, *text}]
    changed = logits.copy()
    changed[seen] = np.where(changed[seen] < 0, changed[seen] * 2, changed[seen] / 2)
    return changed - np.log(np.exp(changed).sum())

  def on_log_probs(text):
    log = np.log(table[0])
    log[[*{0, *text}]] *= 2
    return log

  (got,), _ = searched(*abe()[:1], params, MANY, [[0]], 3, ends=(3,), early="never", law=chain(repetition(2.0)))
  want = oracle.exhaustive(penalised, {3}, 3)
  agree(got[:8], want[:8])
  assert [one[1] for one in oracle.exhaustive(on_log_probs, {3}, 3)[:8]] != [one[1] for one in want[:8]]


@pytest.mark.parametrize("forced", [(2,), (1, 2, 1), (2, 3)])
def test_forced_tokens_come_first_and_cost_nothing(forced):
  (got,) = pair([[0]], forced=forced)

  def following(text):
    if len(text) < len(forced):
      return np.where(np.arange(4) == forced[len(text)], 0.0, -np.inf)
    return ABE_NEXT(text)

  agree(got, oracle.search(following, {3}, 6, 2))
  assert all(text[: len(forced)] == forced for _, text, _ in got)


CONTINUATIONS = [[1], [1, 2], [1, 2, 2], [2, 1, 1, 2], [2, 2]]


@pytest.mark.parametrize("forced", [(), (2,)])
def test_continuations_are_those_of_the_trie(forced):
  trees, roots = forest([[[2]], CONTINUATIONS])
  (got,), _ = searched(*abe(), plan(16), [[0]], 7, ends=(3,), forest=trees, root=roots[1], forced=forced, early="never")
  prefixes = {tuple(one[:i]) for one in CONTINUATIONS for i in range(len(one) + 1)}

  def following(text):
    if len(text) < len(forced):
      return np.where(np.arange(4) == forced[len(text)], 0.0, -np.inf)
    rest = text[len(forced) :]
    allowed = [(*rest, t) in prefixes if t != 3 else list(rest) in CONTINUATIONS for t in range(4)]
    return np.where(allowed, ABE_NEXT(text), -np.inf)

  agree(got, oracle.exhaustive(following, {3}, 7))
  assert {text[len(forced) : -1] for _, text, _ in got} == {tuple(one) for one in CONTINUATIONS}


def test_rows_have_tries_of_their_own_or_none():
  """A large one beside a small one and a row without."""
  rng = np.random.default_rng(0)
  many = [rng.integers(0, 150, 3).tolist() for _ in range(300)]
  trees, roots = forest([many, [[7, 7]]])
  table = rng.dirichlet(np.ones(150), 150)
  network, params = table_lm(table)
  root_B = jnp.asarray([*roots, -1], jnp.int32)
  (large, small, free), _ = searched(
    network, params, plan(4), [[0]] * 3, 5, ends=(149,), forest=trees, root=root_B, early="never"
  )
  assert all(list(text[:-1]) in many for _, text, _ in large)
  assert [text for _, text, _ in small] == [(7, 7, 149)]
  agree(free, oracle.search(next_of(table), {149}, 5, 4, early="never"))


@settings(max_examples=25, deadline=None)
@given(tables, st.sampled_from([0.0, 0.4, 5.0]), alphas, st.sampled_from(EARLIES))
def test_groups_are_those_of_the_oracle(table, diversity, alpha, early):
  (got,), _ = searched(
    stepped_lm(), logs(table), plan(6, 3), [[0]], 5, ends=(3,), alpha=alpha, early=early, diversity=diversity
  )
  agree(got, oracle.search(after(table), {3}, 5, 6, alpha, early=early, groups=3, diversity=diversity))


def test_groups_differ_by_the_penalty_alone():
  """Without one all groups find the same; with one they do not."""
  same_, other = (
    searched(stepped_lm(), logs(drawn_tables(5)), plan(6, 3), [[0]], 5, ends=(3,), diversity=value)[0][0]
    for value in (0.0, 2.0)
  )
  assert len({text for _, text, _ in same_}) == 2
  assert len({text for _, text, _ in other}) > 2


def test_sampled_beams_are_drawn_with_the_noise_of_their_place():
  """As the oracle draws them from the same noise; the same in another place of a batch; another seed, other texts."""
  table = drawn_tables(3, peaked=3.0)

  def gumbel(seed):
    @functools.cache
    def at(step):
      key = jax.random.fold_in(request_key(seed), step)  # the prompt has one token
      return np.asarray(noise(jax.random.key_data(key), jnp.arange(3 * 4, dtype=jnp.uint32)), np.float64)

    return lambda step, slot, token: at(step)[slot * 4 + token]

  got, _ = searched(stepped_lm(), logs(table), plan(3), [[0]] * 4, 5, ends=(3,), seeds=[4, 5, 6, 4], sampled=True)
  for seed, mine in zip((4, 5, 6), got):
    agree(mine, oracle.search(after(table), {3}, 5, 3, noise=gumbel(seed)))
  assert got[0] == got[3]
  assert len({tuple(text for _, text, _ in mine) for mine in got[:3]}) == 3


# How an example ends.


def test_broken_logits_end_their_example_alone():
  table = np.array(ABE)
  network, params = table_lm(table)
  params = {"log": params["log"].at[2].set(jnp.nan)}
  got, search = searched(network, params, plan(2), [[2], [0], [3]], 4, ends=(3,))
  assert search.finish_B.tolist()[:3] == [Finish.ERROR, Finish.ERROR, Finish.STOP], "row 1 meets NaN after its first b"
  assert got[2][0][1] == (3,)


def test_where_nothing_may_follow_the_example_ends_in_error():
  trees, roots = forest([[[0, 0]]])  # after ^ there is no ^
  got, search = searched(*abe(), plan(2), [[0]], 4, ends=(3,), forest=trees, root=roots[0])
  assert (got, search.finish_B.tolist()[0]) == ([[]], Finish.ERROR)


def test_what_is_told_of_tokens_goes_with_their_texts():
  told_of = Plan(3, NO_CHAIN, NO_CHAIN, inspect=raw_logprobs(2), width=4)
  (got,), search = searched(*abe(), told_of, [[0]], 6, ends=(3,), early="never")
  best = hypotheses(search)
  for w, (_, text, each) in enumerate(got):
    np.testing.assert_allclose(best.details.logprob[0, w, : len(text)], each, atol=1e-5)
    for i, token in enumerate(text):
      order = np.argsort(-ABE_NEXT(text[:i]), kind="stable")
      assert best.details.top_ids_C[0, w, i].tolist() == order[:2].tolist()
      assert int(best.details.rank[0, w, i]) == 1 + order.tolist().index(token)


def test_only_the_last_step_of_an_example_emits():
  network, params = abe()
  strategy = strategy_of(network.model, plan(2))
  state = begin(network, [[0], [1]], [7, 3], ends=(3,))
  fields = (state.cache, state.context_BL, state.length_B, state.limit_B, state.ends_BE, state.key_B)
  search = strategy.init(*fields, numbers(plan(2), 2), rules(2, early="never", alpha=2.0), 6)
  counts = []
  emission = None
  for _, emission in stream(jax.jit(strategy.step), params, search):
    counts.append(emission.count_B.tolist())
    if counts[-1][0]:
      assert emission.tokens_BN[0].tolist() == [1, 1, 1, 1, 2, 3]
  assert counts == [[0, 0], [0, 2], [0, 0], [0, 0], [0, 0], [6, 0]]
  assert emission.info.finish_B.tolist() == [Finish.STOP, Finish.STOP]


@pytest.mark.parametrize(("beams", "groups"), [(0, 1), (4, 3), (2, 0)])
def test_impossible_numbers_of_beams_are_refused(beams, groups):
  with pytest.raises(ValueError, match=f"got {beams} beams in {groups} groups"):
    beam(abe()[0].model, Plan(beams, NO_CHAIN, NO_CHAIN, groups))


def test_all_rules_are_data():
  """Other rules run the same program."""

  pair([[0]])
  with Compilations() as compiled:
    state_free = pair([[0]], alpha=-1.0, gnmt=True, early=True, patience=2.0, shortest=2, sampled=True)
  assert state_free
  assert compiled.count == 0
