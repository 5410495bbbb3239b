"""Laws of trees of guesses: whatever is guessed, the text is plain decoding's, seeds included."""

import itertools
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
  pvalue,
  start,
)
from fixtures import D, rand_lm, table_lm

from decoder.sampling import chain, temperature, top_k
from decoder.strategies import Both, accompanied, autoregressive, branching, drafting, run
from decoder.strategies.trees import comb, unread

LINKS = {
  "greedy": chain(temperature(0.0)),
  "sampled": chain(temperature(1.0)),
  "filtered": chain(temperature(0.7), top_k(5)),
}
TREES = {"chain": (1, 1, 1), "fan": (4,), "comb": (3, 2, 2)}


def strategies(network, companion, link, widths, size):
  """What reads prompts and what goes on, and the chain of both."""
  both = drafting(link, unread(widths, size, np.float32))
  return (
    autoregressive(accompanied(network.model, companion), both),
    branching(network.model, companion, link, widths),
    both,
  )


def spoken(kind, link, widths, steps=40):
  network, params = rand_lm()
  companion, more = companions(kind)
  first, further, transforms = strategies(network, companion, link, widths, D)
  both = Both(params, more)

  def whole(both, state):
    return run(further, both, first.step(both, state)[0], steps, steps * (len(widths) + 1)).state

  state = start(network, companion, ROWS, LIMITS, transforms, seeds=SEEDS)
  return jax.jit(whole)(both, state), companion, both


QUICK = {("head", "comb", "sampled"), ("another", "fan", "filtered"), ("the same", "comb", "greedy"),
         ("another", "chain", "sampled")}  # fmt: skip
COMBINATIONS = [
  pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
  for one in itertools.product(["head", "another", "the same"], TREES, LINKS)
]


@pytest.mark.parametrize(("kind", "tree", "name"), COMBINATIONS)
def test_the_text_is_plain_decodings_seeds_included(kind, tree, name):
  widths = TREES[tree]
  want, (done, _, _) = plain(LINKS[name]), spoken(kind, LINKS[name], widths)
  np.testing.assert_array_equal(done.context_BL, want.context_BL)
  np.testing.assert_array_equal(done.length_B, want.length_B)
  held = np.asarray(done.cache.cache.layouts["global"].positions_BS)
  for row, limit in enumerate(LIMITS):
    assert sorted(held[row][held[row] >= 0].tolist()) == list(range(limit - 1)), "all but the token drawn last"
  assert int(done.settings.drafted.sum()) > 0
  if kind == "the same" and name == "greedy":
    assert int(done.settings.steps.max()) <= -(-max(L - len(r) - 1 for r, L in zip(ROWS, LIMITS)) // (len(widths) + 1))


@pytest.mark.slow
def test_more_guesses_for_a_token_are_kept_more_often():
  shares = {}
  for widths in ((1, 1, 1), (3, 3, 3)):
    done, _, _ = spoken("another", LINKS["sampled"], widths)
    shares[widths] = float(done.settings.accepted.sum() / done.settings.steps.sum())
  assert shares[3, 3, 3] > shares[1, 1, 1]


def test_a_tree_whose_nodes_see_each_other_is_found_out(monkeypatch):
  """Negative control: without the mask a guess sees its rivals."""
  monkeypatch.setattr(
    sys.modules["decoder.strategies.trees"].Tree,
    "visible",
    property(lambda tree: np.ones((len(tree.parents),) * 2, bool)),
  )
  done, _, _ = spoken("the same", LINKS["greedy"], (3, 2, 2))
  assert not np.array_equal(done.context_BL, plain(LINKS["greedy"]).context_BL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "another"])
def test_a_companion_remembers_what_was_kept_and_no_more(kind):
  """What it would say next is what it says having read the text at once, once it has read what was kept last."""
  done, companion, both = spoken(kind, LINKS["sampled"], (3, 2, 2), steps=3)
  network, _ = rand_lm()
  model = accompanied(network.model, companion)
  kept_B = done.length_B - 1
  positions_BT = jnp.arange(64)[None] + jnp.zeros((3, 1), jnp.int32)
  positions_BT = jnp.where(positions_BT < kept_B[:, None], positions_BT, -1)
  fresh = start(network, companion, ROWS, LIMITS, LINKS["sampled"])
  _, cache = model.forward(both, done.context_BL, positions_BT, fresh.cache)
  last_B = jnp.take_along_axis(done.context_BL, kept_B[:, None], axis=1)[:, 0]
  behind = companion.guess(both, last_B, kept_B, done.cache.memory)[0]
  read = sys.modules["decoder.strategies.trees"]._read_kept(companion, both, done)
  now, want = (companion.guess(both, last_B, kept_B, memory)[0] for memory in (read, cache.memory))
  np.testing.assert_allclose(now, want, rtol=1e-4, atol=1e-4)
  assert not np.allclose(behind, want, rtol=1e-3, atol=1e-3), "negative control: not yet read"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "top_k", "top_p"])
def test_chi_square_of_three_tokens_jointly(name):
  """2·10⁵ draws at V = 8, guesses by another law."""
  link, widths = CHAINS[name], (3, 2)
  network, params = table_lm(laws(1))
  other, other_params = table_lm(laws(2))
  companion, both = draft_of(other), Both(params, other_params)
  first, further, transforms = strategies(network, companion, link, widths, WIDE)

  @jax.jit
  def texts(seeds_B):
    state = start(network, companion, [[0]] * BATCH, [4] * BATCH, transforms, capacity=8)
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(0), seed))(seeds_B)
    return run(further, both, first.step(both, state.replace(key_B=keys))[0], 4, 16).state.context_BL[:, 1:4]

  seen = np.concatenate([np.asarray(texts(jnp.arange(n, n + BATCH))) for n in range(0, DRAWS, BATCH)])
  counts = np.bincount(seen @ (WIDE ** np.arange(3)[::-1]), minlength=WIDE**3).reshape((WIDE,) * 3)
  assert pvalue(counts, expected(name, 1)) > 1e-4
  assert pvalue(counts, expected("warm", 1)) < 1e-9 if name == "plain" else True, "negative control: another law"


def test_a_comb_in_numbers():
  tree = comb((3, 2))
  assert tree.parents == (-1, 0, 0, 0, 1, 1)
  assert tree.depths == (0, 1, 1, 1, 2, 2)
  assert tree.visible[4].tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize("widths", [(), (0,), (2, -1), (1.5,)])
def test_impossible_widths_are_refused(widths):
  network, _ = rand_lm()
  with pytest.raises(ValueError, match="a tree wants"):
    branching(network.model, companions("another")[0], LINKS["greedy"], widths)
