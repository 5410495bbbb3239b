"""Weights held in few bits: what is loaded is what the file holds, and the model is the one of the floats it means."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import byte_model

import decoder
from decoder.cache import allocate
from decoder.checkpoint import CheckpointError, convert, load, open_source, verify
from decoder.checkpoint.mapping import flatten, unflatten
from decoder.models import registry
from decoder.ops import quantised
from decoder.ops.kernels import build
from decoder.types import QTensor

KEPT = ("Q8_0", "Q4_0", "Q4_1")


@pytest.fixture(params=[False, True], ids=["by_rows", "striped"])
def striped(request, monkeypatch):
  if request.param and not build.ready():
    pytest.skip("no C++ compiler built the CPU kernels here")
  monkeypatch.setattr(build, "ready", lambda: request.param)
  return request.param


def small(tiny, config):
  """Tensors whose logits are a few units, as those of real models are."""
  return {name: w if w.ndim == 1 else w / 12 for name, w in tiny.tensors(config).items()}


def meaning(params):
  return {
    path: np.asarray(quantised.dequantise(leaf) if isinstance(leaf, QTensor) else leaf)
    for path, leaf in flatten(params).items()
  }


def reader(config, tokens=48):
  """Logits of random ids as a function of the parameters."""
  network = registry.build(config)
  ids = jax.random.randint(jax.random.key(0), (1, tokens), 0, 96)

  @jax.jit
  def read(params):
    cache = allocate(network.cache_spec, 1, tokens)
    features, _ = network.model.forward(params, ids, jnp.arange(tokens)[None], cache)
    return network.model.head(params, features[0])

  return read


@pytest.mark.parametrize("kind", KEPT)
def test_keep_is_the_librarys_dequantisation_bit_for_bit(tiny, tmp_path, kind, striped):
  config = tiny.config()
  tensors = tiny.tensors(config)
  params = load(tiny.gguf(tmp_path / "m.gguf", config, tensors, kind), "float32", weights="keep").params
  as_gguf, ours = gguf.GGMLQuantizationType[kind], meaning(params)
  for path, name in (("layers_1/attention/q", "model.layers.1.self_attn.q_proj"), ("head", "lm_head"),
                     ("layers_0/attention/k", "model.layers.0.self_attn.k_proj"), ("embed", "model.embed_tokens"),
                     ("layers_0/mlp/down", "model.layers.0.mlp.down_proj")):  # fmt: skip
    leaf = flatten(params)[f"{path}/weight"]
    assert (leaf.kind, leaf.striped) == (kind.lower(), striped)
    wanted = gguf.dequantize(gguf.quantize(tensors[f"{name}.weight"], as_gguf), as_gguf)
    np.testing.assert_array_equal(ours[f"{path}/weight"], wanted)
  assert params["norm"]["weight"].dtype == jnp.float32


def test_without_unpermuting_the_blocks_q_is_another(tiny, tmp_path, monkeypatch):
  """Negative control of the test above."""
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), "Q4_1")
  right = meaning(load(file, "float32").params)
  monkeypatch.setattr("decoder.checkpoint.gguf.unpermute", lambda rows, heads: rows)
  wrong = meaning(load(file, "float32", weights="keep").params)
  differ = {path.split("/")[-2] for path in right if (right[path] != wrong[path]).any()}
  assert differ == {"q", "k"}


@pytest.mark.parametrize("kind", ["F16", "Q5_0"])
def test_keep_leaves_other_types_floats(tiny, tmp_path, kind):
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), kind)
  kept, floats = load(file, "float32", weights="keep").params, load(file, "float32").params
  jax.tree.map(np.testing.assert_array_equal, kept, floats)


@pytest.mark.parametrize(("kind", "tied"), [("Q8_0", False), ("Q4_0", False), ("Q4_1", False), ("Q4_1", True)])
def test_logits_of_kept_blocks_are_those_of_their_floats(tiny, tmp_path, kind, tied, striped):
  config = tiny.config(tie_word_embeddings=tied)
  file = tiny.gguf(tmp_path / "m.gguf", config, small(tiny, config), kind)
  read = reader(config)
  floats = read(load(file, "float32").params)
  kept = load(file, "float32", weights="keep").params
  np.testing.assert_allclose(read(kept), floats, rtol=0, atol=2e-2)
  scales = kept["layers_1"]["mlp"]["up"]["weight"].scales
  kept["layers_1"]["mlp"]["up"]["weight"] = kept["layers_1"]["mlp"]["up"]["weight"].replace(scales=scales[::-1])
  assert np.abs(read(kept) - floats).max() > 0.1  # negative control


@pytest.mark.parametrize("kind", quantised.KINDS)
def test_rounding_on_load_is_rounding_of_the_floats(tiny, tmp_path, kind, striped):
  config = tiny.config(model_type="qwen2")  # has biases
  directory = tiny.huggingface(tmp_path / "hf", config)
  floats, rounded = flatten(load(directory, "float32").params), flatten(load(directory, weights=kind).params)
  for path, leaf in rounded.items():
    if floats[path].ndim == 1:
      np.testing.assert_array_equal(leaf, floats[path])
    else:
      held = "q8_0" if path in ("embed/weight", "head/weight") and kind.startswith("q4") else kind
      wanted = quantised.quantise(np.asarray(floats[path]), held, striped=striped)
      jax.tree.map(np.testing.assert_array_equal, leaf, wanted)


def test_blocks_of_the_kind_asked_for_are_not_rounded_again(tiny, tmp_path):
  """A file may hold blocks that no rounding makes, here 9 − 8 everywhere with scale 1."""
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), "Q4_0")
  data = file.read_bytes()
  tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "token_embd.weight")
  start = int(tensor.data_offset)
  file.write_bytes(data[:start] + b"\x00\x3c" + b"\x99" * 16 + data[start + 18 :])
  kept, asked = (load(file, "float32", weights=weights).params for weights in ("keep", "q4_0"))
  jax.tree.map(np.testing.assert_array_equal, kept, asked)
  np.testing.assert_array_equal(meaning(asked)["embed/weight"][0, :32], 1.0)
  again = quantised.quantise(open_source(file).tensors["embed/weight"].read(), "q4_0", striped=False)
  assert np.asarray(again.scales)[0, 0] != 1.0  # negative control


def test_a_width_without_whole_groups_stays_float(tmp_path):
  params = flatten(load(byte_model(tmp_path), "float32", weights="q8_0").params)
  assert [path for path, leaf in params.items() if isinstance(leaf, QTensor)] == ["layers_0/mlp/down/weight"]


def test_unknown_weights_are_refused_before_anything_is_read(tmp_path):
  with pytest.raises(CheckpointError, match=r"unknown weights 'q9'.*keep, int8, q8_0, q4_0, q4_1"):
    load(tmp_path / "missing", weights="q9")
  with pytest.raises(CheckpointError, match="unknown weights 'float'"):
    decoder.load(tmp_path, weights="float")


def test_a_quantised_weight_of_another_shape_is_refused(tiny, tmp_path):
  config = tiny.config()
  params = load(tiny.huggingface(tmp_path / "hf", config), "float32", weights="q8_0").params
  leaves = flatten(params)
  leaves["layers_0/mlp/up/weight"] = leaves["layers_0/mlp/down/weight"]
  with pytest.raises(Exception, match="weight"):
    reader(config)(unflatten(leaves))


@pytest.mark.parametrize("weights", ["keep", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_batch_of_quantised_rows_is_each_row_alone(tiny, tmp_path, weights, striped):
  """And its greedy tokens are those of the floats that the bits mean, as far as these are decided."""
  config = tiny.config(tie_word_embeddings=True)
  lm = decoder.load(tiny.gguf(tmp_path / "m.gguf", config, small(tiny, config), "Q4_1"), weights=weights)
  prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [90, 2, 41]]
  options = dict(max_new_tokens=12, ignore_eos=True)
  together = [result.token_ids for result in lm.generate(prompts, **options)]
  assert together == [lm.generate(prompt, **options).token_ids for prompt in prompts]
  lm.params = unflatten({path: jnp.asarray(leaf) for path, leaf in meaning(lm.params).items()})
  lm._programs.clear()
  floats = [result.token_ids for result in lm.generate(prompts, **options)]
  agree = np.mean([a == b for x, y in zip(together, floats) for a, b in zip(x, y)])
  assert agree > 0.9


@pytest.mark.parametrize("weights", ["keep", *quantised.KINDS])
def test_a_converted_directory_holds_the_same_bits(tiny, tmp_path, weights, striped):
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), "Q4_1")
  out = convert(file, tmp_path / "out", weights=weights)
  verify(out)
  kind = "q4_1" if weights == "keep" else weights
  kinds = "q4_0, q8_0" if weights == "q4_0" else kind  # rounded to 4 bits, the embedding keeps 8
  assert json.loads((out / "manifest.json").read_text())["dtype"] == f"float32, {kinds}"
  wanted = load(file, "float32", weights=weights).params
  for how in ("keep", kind):
    jax.tree.map(np.testing.assert_array_equal, load(out, "float32", weights=how).params, wanted)
  jax.tree.map(np.testing.assert_array_equal, flatten(load(out, "float32").params), meaning(wanted))
  again = convert(out, tmp_path / "again", weights="keep")
  jax.tree.map(np.testing.assert_array_equal, load(again, "float32", weights="keep").params, wanted)


def test_parts_are_mapped_and_a_flipped_bit_of_one_is_found(tiny, tmp_path, monkeypatch):
  config = tiny.config()
  tensors = tiny.tensors(config)
  tensors["model.layers.0.mlp.up_proj.weight"][:] = 0  # Orbax might leave out what is zero everywhere
  out = convert(tiny.huggingface(tmp_path / "hf", config, tensors), tmp_path / "out", weights="q4_1")
  monkeypatch.setattr("decoder.checkpoint.orbax._restore", None)  # would be called for what cannot be mapped
  params = load(out, "float32", weights="keep").params
  assert not meaning(params)["layers_0/mlp/up/weight"].any()
  file = next(file for file in (out / "weights").rglob("0.0.0") if "down.weight.scales" in file.parent.name)
  data = bytearray(file.read_bytes())
  data[100] ^= 1
  file.write_bytes(data)
  with pytest.raises(CheckpointError, match=r"down/weight/scales is damaged"):
    verify(out)


@pytest.mark.parametrize("change", [{"kind": "q9"}, {"parts": {}}, {"parts": None}, {"kind": "q4_0"}])
def test_a_manifest_of_impossible_parts_is_refused(tiny, tmp_path, change):
  out = convert(tiny.huggingface(tmp_path / "hf", tiny.config()), tmp_path / "out", weights="q4_1")
  manifest = json.loads((out / "manifest.json").read_text())
  manifest["tensors"]["layers_0/mlp/up/weight"] |= change
  (out / "manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(CheckpointError, match=r"unknown kind|lists no tensors"):
    load(out, "float32", weights="keep")
