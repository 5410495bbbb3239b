"""The plain strategy at the level of states: no façade, no text."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import ABE, V, begin, prompts, rand_lm, table_lm

from decoder.sampling import LogitTransform, chain, temperature, top_k
from decoder.strategies import Finish, autoregressive, pending, release, run, stream

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")  # a prompt's block gives way to a smaller one

WARM = chain(temperature(1.0))
ROWS, LIMITS, SEEDS = prompts([3, 9, 5]), [20, 25, 12], [7, 8, 9]


@functools.cache
def programs(link=WARM, table=False, vocab_size=None):
  """(jitted step and run, jitted step, strategy, params), both donating their state."""
  network, params = table_lm(ABE) if table else rand_lm()
  strategy = autoregressive(network.model, link, vocab_size)

  def whole(params, state, limit):
    """Reads the prompts, then runs: the final state and both emissions."""
    state, first = strategy.step(params, state)
    state, rest = run(strategy, params, state, limit - 1, 32)
    return state, (first, rest)

  return jax.jit(whole, donate_argnums=1), jax.jit(strategy.step, donate_argnums=1), strategy, params


def start(rows=ROWS, limits=LIMITS, seeds=SEEDS, link=WARM, table=False, **more):
  network, _ = table_lm(ABE) if table else rand_lm()
  return begin(network, rows, limits, seeds=seeds, transforms=link, capacity=32, **more)


def written(emissions):
  """Tokens by row, of one emission or of several."""
  rows = [[] for _ in range(emissions[0].count_B.shape[0])]
  for emission in emissions:
    for b, row in enumerate(rows):
      row += np.asarray(emission.tokens_BN)[b, : int(emission.count_B[b])].tolist()
  return rows


@pytest.fixture(scope="module")
def together():
  whole, _, _, params = programs()
  return written(whole(params, start(), 32)[1])


def test_run_equals_stream(together):
  _, step, _, params = programs()
  got = [emission for _, emission in stream(step, params, start())]
  assert written(got) == together
  assert [len(row) for row in together] == [n - len(r) for n, r in zip(LIMITS, ROWS)]
  assert set(np.asarray(got[-1].info.finish_B).tolist()) == {Finish.LENGTH}


def test_run_in_pieces_equals_run(together):
  _, step, strategy, params = programs()
  pieces = jax.jit(lambda params, state, limit: run(strategy, params, state, limit, 32), donate_argnums=1)
  state, first = step(params, start())
  parts = [first]
  for limit in (1, 5, 0, 2, 30):
    state, emission = pieces(params, state, limit)
    parts.append(emission)
  assert written(parts) == together
  assert int(pieces(params, state, 5).emission.count_B.sum()) == 0, "nothing is left"


def test_a_row_is_the_same_in_any_place_and_company(together):
  """C36's kind: other neighbours, another place, other keys beside it. One batch size; the façade tests others."""
  whole, _, _, params = programs()
  order = [2, 0, 1]
  state = start([ROWS[i] for i in order], [LIMITS[i] for i in order], [SEEDS[i] for i in order])
  assert written(whole(params, state, 32)[1]) == [together[i] for i in order]
  state = start([ROWS[0], ROWS[1][:4] + [1] * 5, [3]], [20, 30, 9], [7, 1, 2])
  assert written(whole(params, state, 32)[1])[0] == together[0]


def test_another_key_gives_other_tokens(together):
  """Negative control."""
  whole, _, _, params = programs()
  other = written(whole(params, start(seeds=[1, 2, 3]), 32)[1])
  assert all(a != b for a, b in zip(other, together))


def test_final_state_holds_what_was_written(together):
  whole, _, _, params = programs()
  state, _ = whole(params, start(), 32)
  for b, row in enumerate(ROWS):
    assert state.context_BL[b, : state.length_B[b]].tolist() == row + together[b]
    held = np.asarray(state.cache.layouts["global"].positions_BS[b])
    assert sorted(held[held >= 0].tolist()) == list(range(LIMITS[b] - 1)), "all but the token drawn last"


def test_release_ends_a_row_and_only_that(together):
  _, step, _, params = programs()
  reader, parts = stream(step, params, start()), []
  state, emission = next(reader)
  parts.append(emission)
  while True:
    try:
      state, emission = reader.send(release(state, jnp.array([True, False, False])))
    except StopIteration:
      break
    parts.append(emission)
  assert written(parts) == [together[0][:1], *together[1:]]


def test_mask_between_the_halves():
  """What a grammar does: compute a mask on the host while the forward half runs."""
  _, _, strategy, params = programs()
  forward, draw = jax.jit(strategy.forward), jax.jit(strategy.draw)
  state, logits = forward(params, start())
  free, _ = draw(state, logits)
  allowed = np.zeros((3, V), bool)
  allowed[0, 17] = allowed[1, [4, 5]] = True
  state, emission = draw(state, logits, jnp.asarray(allowed))
  assert int(emission.tokens_BN[0, 0]) == 17
  assert int(emission.tokens_BN[1, 0]) in (4, 5)
  assert emission.info.finish_B.tolist() == [Finish.RUNNING, Finish.RUNNING, Finish.ERROR], "nothing was allowed"
  assert emission.count_B.tolist() == [1, 1, 0]
  assert free.tokens_BT[0, 0] != 17, "negative control: without the mask something else is drawn"


def test_end_ids_are_a_union_and_end_only_their_row():
  link = chain(temperature(1.0))
  whole, _, _, params = programs(link, table=True)
  state, emissions = whole(params, start([[0]] * 3, [30] * 3, [1, 2, 3], link, True, ends=(9, 3)), 32)
  for row in written(emissions):
    assert row[-1] == 3
    assert 3 not in row[:-1]
  assert state.finish_B.tolist() == [Finish.STOP] * 3


def test_table_lm_law_of_a_second_token():
  """The strategy draws from the model's law given what it drew before: 2,000 rows, two steps."""
  rows = 2000
  link = chain(temperature(1.0))
  whole, _, _, params = programs(link, table=True)
  state = start([[0]] * rows, [3] * rows, list(range(rows)), link, True)
  tokens = np.array(written(whole(params, state, 2)[1]))
  for first in (1, 2):
    after = tokens[tokens[:, 0] == first, 1]
    expected = ABE[first, 1:] * len(after)
    chi2 = ((np.bincount(after, minlength=4)[1:] - expected) ** 2 / expected).sum()
    assert chi2 < 13.8  # p > 0.001 at 2 degrees of freedom


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_logits_end_only_their_row(bad, together):
  """C32: the row says so and emits nothing; its neighbours write on."""
  whole, _, _, params = programs()
  used = {token for row in (*ROWS, *together) for token in row}
  poison = next(token for token in range(V) if token not in used)  # met by no other row
  poisoned = dict(params, embed={"weight": params["embed"]["weight"].at[poison].set(bad)})
  for at in (0, 4, 8):
    rows = [ROWS[0], [poison if i == at else ROWS[0][0] for i in range(9)], ROWS[2]]
    state, emissions = whole(poisoned, start(rows), 32)
    lines = written(emissions)
    assert lines[1] == []
    assert state.finish_B.tolist() == [Finish.LENGTH, Finish.ERROR, Finish.LENGTH]
    assert (lines[0], lines[2]) == (together[0], together[2])


def test_a_transform_that_masks_everything_is_an_error():
  for last in (temperature(0.0), temperature(1.0)):
    hide = LogitTransform(lambda: np.float32(0), lambda x_V, state, context: jnp.full_like(x_V, -jnp.inf))
    link = chain(hide, last, top_k(3))
    network, params = table_lm(ABE)
    strategy = autoregressive(network.model, link)
    _, emission = jax.jit(strategy.step)(params, start([[0]], [5], [1], link, True))
    assert (emission.info.finish_B.tolist(), emission.count_B.tolist()) == ([Finish.ERROR], [0])


def test_transforms_keep_state_through_the_loop():
  """A counter that bans the token drawn last: no token twice in a row."""

  def ban(x_V, last, context):
    return jnp.where(jnp.arange(x_V.shape[0]) == last, -jnp.inf, x_V)

  link = chain(
    LogitTransform(lambda: np.int32(-1), ban, lambda last, token, x_V: token.astype(jnp.int32)), temperature(0.0)
  )
  whole, _, _, params = programs(link, table=True)
  (row,) = written(whole(params, start([[1]], [10], [1], link, True), 9)[1])
  assert len(row) > 1
  assert all(a != b for a, b in itertools.pairwise(row))


def test_padded_vocabulary_is_never_drawn():
  network, params = table_lm(np.full((8, 8), 1 / 8))
  for size, seen in ((5, 5), (None, 8)):
    strategy = autoregressive(network.model, WARM, size)
    state = begin(network, [[0]] * 300, [2] * 300, transforms=WARM, capacity=4)
    _, emission = jax.jit(strategy.step)(params, state)
    assert len(set(np.asarray(emission.tokens_BN)[:, 0].tolist())) == seen


def test_pending_puts_padding_where_a_row_does_not_reach():
  state = start()
  block = pending(state, jnp.array([-2, 7, 4]), 4)
  assert block.positions_BT.tolist() == [[-1, -1, 0, 1], [7, 8, -1, -1], [4, -1, -1, -1]]
  assert block.tokens_BT[0, 2:].tolist() == ROWS[0][:2]


def test_init_refuses_rows_that_disagree():
  with pytest.raises(ValueError, match=r"\[2, 3\]"):
    begin(rand_lm()[0], ROWS, LIMITS[:2])
