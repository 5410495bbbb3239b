"""Several devices compute what one does: logits, texts, beams and guesses, for every preset; and what lies where."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import Letters
from jax.sharding import PartitionSpec
from sources import CONFIGS, padded

from decoder.cache import Raw, allocate
from decoder.cache import spread as spreads
from decoder.checkpoint import Checkpoint
from decoder.generate import kind_of
from decoder.models import registry
from decoder.ops import quantised
from decoder.sharding import PARAMETERS, OneDevice, Sharding, mesh_for, parse, query_heads
from decoder.types import NONE

LLAMA = {
  "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
  "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
WINDOWED = {**LLAMA, "model_type": "mistral", "sliding_window": 9, "tie_word_embeddings": False}
FAMILIES = {
  "llama": LLAMA,
  "mistral": WINDOWED,
  "mixtral": EXPERTS,
  "t5": {**CONFIGS["t5"], "num_heads": 8},
  "marian": {**CONFIGS["marian"], "encoder_attention_heads": 8, "decoder_attention_heads": 8, "d_model": 64},
}
PRESETS = {
  "tensor": "tensor=8",
  "data": "data=8",
  "tensor+data": "tensor=4,data=2",
  "sequence": "sequence=8",
  "all": "tensor=2,data=2,sequence=2",
  "expert": "expert=8",
  "expert+tensor": "expert=2,tensor=4",
}
SLOW = pytest.mark.slow
DIVIDED = [
  (family, preset) for family in FAMILIES for preset in PRESETS if family == "mixtral" or "expert" not in preset
]
QUICK = {("t5", "sequence"), ("t5", "all"), ("mixtral", "expert"), ("mixtral", "expert+tensor")}
QUICK |= {("llama", preset) for preset in PRESETS} | {("marian", "all")}


def marked(pairs):
  """Those that are not quick, slow."""
  return [pair if pair[:2] in QUICK else pytest.param(*pair, marks=SLOW) for pair in pairs]


ROWS, CAPACITY = 8, 64


@dataclasses.dataclass(frozen=True)
class Small:
  """A layout with blocks of two slots, so that small caches have many."""

  layout: object

  def allocate(self, batch, capacity):
    return self.layout.allocate(batch, capacity, 2)


def placement(config, mesh, devices=None):
  devices = jax.devices("cpu")[:8] if devices is None else devices
  spec = registry.build(config).cache_spec
  heads = query_heads(registry.parameter_shapes(config), spec)
  return Sharding(mesh_for(parse(mesh, len(devices)), spec, heads, devices))


def values(config, kind=None):
  """Random parameters, on the host."""
  rng = np.random.default_rng(2)

  def value(path, leaf):
    norm = leaf.ndim == 1 and "weight" in jax.tree_util.keystr(path)
    drawn = rng.normal(size=leaf.shape).astype(np.float32) * 0.15
    drawn = 1 + drawn if norm else drawn
    return quantised.quantise(drawn, kind, striped=False) if kind and quantised.fits(leaf.shape) else drawn

  return jax.tree_util.tree_map_with_path(value, registry.parameter_shapes(config))


def put(where, params):
  def one(path, leaf):
    return where.put(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)

  return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, quantised.QTensor))


def logits(where, config, params, steps=12):
  """After a ragged prompt, and after each of some further tokens: [steps, B, V]."""
  network, params = registry.build(config), put(where, params)
  rng = np.random.default_rng(4)
  length_B = np.arange(ROWS, dtype=np.int32) % 5 + 2
  tokens_BT = rng.integers(3, 60, (ROWS, 8 + steps)).astype(np.int32)
  positions_BT = np.arange(8, dtype=np.int32)[None] - 8 + length_B[:, None]

  def begin(params, source):
    cache = allocate(network.cache_spec, ROWS, CAPACITY, layout=Small(where.layout), source=16, codec=Raw())
    return cache if network.encode is None else network.encode(params, *source, cache)

  def step(params, cache, tokens_BT, positions_BT):
    features, cache = network.model.forward(params, tokens_BT, positions_BT, cache)
    return network.model.head(params, features[:, -1]), cache

  source = padded([row[:n].tolist() for row, n in zip(tokens_BT, length_B)])
  source = jax.tree.map(np.asarray, source)
  cache = where.jit(begin).lower(params, source).compile()(params, source)
  out = []
  programs = {}
  for number in range(steps):
    if number:
      block, at = tokens_BT[:, 7 + number : 8 + number], (length_B + number - 1)[:, None]
    else:
      block, at = tokens_BT[:, :8], np.where(positions_BT >= 0, positions_BT, NONE)
    if block.shape not in programs:
      programs[block.shape] = where.jit(step, donate_argnums=1).lower(params, cache, block, at).compile()
    found, cache = programs[block.shape](params, cache, block, at)
    out.append(where.fetch(found))
  return np.stack(out)


@pytest.fixture(scope="module")
def alone():
  """family, kind -> logits on one device, computed once."""
  found = {}

  def of(family, kind=None):
    if (family, kind) not in found:
      found[family, kind] = logits(OneDevice(), FAMILIES[family], values(FAMILIES[family], kind))
    return found[family, kind]

  return of


@pytest.mark.parametrize(("family", "preset"), marked(DIVIDED))
def test_logits_are_those_of_one_device(alone, family, preset):
  config = FAMILIES[family]
  found = logits(placement(config, PRESETS[preset]), config, values(config))
  np.testing.assert_allclose(found, alone(family), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "q8_0", "q4_1"])
def test_quantised_weights_are_divided_alike(alone, kind):
  where = placement(LLAMA, "tensor=2,data=4")
  params = put(where, values(LLAMA, kind))
  down = params["layers_0"]["mlp"]["down"]["weight"]
  assert down.values.sharding.spec[1] == "tensor"
  found = logits(where, LLAMA, values(LLAMA, kind))
  np.testing.assert_allclose(found, alone("llama", kind), rtol=1e-5, atol=1e-5)


def test_partial_softmaxes_must_be_merged(alone, monkeypatch):
  """Negative control: each shard's own result, added up, is no softmax."""
  monkeypatch.setattr(spreads, "_merged", lambda partial: jax.tree.map(lambda x: jax.lax.psum(x, "sequence"), partial))
  found = logits(placement(LLAMA, "sequence=8"), LLAMA, values(LLAMA))
  assert np.abs(found - alone("llama")).max() > 1e-2


def test_shards_hold_equally_much_of_a_text():
  where = placement(LLAMA, "sequence=8")
  layout = where.layout.allocate(1, 256, 4)
  for length in (1, 9, 100, 256):
    held = np.asarray(layout.claim(jnp.arange(length)[None]).positions_BS)[0].reshape(8, -1)
    counts = (held >= 0).sum(axis=1)
    assert counts.sum() == length
    assert counts.max() - counts.min() <= 4
    assert sorted(held[held >= 0]) == list(range(length))


def test_a_larger_cache_takes_in_a_smaller_one():
  where = placement(LLAMA, "sequence=4,data=2")
  network = registry.build(LLAMA)
  rng = np.random.default_rng(0)

  def filled(layout):
    small, large = (allocate(network.cache_spec, 2, size, layout=Small(layout)) for size in (16, 64))
    positions = jnp.arange(13)[None].repeat(2, 0)
    small = small.claim(positions)
    k, v = (jnp.asarray(rng.normal(size=(2, 13, 4, 8)), jnp.float32) for _ in "kv")
    small = small.with_layer(0, small.layer(0).append(positions, k, v))
    return large.insert(jnp.arange(2), small), k

  with jax.set_mesh(where.mesh):
    cache, k = jax.jit(lambda: filled(where.layout))()
  at = np.asarray(cache.layouts["global"].positions_BS)
  kept = np.asarray(cache.layers[0]["k"])
  for slot in np.flatnonzero(at[0] >= 0):
    np.testing.assert_array_equal(kept[0, :, slot], np.asarray(k)[0, at[0, slot]])
  assert sorted(at[0][at[0] >= 0]) == list(range(13))


PROMPTS = [[5, 6, 7, 8, 9], [12, 40, 12], [33] * 20]


def facade(config, where, params):
  lm = kind_of(config)(
    Checkpoint("tiny", config, {}, Letters.build(), put(where, params), Path(), where), jnp.dtype("float32")
  )
  return lm


WAYS = {
  "greedy": {},
  "sampled": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3},
  "beams": {"num_beams": 3},
  "lookup": {"speculate": "lookup"},
  "penalised": {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 5, "logprobs": 2},
  "guided": {"guidance_scale": 1.5},
  "chosen": {"choice": ["ABBA", "BEAD", "CAFE"]},
}


def texts(lm, way):
  asked = {"max_new_tokens": 10, "ignore_eos": "choice" not in WAYS[way], **WAYS[way]}
  return [result.token_ids for result in lm.generate(PROMPTS, **asked)]


@pytest.fixture(scope="module")
def one_device():
  """family -> the façade on one device."""
  found = {}

  def of(family):
    if family not in found:
      found[family] = facade(FAMILIES[family], OneDevice(), values(FAMILIES[family]))
    return found[family]

  return of


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_texts_are_those_of_one_device(one_device, meshed, way):
  assert texts(meshed("llama", "all"), way) == texts(one_device("llama"), way)


@pytest.fixture(scope="module")
def meshed():
  """family, preset -> the façade over that mesh."""
  found = {}

  def of(family, preset):
    if (family, preset) not in found:
      config = FAMILIES[family]
      found[family, preset] = facade(config, placement(config, PRESETS[preset]), values(config))
    return found[family, preset]

  return of


SEQ2SEQ = ("greedy", "sampled", "beams", "penalised")


@SLOW
@pytest.mark.parametrize(
  ("family", "preset", "way"),
  [(*pair, way) for pair in DIVIDED for way in WAYS if pair[0] == "llama" or way in SEQ2SEQ],
)
def test_texts_of_every_family_are_those_of_one_device(one_device, meshed, family, preset, way):
  assert texts(meshed(family, preset), way) == texts(one_device(family), way)


@pytest.mark.slow
def test_a_long_text_divided_along_the_sequence():
  """64k tokens on eight shards, read in chunks, against one device."""
  heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 32}
  config = {**LLAMA, **heads, "num_hidden_layers": 1, "max_position_embeddings": 1 << 17}
  network, params = registry.build(config), values(config)
  length, chunk = 1 << 16, 2048
  tokens_1T = np.random.default_rng(0).integers(0, 64, (1, length)).astype(np.int32)

  def told(where):
    """The logits after each chunk."""
    placed = put(where, params)

    def step(params, cache, tokens_BT, start):
      positions_BT = start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
      features, cache = network.model.forward(params, tokens_BT, positions_BT, cache)
      return network.model.head(params, features[:, -1]), cache

    empty = where.jit(lambda: allocate(network.cache_spec, 1, length, layout=where.layout)).lower().compile()
    cache, program, found = empty(), None, []
    for start in range(0, length, chunk):
      arguments = (placed, cache, tokens_1T[:, start : start + chunk], np.int32(start))
      program = program or where.jit(step, donate_argnums=1).lower(*arguments).compile()
      logits, cache = jax.block_until_ready(program(*arguments))  # queued calls of 8 devices starve on few cores
      found.append(where.fetch(logits))
    return np.stack(found)

  np.testing.assert_allclose(told(placement(config, "sequence=8")), told(OneDevice()), rtol=1e-5, atol=1e-5)


def test_where_things_lie():
  where = placement(LLAMA, "tensor=8")
  assert dict(where.mesh.shape) == {"data": 1, "expert": 1, "sequence": 1, "tensor": 4, "group": 2}
  shapes = registry.parameter_shapes(LLAMA)
  specs = where.specs(shapes, PARAMETERS)["layers_0"]
  both = ("tensor", "group")
  assert specs["attention"]["q"]["weight"] == PartitionSpec(both, None)
  assert specs["attention"]["k"]["weight"] == PartitionSpec(("tensor",), None)
  assert specs["attention"]["o"]["weight"] == PartitionSpec(None, both)
  assert specs["mlp"]["down"]["weight"] == PartitionSpec(None, both)
  assert specs["mlp_norm"]["weight"] == PartitionSpec(None)
  spec = registry.build(LLAMA).cache_spec
  cache = jax.eval_shape(lambda: allocate(spec, 8, 64))
  mixed = placement(LLAMA, "tensor=2,data=2,sequence=2")
  assert mixed.specs(cache).layers[0]["k"] == PartitionSpec(("data",), ("tensor",), ("sequence",), None)
  assert mixed.specs({"state": cache})["state"].layouts["global"].positions_BS == PartitionSpec(
    ("data",), ("sequence",)
  )


def test_what_does_not_divide_is_held_whole_and_told():
  config = {**LLAMA, "vocab_size": 63}
  where = placement(config, "tensor=4,data=2")
  shapes = registry.parameter_shapes(config)
  (note,) = where.notes(shapes, PARAMETERS)
  assert "embed/weight: vocab of 63" in note
  assert where.specs(shapes, PARAMETERS)["embed"]["weight"] == PartitionSpec(None, None)
  assert not placement(LLAMA, "tensor=4,data=2").notes(registry.parameter_shapes(LLAMA), PARAMETERS)


def test_each_device_reads_its_part_only():
  """Of a mapped file nothing else is touched."""

  class Mapped(np.ndarray):
    def __getitem__(self, index):
      part = super().__getitem__(index)
      read.append(part.size)
      return np.asarray(part)

  read = []
  where = placement(LLAMA, "tensor=4,data=2")
  weight = np.arange(96 * 64, dtype=np.float32).reshape(96, 64).view(Mapped)
  placed = where.put("layers_0/mlp/gate/weight", weight)
  np.testing.assert_array_equal(np.asarray(placed), np.asarray(weight))
  assert max(read) == weight.size // 4
  read.clear()
  where.put("layers_0/mlp_norm/weight", np.ones(64, np.float32).view(Mapped))
  assert max(read) == 64


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("tensor=3", "asks for 3 devices, and there are 8"),
    ("tensor,data", "there are 8"),
    ("tensor=2,tensor=4", "a mesh is written as"),
    ("heads=8", "a mesh is written as"),
    ("tensor=0", "a mesh is written as"),
    ("", "asks for 1 devices"),
    ("pipeline=8", "pipeline is not offered"),
  ],
)
def test_what_is_no_mesh_is_refused(text, said):
  with pytest.raises(ValueError, match=said):
    parse(text, 8)


def test_a_size_left_out_takes_the_rest():
  assert parse("data=2, tensor", 8) == {"data": 2, "tensor": 4}
  assert parse("tensor+data=4", 8) == {"tensor": 2, "data": 4}


def test_heads_that_do_not_divide_are_refused():
  config = {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
  with pytest.raises(ValueError, match=r"tensor=8 does not divide 12 heads; use one of 1, 2, 3, 4, 6"):
    placement(config, "tensor=8")


def test_batches_fill_the_data_axis(meshed):
  lm = meshed("llama", "all")
  programs = lm.programs([lm.request([1, 2, 3]).settings])
  assert [programs.rows(n) for n in (1, 2, 3, 5)] == [2, 2, 4, 8]
