"""Laws of a cache: what is claimed, written, forgotten, copied and committed is what is read."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.cache import Contiguous, LayerSpec, Raw, allocate
from decoder.ops.attention import Query

SPEC = (LayerSpec("global", 2, 4), LayerSpec("local", 2, 4, window=3))
CAPACITY = 16


def held(cache, layer=0):
  """Everything a layer holds, as {(row, position): (k, v)}, read through the interface, block by block."""
  entry = cache.layer(layer)
  layout, found = entry.layout, {}
  for block in range(layout.positions_BS.shape[1] // layout.block):
    positions = np.asarray(layout.read_positions(jnp.int32(block)))
    k, v = (np.asarray(entry.codec.read(entry.storage[n], layout, jnp.int32(block))) for n in ("k", "v"))
    for b, s in zip(*np.nonzero(positions >= 0)):
      assert (b, positions[b, s]) not in found, "a position is held twice"
      found[int(b), int(positions[b, s])] = (k[b, :, s].tolist(), v[b, :, s].tolist())
  return found


def value(row, position):
  """What these tests store for a token: tells its row and position."""
  return np.full((2, 4), row * 1000.0 + float(position), np.float32)


def put(cache, positions, offset=0):
  """Appends tokens at `positions` [B, T] to every layer; `offset` marks a second version of a token."""
  positions = np.asarray(positions, np.int32)
  k = np.stack([np.stack([value(b, p) + offset for p in row]) for b, row in enumerate(positions)])
  cache = cache.claim(jnp.asarray(positions))
  for index in range(len(SPEC)):
    entry = cache.layer(index).append(jnp.asarray(positions), jnp.asarray(k), jnp.asarray(-k))
    cache = cache.with_layer(index, entry)
  return cache


def wanted(pairs, offset=0):
  each = {pair: value(*pair) + offset for pair in pairs}
  return {pair: (k.tolist(), (-k).tolist()) for pair, k in each.items()}


def blocks_of(size):
  class Blocks(Contiguous):
    @classmethod
    def allocate(cls, batch, capacity, block=size):
      return Contiguous.allocate(batch, capacity, block)

  return Blocks


@pytest.fixture(params=[16, 5, 1], ids=lambda size: f"blocks of {size}")
def empty(request):
  """Capacity 16 in blocks of 16, 5 (not a divisor) or 1."""
  return allocate(SPEC, 2, CAPACITY, layout=blocks_of(request.param))


def test_what_is_written_is_read(empty):
  cache = put(empty, [[0, 1, 2], [-1, 0, 1]])
  for layer in range(2):
    assert held(cache, layer) == wanted([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
  assert held(empty) == {}, "the old cache is a value: unchanged"
  assert (cache.capacity, cache.batch) == (CAPACITY, 2)


def test_tokens_at_no_position_leave_no_trace(empty):
  cache = put(empty, [[0, 1], [0, 1]])
  after = put(cache, [[-1, -1], [-1, -1]], offset=7)
  assert held(after) == held(cache)
  for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
    np.testing.assert_array_equal(before, now)


def test_C93_a_write_past_the_end_is_dropped(empty):
  full = put(empty, [range(CAPACITY)] * 2)
  for past in (CAPACITY, CAPACITY + 3, CAPACITY + 4, 2**31 - 1):
    after = put(full, [[past], [past]], offset=7)
    assert held(after) == held(full)
    assert held(after)[0, 15] == wanted([(0, 15)])[0, 15]
  assert len(held(full)) == 2 * CAPACITY


def test_C93_dynamic_update_slice_would_overwrite_slot_15():
  """Negative control: the clamping write this cache does without."""
  slots = jax.lax.dynamic_update_slice(jnp.arange(CAPACITY), jnp.array([99]), (CAPACITY,))
  assert slots[15] == 99


def test_truncate_after_append_is_identity(empty):
  cache = put(empty, [[0, 1, 2], [0, 1, -1]])
  longer = put(cache, [[3, 4], [2, 3]])
  back = longer.truncate(jnp.array([3, 2]))
  assert held(back) == held(cache) != held(longer)
  again = put(back, [[3], [2]], offset=7)
  assert held(again) == held(cache) | wanted([(0, 3), (1, 2)], offset=7)
  assert held(longer.truncate(jnp.array([9, 0]))) == {k: v for k, v in held(longer).items() if k[0] == 0}


def test_select_copies_rows(empty):
  cache = put(empty, [[0, 1, 2], [0, -1, -1]]).replace(extent_B=jnp.array([5, 9]))
  after = cache.select(jnp.array([1, 1, 0]))
  source = held(cache)
  want = {(r, p): kv for (b, p), kv in source.items() for r in range(3) if (1, 1, 0)[r] == b}
  assert held(after) == want
  assert after.extent_B.tolist() == [9, 9, 5]
  assert held(put(after, [[1], [1], [3]])).keys() - want.keys() == {(0, 1), (1, 1), (2, 3)}


def test_insert_replaces_whole_rows(empty):
  cache = put(empty, [range(6), [*range(4), -1, -1]])
  small = put(allocate(SPEC, 2, 5).replace(extent_B=jnp.array([3, 4])), [[0, 1, 2], [0, -1, -1]], offset=7)
  after = cache.insert(jnp.array([1, 2]), small)  # row 2 does not exist: dropped
  moved = {(1, p): kv for (b, p), kv in held(small).items() if b == 0}
  assert held(after) == {k: v for k, v in held(cache).items() if k[0] == 0} | moved
  assert after.extent_B.tolist() == [CAPACITY, 3]


def test_insert_refuses_what_does_not_fit(empty):
  with pytest.raises(ValueError, match=r"32 slots into a cache of 1[68]|32 slots into a cache of 20"):
    empty.insert(jnp.array([0]), allocate(SPEC, 1, 32))
  with pytest.raises(ValueError, match="same model and codec"):
    empty.insert(jnp.array([0]), allocate(SPEC[:1], 1, 16))


def test_forgotten_slots_are_not_seen(empty):
  """Even where what they held is not finite: a row that ended in NaN must not spoil the next one in its place."""
  broken = put(empty, [[0, 1, 2, 3], [0, 1, 2, 3]], offset=np.nan)
  fresh = put(broken.truncate(jnp.array([0, 0])), [[0], [0]])
  entry = fresh.layer(0)
  seen, _ = entry.attend(Query(jnp.ones((2, 1, 2, 4)), jnp.zeros((2, 1), jnp.int32), 1.0))
  np.testing.assert_allclose(seen, np.stack([-value(0, 0), -value(1, 0)])[:, None])


def test_sizes_below_one_are_refused():
  for batch, capacity in ((0, 4), (1, 0)):
    with pytest.raises(ValueError, match=f"got {batch}, {capacity}"):
      allocate(SPEC, batch, capacity)


@pytest.mark.parametrize("window", [None, 3])
def test_only_the_blocks_that_are_needed_are_read(window):
  layout = allocate(SPEC, 2, 40, layout=blocks_of(8)).layouts["global"]
  assert [int(x) for x in layout.blocks(jnp.array([[0]]), window)] == [0, 0]
  layout = layout.claim(jnp.array([[*range(19)], [*range(9), *[-1] * 10]]))
  first, last = layout.blocks(jnp.array([[18], [-1]]), window)
  assert (int(first), int(last)) == (0 if window is None else 2, 3)


def draft(cache, tree_positions, visible):
  cache = cache.branch(jnp.asarray(visible)[None].repeat(2, 0))
  return put(cache, tree_positions, offset=0.5)


def test_keep_commits_one_path_of_a_tree(empty):
  cache = put(empty, [[0, 1], [0, 1]])
  # 0 and 1 are rivals for position 2; 2 follows 0, 3 follows 1.
  positions, visible = [[2, 2, 3, 3]] * 2, np.eye(4, dtype=bool)
  visible[2, 0] = visible[3, 1] = True
  drafted = draft(cache, positions, visible)
  assert held(drafted) == held(cache), "nothing is written before keep"
  kept = drafted.keep(jnp.array([[1, 3], [0, -1]]))
  want = {(0, 2): 2, (0, 3): 3, (1, 2): 2}
  for layer in range(2):
    assert held(kept, layer) == held(cache) | wanted(want, offset=0.5)
  assert held(drafted.keep(jnp.array([[-1], [-1]]))) == held(cache)
  assert jax.tree.structure(kept) == jax.tree.structure(cache)


def test_a_second_branch_starts_anew(empty):
  cache = put(empty, [[0], [0]])
  twice = draft(draft(cache, [[1], [1]], np.eye(1, dtype=bool)), [[1, 1], [1, 1]], np.eye(2, dtype=bool))
  assert held(twice.keep(jnp.array([[1], [-1]]))) == held(cache) | wanted([(0, 1)], offset=0.5)


def test_keep_wants_a_draft(empty):
  with pytest.raises(ValueError, match="branch"):
    empty.keep(jnp.array([[0], [0]]))


def test_a_codec_decides_the_type():
  cache = allocate(SPEC, 1, 4, codec=Raw(jnp.bfloat16))
  assert {x.dtype for x in jax.tree.leaves(cache.layers)} == {jnp.dtype("bfloat16")}
  assert jax.tree.leaves(cache.layers)[0].shape == (1, 2, 4, 4)
  layout = cache.layouts["global"]
  x = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype(np.float32)
  for dtype, bits in itertools.product((jnp.float32, jnp.bfloat16, jnp.float16), (False, True)):
    codec = Raw(dtype, bits)
    storage = codec.write(codec.init(layout, 2, 4), layout, jnp.asarray(x), jnp.arange(3)[None])
    got = codec.read(storage, layout, jnp.int32(0))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[:, :, :3].astype(jnp.float32), x.swapaxes(1, 2).astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_write_moves_what_it_writes_in_any_type(dtype):
  """No conversion of the whole buffer: see the control."""

  def temporaries(codec):
    def program(cache):
      layout, storage = cache.layouts["global"], cache.layers[0]["k"]

      def step(carry):
        at, storage = carry
        values = jnp.ones((2, 1, 2, 4)) * at
        return at + 1, codec.write(storage, layout, values, jnp.full((2, 1), at))

      return jax.lax.while_loop(lambda carry: carry[0] < 9, step, (jnp.int32(0), storage))[1]

    cache = jax.eval_shape(lambda: allocate(SPEC, 2, 4096, codec=codec))
    compiled = jax.jit(program, donate_argnums=0).lower(cache).compile()
    return compiled.memory_analysis().temp_size_in_bytes, cache.layers[0]["k"].size * cache.layers[0][
      "k"
    ].dtype.itemsize

  used, whole = temporaries(Raw(dtype, bits=True))
  assert used < whole / 8
  if dtype == jnp.bfloat16 and jax.__version_info__ < (0, 11):  # since then XLA writes bfloat16 in place as well
    assert temporaries(Raw(dtype))[0] >= whole
