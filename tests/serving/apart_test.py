"""A text is the same wherever its row is decoded: prefill and decode in one batch, two devices, or two processes."""

import threading

import jax
import numpy as np
import pytest
from fixtures import CONFIG, Letters, prompts, rand_lm

from decoder.checkpoint import Checkpoint
from decoder.generate import LM
from decoder.programs import Programs
from decoder.serving import apart, engine, rows, transfer
from decoder.settings import Settings
from decoder.sharding import Sharding, mesh_for

PROMPTS = prompts([5, 40, 17, 70, 9, 33], size=58)
SETTINGS = [
  Settings(max_new_tokens=new, temperature=warmth, seed=seed, ignore_eos=True, logprobs=2)
  for seed, (new, warmth) in enumerate([(12, 0.0), (25, 1.0), (7, 0.8), (30, 1.0), (1, 1.0), (9, 0.0)])
]
CAPACITY = 128


@pytest.fixture(scope="module")
def programs(lm):
  return lm.programs(SETTINGS).in_chunks(16)


def slots_of(programs, batch=2):
  return engine.Slots(programs, batch, CAPACITY, SETTINGS[0])


def written(lm, source, slots):
  """(tokens, log-probs) of each request, all asked for at once; rows come and go at different times."""
  desk = apart.Desk(source, slots)
  got = {desk.submit(lm.request(ids, each)): ([], []) for ids, each in zip(PROMPTS, SETTINGS)}
  while not desk.done:
    for one in desk.turn():
      got[one.number][0].extend(one.tokens)
      got[one.number][1].extend(np.asarray(jax.tree.leaves(one.details)[0]).tolist())
  return [got[number] for number in sorted(got)]


@pytest.fixture(scope="module")
def colocated(lm, programs):
  return written(lm, apart.Here(engine.Prefill(programs)), slots_of(programs))


def distant(lm, programs, budget=5000):
  """The same, the prompts read at the other end of a stream; and the bytes that came."""
  with transfer.listen() as listener:
    identity = transfer.identity(lm.params, lm.network.cache_spec)
    served = []

    def serve():
      with transfer.accept(listener, 20) as connection:
        transfer.greet(connection, identity)
        like = engine.fields_for(lm.request(PROMPTS[0], SETTINGS[0]), programs)
        served.append(apart.serve(connection, engine.Prefill(programs), like))

    server = threading.Thread(target=serve)
    server.start()
    slots = slots_of(programs)
    with transfer.connect(*listener.getsockname()) as connection:
      transfer.greet(connection, identity)
      texts = written(lm, apart.There(connection, slots, budget), slots)
      count = connection.received
    server.join()
    assert served == [len(PROMPTS)]
    return texts, count


def test_colocated_texts_are_those_of_each_request_alone(lm, colocated):
  for number in (1, 5):  # each length is a compilation
    assert colocated[number][0] == list(lm.generate(PROMPTS[number], SETTINGS[number]).token_ids)
  assert [len(tokens) for tokens, _ in colocated] == [each.max_new_tokens for each in SETTINGS]
  assert len({tuple(tokens) for tokens, _ in colocated}) == len(PROMPTS)


def test_disaggregated_is_bit_equal_to_colocated(lm, programs, colocated):
  """Greedy and sampled, log-probs included; and the bytes are the filled slots, little more."""
  texts, count = distant(lm, programs)
  assert texts == colocated
  moved = sum(len(ids) for ids, each in zip(PROMPTS, SETTINGS) if each.max_new_tokens > 1)
  wanted = rows.kv_bytes(lm.network.cache_spec, moved, 4)
  assert wanted == moved * 2 * 4 * 8 * 2 * 4  # tokens × layers × kv_heads × head_dim × 2 × bytes
  assert wanted < count < wanted + len(PROMPTS) * 12_000, "what is besides: headers, positions, contexts"


def test_a_row_whose_key_is_lost_writes_another_text(lm, programs, colocated, monkeypatch):
  """Negative control: the tests see it where one leaf of a row does not arrive."""
  insert = Programs.insert

  def with_another_key(self, state, rows_R, other):
    return insert(self, state, rows_R, other.replace(key_B=jax.random.split(other.key_B[0], 1)))

  monkeypatch.setattr(Programs, "insert", with_another_key)
  texts, _ = distant(lm, programs)
  same = [a == b for a, b in zip(texts, colocated)]
  assert same == [each.temperature == 0 or each.max_new_tokens == 1 for each in SETTINGS]


def test_devices_of_one_process_hand_rows_over(lm, colocated):
  """Prefill on one mesh, decode on another: `device_put` between them, rounded up to whole powers of two of slots."""
  over = [facade_over(jax.devices("cpu")[first : first + 2]) for first in (1, 3)]
  reads, writes = (one.programs(SETTINGS) for one in over)
  slots = slots_of(writes)
  texts = written(over[0], apart.Here(engine.Prefill(reads.in_chunks(16))), slots)
  assert [tokens for tokens, _ in texts] == [tokens for tokens, _ in colocated]
  homes = {device for x in jax.tree.leaves(slots.state) for device in x.devices()}
  assert homes == set(jax.devices("cpu")[3:5])


def facade_over(devices):
  """RAND-LM over a mesh of two devices, its heads divided."""
  network, params = rand_lm()
  placement = Sharding(mesh_for({"tensor": 2}, network.cache_spec, [4], devices))
  named = jax.tree_util.tree_map_with_path(
    lambda path, x: placement.put(jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(x)), params
  )
  checkpoint = Checkpoint("tiny", CONFIG, {}, Letters.build(), named, None)
  made = LM(checkpoint._replace(placement=placement), network.dtype)
  made.network = network
  return made


def test_a_row_is_packed_with_exactly_what_it_holds(lm, programs):
  row = engine.Prefill(programs).read(engine.fields_for(lm.request(PROMPTS[3], SETTINGS[3]), programs))
  assert row.state.cache.layouts["global"].positions_BS.shape == (1, 128), "cut to a power of two where it is moved"
  leaves, arrays = rows.pack_row(row)
  sizes = {leaf.path: array.nbytes for leaf, array in zip(leaves, arrays)}
  assert sum(n for path, n in sizes.items() if "/layers/" in path) == rows.kv_bytes(lm.network.cache_spec, 70, 4)
  assert sizes["state/cache/layouts/global/positions_BS"] == 70 * 4
  assert sizes["state/context_BL"] == 71 * 4
  room = rows.room_for(leaves, slots_of(programs).shapes(70))
  for memory, array in zip(room.parts, arrays):
    data, at = rows.buffer_of(array), 0
    for part in memory:
      part[:] = data[at : at + len(part)]
      at += len(part)
    assert at == len(data)
  again = rows.pack_row(room.whole())
  assert again[0] == leaves
  assert all(np.array_equal(a, b) for a, b in zip(again[1], arrays))


def test_rows_of_another_kind_are_refused(lm, programs):
  leaves, _ = rows.pack_row(engine.Prefill(programs).read(engine.fields_for(lm.request([1, 2], SETTINGS[1]), programs)))
  like = slots_of(programs).shapes(2)
  rows.room_for(leaves, like)
  layer = next(i for i, leaf in enumerate(leaves) if leaf.path.endswith("layers/0/k"))
  changed = {
    "settings": leaves[:-1],
    "dtype": [leaf._replace(dtype="bfloat16") if i == layer else leaf for i, leaf in enumerate(leaves)],
    "capacity": [leaf._replace(shape=(1, 4, 65, 8)) if i == layer else leaf for i, leaf in enumerate(leaves)],
    "along one axis": [leaf._replace(shape=(1, 3, 2, 8)) if i == layer else leaf for i, leaf in enumerate(leaves)],
  }
  for word, others in changed.items():
    with pytest.raises(ValueError, match=word):
      rows.room_for(others, like)


def test_a_released_row_frees_its_slot_and_leaves_nothing(lm, programs):
  slots, prefill = slots_of(programs), engine.Prefill(programs)
  row = prefill.read(engine.fields_for(lm.request(PROMPTS[3], SETTINGS[3]), programs))
  first, second = slots.insert(row, "a"), slots.insert(row, "b")
  with pytest.raises(ValueError, match="all 2 slots are taken"):
    slots.insert(row, "c")
  slots.step(3)
  slots.release([first])
  assert slots.owners == [None, "b"]
  held = np.asarray(slots.state.cache.layouts["global"].positions_BS)
  assert (held[first] < 0).all()
  assert held[second].max() == 70 + 2
  emission, told = slots.step(2)
  assert (told, emission.count_B.tolist()) == ([(second, "b")], [0, 2])
  while slots.busy:
    slots.step(64)
  assert (np.asarray(slots.state.cache.layouts["global"].positions_BS) < 0).all(), (
    "an ended row frees its slot by itself"
  )


def test_what_cannot_be_served_is_refused_at_once(lm, programs):
  slots = slots_of(programs)
  desk = apart.Desk(apart.Here(engine.Prefill(programs)), slots)
  with pytest.raises(ValueError, match="a slot holds 128"):
    desk.submit(lm.request([1], max_new_tokens=200))
  with pytest.raises(ValueError, match="prompt_logprobs"):
    desk.submit(lm.request([1], max_new_tokens=2, prompt_logprobs=True))
  with pytest.raises(ValueError, match="guidance_scale"):
    desk.submit(lm.request([1], max_new_tokens=2, guidance_scale=2.0))
  with pytest.raises(ValueError, match="power of two"):
    engine.Slots(programs, 3, CAPACITY, SETTINGS[0])
  with pytest.raises(ValueError, match="power of two"):
    programs.in_chunks(100)
  with pytest.raises(ValueError, match="plain programs"):
    engine.Prefill(lm.programs([Settings(guidance_scale=2.0)]))
  assert desk.done


def test_nothing_compiles_after_the_first_rows(lm, programs):
  """Rows of other lengths, in other slots, with other settings, take the programs that are there."""
  slots, prefill = slots_of(programs), engine.Prefill(programs)

  def serve(prompt, settings):
    slots.insert(prefill.read(engine.fields_for(lm.request(prompt, settings), programs)), 0)
    while slots.busy:
      slots.step(4)

  slots.prepare((30, 65))
  prepared = lm._compiler.seconds
  row = prefill.read(engine.fields_for(lm.request(PROMPTS[3][:65], SETTINGS[3]), programs))
  read = lm._compiler.seconds - prepared
  slots.insert(row, 0)
  slots.step(64)
  assert lm._compiler.seconds == prepared + read, "the batch was prepared"
  assert not slots.busy
  for length in (30, 65):  # two sizes of rows
    serve(PROMPTS[3][:length], SETTINGS[3])
  before = lm._compiler.seconds
  for length, settings in ((3, SETTINGS[1]), (64, SETTINGS[5]), (66, SETTINGS[3]), (50, SETTINGS[0])):
    serve(PROMPTS[3][:1] * length, settings)
  assert lm._compiler.seconds == before


@pytest.mark.slow
def test_the_default_model_writes_the_same_apart():
  from default_model import load_or_skip

  lm = load_or_skip()
  asked = [("Once upon a time", 0.0), ("The three laws of thermodynamics are", 0.9), ("def fibonacci(n):", 0.7)]
  each = [Settings(max_new_tokens=48, temperature=t, seed=n, top_p=0.95) for n, (_, t) in enumerate(asked)]
  programs = lm.programs(each)
  like = engine.fields_for(lm.request(asked[0][0], each[0]), programs)

  def texts(source, slots):
    desk = apart.Desk(source, slots)
    got = {desk.submit(lm.request(prompt, one)): [] for (prompt, _), one in zip(asked, each)}
    while not desk.done:
      for one in desk.turn():
        got[one.number] += one.tokens
    return list(got.values())

  one = texts(apart.Here(engine.Prefill(programs)), engine.Slots(programs, 4, 256, each[0]))
  with transfer.listen() as listener:

    def serve():
      with transfer.accept(listener, 20) as connection:
        apart.serve(connection, engine.Prefill(programs), like)

    server = threading.Thread(target=serve)
    server.start()
    with transfer.connect(*listener.getsockname()) as connection:
      slots = engine.Slots(programs, 4, 256, each[0])
      two = texts(apart.There(connection, slots), slots)
    server.join()
  assert one == two
  assert one[0] == list(lm.generate(asked[0][0], each[0]).token_ids)
