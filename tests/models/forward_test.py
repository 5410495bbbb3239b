"""A network over its cache computes what it would without one, however tokens arrive."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import VARIANTS, WINDOW, V, blocks_of, cache_for, prompts, ragged, rand_lm

from decoder.cache import Cache

CLOSE = dict(atol=1e-5)
TOKENS = prompts([24])[0]
SMALL = blocks_of(7)  # caches below hold several blocks, the last one not whole


@functools.cache
def logits_of(variant):
  """Jitted (tokens_BT, positions_BT, cache) -> (logits_BTV, cache)."""
  network, params = rand_lm(variant)

  @jax.jit
  def forward(tokens_BT, positions_BT, cache):
    features_BTD, cache = network.model.forward(params, tokens_BT, positions_BT, cache)
    return jax.vmap(lambda x: network.model.head(params, x), 1, 1)(features_BTD), cache

  return forward


def whole(variant, tokens=TOKENS):
  """One row alone, read at once."""
  cache = cache_for(rand_lm(variant)[0], 1, 24, SMALL)
  logits, cache = logits_of(variant)(*ragged([tokens], right=24 - len(tokens)), cache)
  return logits[:, : len(tokens)], cache


def chunked(variant, sizes, tokens=TOKENS):
  """Reads tokens in chunks of these sizes: single ones as they are, others padded to one width."""
  cache, at, out = cache_for(rand_lm(variant)[0], 1, 24, SMALL), 0, []
  for size in sizes:
    part, positions = ragged([tokens[at : at + size]], right=0 if size == 1 else 24 - size)
    positions = jnp.where(positions >= 0, positions + at, -1)
    logits, cache = logits_of(variant)(part, positions, cache)
    out.append(logits[:, :size])
    at += size
  return jnp.concatenate(out, axis=1), cache


FAST = ("rope", "absolute", "window")  # window: with grouped queries
EVERY = [pytest.param(v, marks=[pytest.mark.slow] * (v not in FAST)) for v in VARIANTS]


@pytest.fixture(scope="module", params=EVERY)
def variant(request):
  return request.param


def test_cached_equals_recomputed(variant):
  """C98: also a prompt longer than the window, and the window in the one-token path."""
  got, _ = chunked(variant, [16, *[1] * 8])
  want, _ = whole(variant)
  np.testing.assert_allclose(got, want, **CLOSE)
  assert np.abs(np.asarray(want)).max() > 0.5, "the logits say something"


def test_chunked_equals_whole(variant):
  want, filled = whole(variant)
  for sizes in ([8, 16], [1, 2, 4, 16, 1], [16, 8], [15, 2, 7]):
    got, cache = chunked(variant, sizes)
    np.testing.assert_allclose(got, want, **CLOSE)
    for one, other in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(filled.layers)):
      np.testing.assert_allclose(one[:, :, :24], other[:, :, :24], **CLOSE)


def test_a_cache_that_misses_a_token_differs(variant):
  """Negative control: forget one token between chunks."""
  want, _ = whole(variant)
  _, cache = chunked(variant, [16])
  part, positions = ragged([TOKENS[16:17]])
  got, _ = logits_of(variant)(part, positions + 16, cache.truncate(jnp.array([15])))
  assert np.abs(got[0, 0] - want[0, 16]).max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_C43_C44_C46_C48_C50_ragged_rows_equal_single_runs(variant, side):
  """Prompts hold the end id (5), which is also the pad id; then 4 single tokens a row."""
  rows = prompts([3, 9, 17], seed=3)
  for row in rows:
    row[1] = 5
  tokens, positions = ragged(rows, pad=5, **{side: 7})
  steps = prompts([4] * len(rows), seed=4)
  cache = cache_for(rand_lm(variant)[0], len(rows), 24, SMALL)
  logits, cache = logits_of(variant)(tokens, positions, cache)
  together = [[logits[b, int(np.argmax(positions[b]))]] for b in range(len(rows))]
  for step in range(4):
    at = jnp.array([[len(row) + step] for row in rows])
    logits, cache = logits_of(variant)(jnp.array([[s[step]] for s in steps]), at, cache)
    for b in range(len(rows)):
      together[b].append(logits[b, 0])
  for b, row in enumerate(rows):
    want, _ = whole(variant, [*row, *steps[b]])
    np.testing.assert_allclose(np.stack(together[b]), want[0, len(row) - 1 :], **CLOSE)


def test_C43_a_shared_position_vector_would_differ(variant):
  """Negative control."""
  rows = prompts([3, 9, 17], seed=3)
  tokens, _ = ragged(rows, left=7)
  shared = jnp.broadcast_to(jnp.arange(24), tokens.shape)
  logits, _ = logits_of(variant)(tokens, shared, cache_for(rand_lm(variant)[0], 3, 24, SMALL))
  want, _ = whole(variant, rows[0])
  assert np.abs(logits[0, -1] - want[0, -1]).max() > 1e-3


def reach(variant, length=20):
  """[T, T]: which inputs change which outputs, by gradient with respect to the token vectors."""
  network, params = rand_lm(variant)
  tokens, positions = ragged([TOKENS[:length]])

  def sums(nudge_T):
    # Token i gets the table's row i to itself, so that the gradient is one with respect to single inputs.
    table_VD = params["embed"]["weight"].at[:length].set(params["embed"]["weight"][tokens[0]] + nudge_T[:, None])
    changed = {**params, "embed": {"weight": table_VD}}
    own = jnp.arange(length)[None]
    out_BTD, _ = network.model.forward(changed, own, positions, cache_for(network, 1, length, SMALL))
    return out_BTD[0] @ jnp.arange(1.0, 33.0)

  return np.abs(np.asarray(jax.jit(jax.jacfwd(sums))(jnp.zeros(length)))) > 1e-7


def test_causality_by_gradient():
  got = reach("rope")
  np.testing.assert_array_equal(got, np.tri(20, dtype=bool))


def test_C97_a_window_attends_exactly_W_keys():
  """Two layers of window W reach 2·(W − 1) back, and no further."""
  t, s = np.mgrid[:20, :20]
  np.testing.assert_array_equal(reach("window"), (s <= t) & (t - s <= 2 * (WINDOW - 1)))


@pytest.mark.parametrize("variant", ["window"])
def test_bfloat16_stays_finite_and_near(variant):
  network, params = rand_lm(variant, jnp.bfloat16)
  tokens, positions = ragged(prompts([3, 9, 17]), left=7)
  features, cache = jax.jit(network.model.forward)(params, tokens, positions, cache_for(network, 3, 24, SMALL))
  logits = network.model.head(params, features[:, -1])
  assert features.dtype == logits.dtype == jax.tree.leaves(cache.layers)[0].dtype == jnp.bfloat16
  assert bool(jnp.isfinite(logits).all())
  exact, _ = logits_of(variant)(tokens, positions, cache_for(rand_lm(variant)[0], 3, 24, SMALL))
  scale = float(jnp.std(exact[:, -1]))
  assert float(jnp.abs(logits.astype(jnp.float32) - exact[:, -1]).mean()) < 0.2 * scale


TREE = [-1, -1, 0, 0, 1, 2]  # parents: two roots, and so on


def paths():
  """Every root-to-leaf path of TREE as indices."""
  leaves = set(range(len(TREE))) - set(TREE)
  for leaf in sorted(leaves):
    path = [leaf]
    while TREE[path[0]] >= 0:
      path.insert(0, TREE[path[0]])
    yield path


@pytest.mark.parametrize("variant", ["rope", "window"])
def test_each_path_of_a_drafted_tree_equals_plain_decoding(variant):
  prompt, drafts = TOKENS[:10], prompts([len(TREE)], seed=9)[0]
  forward, keep = logits_of(variant), jax.jit(Cache.keep)
  _, cache = chunked(variant, [10], prompt)
  seen, depth = np.eye(len(TREE), dtype=bool), np.zeros(len(TREE), int)
  for i, parent in enumerate(TREE):
    if parent >= 0:
      seen[i] |= seen[parent]
      depth[i] = depth[parent] + 1
  at = jnp.asarray(10 + depth, jnp.int32)[None]
  tree_logits, drafted = forward(jnp.asarray([drafts]), at, cache.branch(jnp.asarray(seen)[None]))
  for path in paths():
    end = 10 + len(path)
    want, _ = whole(variant, [*prompt, *(drafts[i] for i in path), 7, 8])
    np.testing.assert_allclose(tree_logits[0, np.array(path)], want[0, 10:end], **CLOSE)
    kept = keep(drafted, jnp.array([path + [-1] * (3 - len(path))]))
    one, kept = forward(jnp.array([[7]]), jnp.array([[end]]), kept)
    other, _ = forward(jnp.array([[8]]), jnp.array([[end + 1]]), kept)
    np.testing.assert_allclose(jnp.concatenate([one, other], 1)[0], want[0, end:], **CLOSE)
  blind, _ = forward(jnp.asarray([drafts]), at, cache.branch(jnp.ones((1, 6, 6), bool)))
  assert np.abs(blind - tree_logits).max() > 1e-3, "negative control: without the tree's mask rivals see each other"


def test_padding_may_hold_any_id():
  tokens, positions = ragged([TOKENS[:3]], left=21, pad=V + 1000)
  logits, _ = logits_of("rope")(tokens, positions, cache_for(rand_lm("rope")[0], 1, 24, SMALL))
  want, _ = whole("rope", TOKENS[:3])
  np.testing.assert_allclose(logits[0, -3:], want[0], **CLOSE)
