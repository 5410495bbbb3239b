"""Mixtures of experts: their tensors, published one by one or stacked in three dimensions, become one of two."""

import gguf
import jax
import numpy as np
import pytest

from decoder.checkpoint import CheckpointError, convert, load, open_source, verify
from decoder.checkpoint.mapping import flatten
from decoder.types import QTensor

E = 3
HF_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


@pytest.fixture
def config(tiny):
  return tiny.config(model_type="mixtral", num_local_experts=E, num_experts_per_tok=2)


@pytest.fixture
def experts(config):
  """By layer and name: of the router [E, D], of the others [E, out, in]."""
  rng, D, F = np.random.default_rng(7), config["hidden_size"], config["intermediate_size"]
  shapes = {"router": (E, D), "gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
  return {
    (layer, name): rng.standard_normal(shape, np.float32)
    for layer in range(config["num_hidden_layers"])
    for name, shape in shapes.items()
  }


@pytest.fixture
def tensors(tiny, config, experts):
  """Everything under its name in a Hugging Face directory."""
  found = tiny.tensors(config)
  for (layer, name), weight in experts.items():
    block = f"model.layers.{layer}.block_sparse_moe"
    if name == "router":
      found[f"{block}.gate.weight"] = weight
    else:
      found |= {f"{block}.experts.{e}.{HF_EXPERT[name]}.weight": part for e, part in enumerate(weight)}
  return found


def in_gguf(tiny, file, config, experts, kind="F32", used=2):
  """As llama.cpp's converter writes it."""
  quantisation = gguf.GGMLQuantizationType[kind]

  def add(writer):
    writer.add_expert_count(E)
    writer.add_expert_used_count(used)
    for (layer, name), weight in experts.items():
      if name == "router":
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", weight)
      else:
        packed = gguf.quantize(weight, quantisation)
        writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", packed, raw_dtype=quantisation)

  return tiny.gguf(file, config, tiny.tensors(config), kind, extra=[add])


def check(params, experts):
  for (layer, name), weight in experts.items():
    node = params[f"layers_{layer}"]["mlp"]
    found = node["router"] if name == "router" else node["experts"][name]
    np.testing.assert_array_equal(found["weight"], weight.reshape(-1, weight.shape[-1]))


@pytest.mark.parametrize("shards", [1, 3])
def test_experts_are_stacked_in_their_order(tiny, tmp_path, config, tensors, experts, shards):
  params = load(tiny.huggingface(tmp_path / "m", config, tensors, shards), "float32").params
  check(params, experts)
  swapped = {key: weight[::-1] for key, weight in experts.items()}
  with pytest.raises(AssertionError):  # negative control
    check(params, swapped)


def test_more_than_ten_experts_are_in_the_order_of_numbers(tiny, tmp_path):
  """And not of letters, in which 10 comes before 2."""
  config = tiny.config(model_type="mixtral", num_local_experts=12, num_hidden_layers=1)
  tensors, block = tiny.tensors(config), "model.layers.0.block_sparse_moe"
  D, F = config["hidden_size"], config["intermediate_size"]
  tensors[f"{block}.gate.weight"] = np.zeros((12, D), np.float32)
  for e in range(12):
    for name, shape in (("w1", (F, D)), ("w3", (F, D)), ("w2", (D, F))):
      tensors[f"{block}.experts.{e}.{name}.weight"] = np.full(shape, e, np.float32)
  down = load(tiny.huggingface(tmp_path / "m", config, tensors), "float32").params["layers_0"]["mlp"]["experts"]["down"]
  np.testing.assert_array_equal(down["weight"], np.repeat(np.arange(12, dtype=np.float32), D)[:, None] + np.zeros(F))


def test_opening_reads_no_experts(tiny, tmp_path, config, tensors):
  directory = tiny.huggingface(tmp_path / "m", config, tensors)
  tensor = open_source(directory).tensors["layers_1/mlp/experts/down/weight"]
  assert (tensor.shape, tensor.dtype) == ((E * 256, 512), np.float32)


def _without(*names):
  return lambda tensors: [tensors.pop(f"model.layers.1.block_sparse_moe.{name}.weight") for name in names]


def _with(name, shape, dtype=np.float32):
  return lambda tensors: tensors.update({f"model.layers.1.block_sparse_moe.{name}.weight": np.zeros(shape, dtype)})


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_without("experts.1.w1"), r"not all parts of layers_1/mlp/experts/gate/weight are there: wanted 0 to 2, got 0, 2"),
    (_without("experts.2.w1"), r"experts/gate/weight does not fit the config: wanted \[1536, 256\], got \[1024, 256\]"),
    (_without("gate"), r"1 of 23 tensors are missing.*layers_1/mlp/router/weight"),
    (_with("experts.3.w2", (256, 512)), r"experts/down/weight does not fit the config: wanted \[768, 512\]"),
    (_with("experts.1.w2", (256, 256)), r"parts of layers_1/mlp/experts/down/weight differ from each other"),
    (_with("experts.1.w2", (256, 512), np.float16), r"parts of layers_1/mlp/experts/down/weight differ"),
    (_with("experts.1.w4", (256, 512)), r"experts\.1\.w4\.weight has no place in a mixtral model"),
  ],
)
def test_experts_that_do_not_fit_the_config(tiny, tmp_path, config, tensors, change, message):
  change(tensors)
  with pytest.raises(CheckpointError, match=message):
    load(tiny.huggingface(tmp_path / "m", config, tensors), "float32")


@pytest.mark.parametrize("weights", [None, "int8", "q4_1"])
def test_a_converted_directory_holds_the_same(tiny, tmp_path, config, tensors, weights):
  directory = tiny.huggingface(tmp_path / "m", config, tensors)
  out = convert(directory, tmp_path / "out", weights=weights)
  verify(out)
  direct = load(directory, "float32", weights=weights).params
  again = load(out, "float32", weights=weights and "keep").params
  jax.tree.map(np.testing.assert_array_equal, again, direct)
  kinds = {path: isinstance(leaf, QTensor) for path, leaf in flatten(direct).items() if "layers_0/mlp/" in path}
  assert kinds.pop("layers_0/mlp/router/weight") is False  # routers stay floats
  assert set(kinds.values()) == {weights is not None}


def test_gguf_holds_what_the_hugging_face_directory_holds(tiny, tmp_path, config, tensors, experts):
  theirs = load(tiny.huggingface(tmp_path / "m", config, tensors), "float32")
  ours = load(in_gguf(tiny, tmp_path / "m.gguf", config, experts), "float32")
  assert {key: ours.config[key] for key in config} == config
  jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_gguf_blocks_of_experts_are_kept(tiny, tmp_path, config, experts, kind):
  file, of = in_gguf(tiny, tmp_path / "m.gguf", config, experts, kind), gguf.GGMLQuantizationType[kind]
  rounded = {
    key: weight if key[1] == "router" else gguf.dequantize(gguf.quantize(weight, of), of)
    for key, weight in experts.items()
  }
  check(load(file, "float32").params, rounded)
  leaf = load(file, "float32", weights="keep").params["layers_1"]["mlp"]["experts"]["down"]["weight"]
  assert (leaf.kind, leaf.shape) == (kind.lower(), (E * 256, 512))


def test_a_gguf_file_that_does_not_say_how_many_are_used_is_refused(tiny, tmp_path, config):
  add = [lambda w: w.add_expert_count(E)]
  with pytest.raises(CheckpointError, match=r"wanted llama\.expert_used_count"):
    open_source(tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), extra=add))
