"""Laws of a cache that beams share: each sees its own text whatever the others do, and nothing is stored twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import blocks_of
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.cache import LayerSpec, allocate
from decoder.ops.attention import Query

SPEC, BEAMS, STEPS = (LayerSpec("global", 2, 16),), 3, 5
PROMPTS = [4, 1]  # tokens of each row
SLOTS = max(PROMPTS) + BEAMS * STEPS


def value(row, number):
  """What is stored for the token of this number in a row: no two are alike."""
  return np.full((2, 16), 100.0 * row + number, np.float32)


def put(cache, positions, values):
  positions = jnp.asarray(positions, jnp.int32)
  cache = cache.claim(positions)
  entry = cache.layer(0).append(positions, jnp.asarray(values), -jnp.asarray(values))
  return cache.with_layer(0, entry)


def begun(block=4):
  """A cache of the prompts, spread; and each row's texts as lists of token numbers."""
  cache = allocate(SPEC, 2, SLOTS, layout=blocks_of(block))
  positions = [[p if p < length else -1 for p in range(max(PROMPTS))] for length in PROMPTS]
  values = np.stack([np.stack([value(row, number) for number in range(max(PROMPTS))]) for row in range(2)])
  cache = put(cache, positions, values)
  return cache.spread(BEAMS), [[list(range(length))] * BEAMS for length in PROMPTS]


@jax.jit
def step(cache, parents_BW, positions_BW, values_BWKH):
  return put(cache.follow(parents_BW), positions_BW, values_BWKH)


def advanced(cache, texts, parents, count):
  """One step: beams go on from `parents` (−1: from none) with new tokens; and what then must be held."""
  positions, values, after = np.full((2, BEAMS), -1), np.zeros((2, BEAMS, 2, 16), np.float32), [[], []]
  for row in range(2):
    for w, parent in enumerate(parents[row]):
      alive = parent >= 0 and texts[row][parent] is not None
      number = 50 + count * BEAMS + w
      after[row].append([*texts[row][parent], number] if alive else None)
      if alive:
        positions[row, w], values[row, w] = len(texts[row][parent]), value(row, number)
  parents = [[p if p >= 0 and texts[r][p] is not None else -1 for p in parents[r]] for r in range(2)]
  return step(cache, jnp.asarray(parents), jnp.asarray(positions), values), after


def held(cache):
  """By row and beam the numbers of the tokens of its text, in order of their positions."""
  layout, k = cache.layouts["global"], np.asarray(cache.layers[0]["k"])
  rows = []
  for row, positions_WS in enumerate(np.asarray(layout.positions_BWS)):
    texts = []
    for positions_S in positions_WS:
      slots = sorted(np.flatnonzero(positions_S >= 0), key=lambda s: positions_S[s])
      assert positions_S[slots].tolist() == list(range(len(slots)))
      texts.append([int(k[row, 0, s, 0] - 100 * row) for s in slots] or None)
    rows.append(texts)
  return rows


moves = st.lists(
  st.lists(st.lists(st.integers(-1, BEAMS - 1), min_size=BEAMS, max_size=BEAMS), min_size=2, max_size=2),
  min_size=1, max_size=STEPS,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(moves)
def test_every_beam_holds_its_own_text_and_shared_tokens_are_stored_once(moves):
  cache, texts = begun()
  for count, parents in enumerate(moves):
    cache, texts = advanced(cache, texts, parents, count)
    assert held(cache) == texts
    used_BS = np.asarray(cache.layouts["global"].positions_BWS >= 0).any(axis=1)
    for row in range(2):
      assert used_BS[row].sum() == len({token for text in texts[row] for token in text or ()})


MOVES = [[[0, 0, 0], [0, 1, 2]], [[2, 2, 0], [1, -1, 1]], [[1, 0, 0], [2, 0, -1]]]


def walked(block=4):
  cache, texts = begun(block)
  for count, parents in enumerate(MOVES):
    cache, texts = advanced(cache, texts, parents, count)
  return cache, texts


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_sees_what_rows_of_their_own_would(block, window):
  """Through the kernel where there is one, and through XLA."""
  cache, texts = walked(block)
  q = jnp.asarray(np.random.default_rng(0).normal(size=(2, BEAMS, 4, 16)), jnp.float32) * 0.01
  lengths = np.array([[len(text) if text else 0 for text in row] for row in texts])
  positions = jnp.asarray(np.where(lengths > 0, lengths - 1, -1), jnp.int32)
  seen, _ = jax.jit(lambda cache, q, positions: cache.layer(0).attend(Query(q, positions, 1.0, window)))(
    cache, q, positions
  )
  for row in range(2):
    for w, text in enumerate(texts[row]):
      if text is None:
        assert (np.asarray(seen)[row, w] == 0).all()
        continue
      alone = put(
        allocate(SPEC, 1, SLOTS), [list(range(len(text)))], np.stack([[value(row, number) for number in text]])
      )
      want, _ = alone.layer(0).attend(
        Query(q[row : row + 1, w : w + 1], positions[row : row + 1, w : w + 1], 1.0, window)
      )
      np.testing.assert_allclose(seen[row, w], want[0, 0], rtol=2e-5, atol=1e-4)


def test_blocks_that_hold_nothing_needed_are_not_read():
  cache, _ = walked(block=1)
  layout = cache.layouts["global"]
  used = np.flatnonzero(np.asarray(layout.positions_BWS >= 0).any(axis=(0, 1)))
  assert [int(x) for x in layout.blocks(jnp.array([[6, 6, 6], [3, 3, -1]]), None)] == [0, used.max() + 1]
  late = np.flatnonzero((np.asarray(layout.positions_BWS) >= 2).any(axis=(0, 1)))
  assert [int(x) for x in layout.blocks(jnp.array([[6, 6, 6], [3, 3, -1]]), 2)] == [late.min(), late.max() + 1]
  empty = layout.truncate(jnp.array([0, 0]))
  assert [int(x) for x in empty.blocks(jnp.array([[0, 0, 0], [-1, -1, -1]]), None)] == [0, 0]


def test_truncate_select_and_insert():
  cache, texts = walked()
  cut = cache.truncate(jnp.array([5, 1]))
  assert held(cut) == [[text[:limit] if text else None for text in row] for row, limit in zip(texts, (5, 1))]
  twice = held(cache.select(jnp.array([0, 0])))
  assert twice[0] == texts[0]
  fresh, before = begun()
  both = held(fresh.insert(jnp.array([1, 7]), cache.select(jnp.array([1, 0]))))
  assert both == [before[0], texts[1]]


def test_what_does_not_fit_is_refused():
  cache, _ = begun()
  with pytest.raises(ValueError, match="3 beams takes one token a beam at a time, got 2"):
    cache.claim(jnp.zeros((2, 2), jnp.int32))
  with pytest.raises(ValueError, match="1 … 4 beams, got 5"):
    allocate(SPEC, 1, 4).spread(5)
  with pytest.raises(ValueError, match="must be equal"):
    cache.insert(jnp.array([0]), allocate(SPEC, 1, 8).spread(BEAMS))
