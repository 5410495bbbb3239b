"""Hugging Face directories: read as they are, refused when they are not whole."""

import json

import ml_dtypes
import numpy as np
import pytest

from decoder.checkpoint import CheckpointError, load, open_source
from decoder.checkpoint.mapping import flatten
from decoder.checkpoint.source import expected_shapes


def test_every_tensor_lands_in_its_place_unchanged(tiny, tmp_path):
  config = tiny.config()
  tensors = tiny.tensors(config)
  params = load(tiny.huggingface(tmp_path / "m", config, tensors), "float32").params
  pairs = {
    "model.embed_tokens.weight": params["embed"]["weight"],
    "model.layers.1.self_attn.k_proj.weight": params["layers_1"]["attention"]["k"]["weight"],
    "model.layers.0.self_attn.o_proj.weight": params["layers_0"]["attention"]["o"]["weight"],
    "model.layers.0.input_layernorm.weight": params["layers_0"]["attention_norm"]["weight"],
    "model.layers.1.post_attention_layernorm.weight": params["layers_1"]["mlp_norm"]["weight"],
    "model.layers.1.mlp.down_proj.weight": params["layers_1"]["mlp"]["down"]["weight"],
    "model.norm.weight": params["norm"]["weight"],
    "lm_head.weight": params["head"]["weight"],
  }
  for name, found in pairs.items():
    np.testing.assert_array_equal(found, tensors[name])
  shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
  assert shapes == expected_shapes(config)


def test_shards_are_the_single_file(tiny, tmp_path):
  config = tiny.config()
  single = flatten(load(tiny.huggingface(tmp_path / "one", config), "float32").params)
  sharded = flatten(load(tiny.huggingface(tmp_path / "three", config, shards=3), "float32").params)
  assert single.keys() == sharded.keys()
  for path, value in single.items():
    np.testing.assert_array_equal(value, sharded[path])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtypes_are_cast_once(tiny, tmp_path, stored, wanted):
  config = tiny.config()
  tensors = tiny.tensors(config, stored)
  found = load(tiny.huggingface(tmp_path / "m", config, tensors), wanted).params["norm"]["weight"]
  assert found.dtype == wanted
  np.testing.assert_array_equal(found, tensors["model.norm.weight"].astype(wanted))


def test_opening_reads_no_weights(tiny, tmp_path):
  config = tiny.config()
  source = open_source(tiny.huggingface(tmp_path / "m", config))
  tensor = source.tensors["embed/weight"]
  assert (tensor.shape, tensor.dtype) == ((96, 256), np.float32)
  assert not tensor.read().flags.writeable  # a map of the file, not a copy


def test_parameters_outlive_their_files(tiny, tmp_path):
  """A map of a truncated file would kill the process; control: what the source hands out is such a map."""
  config = tiny.config()
  tensors = tiny.tensors(config)
  directory = tiny.huggingface(tmp_path / "m", config, tensors)
  assert isinstance(open_source(directory).tensors["embed/weight"].read().base, np.memmap)
  params = load(directory, "float32").params
  (directory / "model.safetensors").write_bytes(b"")
  np.testing.assert_array_equal(params["embed"]["weight"], tensors["model.embed_tokens.weight"])
  assert all(np.isfinite(leaf).all() for leaf in flatten(params).values())


def test_generation_config_and_c118_rope_scaling_pass_through(tiny, tmp_path):
  """C118: both spellings of rope scaling reach the model as they are written."""
  scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  scaling["original_max_position_embeddings"] = 8192
  for key in ("rope_scaling", "rope_parameters"):
    config = tiny.config()
    config[key] = scaling | ({"rope_theta": 5e5} if key == "rope_parameters" else {})
    directory = tiny.huggingface(tmp_path / key, config)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    loaded = load(directory, "float32")
    assert loaded.config == config
    assert loaded.generation == {"eos_token_id": [2, 3]}
    assert loaded.tokenizer is None


def test_a_tied_head_and_rotary_buffers_are_left_out(tiny, tmp_path):
  config = tiny.config(tie_word_embeddings=True)
  tensors = tiny.tensors(tiny.config())
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
  assert "head" not in load(tiny.huggingface(tmp_path / "m", config, tensors), "float32").params


def test_a_bare_decoder_lacks_the_prefix(tiny, tmp_path):
  config = tiny.config(tie_word_embeddings=True)
  tensors = {name.removeprefix("model."): value for name, value in tiny.tensors(config).items()}
  assert load(tiny.huggingface(tmp_path / "m", config, tensors), "float32").params["norm"]["weight"].shape == (256,)


def _without(name):
  return lambda directory, tensors: tensors.pop(name)


def _with(name, shape):
  return lambda directory, tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_without("lm_head.weight"), r"tie_word_embeddings = false.*lm_head\.weight"),
    (_without("model.layers.1.mlp.up_proj.weight"), r"1 of 21 tensors are missing.*layers_1/mlp/up/weight"),
    (_with("model.norm.weight", (255,)), r"norm/weight does not fit the config: wanted \[256\], got \[255\]"),
    (_with("model.layers.2.input_layernorm.weight", (256,)), r"not part of a llama.*layers_2/attention_norm"),
    (_with("model.layers.0.self_attn.q_proj.bias", (256,)), r"not part of a llama.*attention/q/bias"),
    (_with("model.layers.0.mlp.experts.3.w1.weight", (4, 4)), r"experts\.3\.w1\.weight has no place in a llama"),
  ],
)
def test_tensors_that_do_not_fit_the_config(tiny, tmp_path, change, message):
  config = tiny.config()
  tensors = tiny.tensors(config)
  change(tmp_path, tensors)
  directory = tiny.huggingface(tmp_path / "m", config, tensors)
  with pytest.raises(CheckpointError, match=message):
    load(directory, "float32")


def _cut(name, size):
  def change(directory):
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[:size])

  return change


def _write(name, content):
  return lambda directory: (directory / name).write_bytes(content)


def _reindex(directory):
  file = directory / "model.safetensors.index.json"
  index = json.loads(file.read_text())
  names = sorted(set(index["weight_map"].values()))
  index["weight_map"]["model.norm.weight"] = next(n for n in names if n != index["weight_map"]["model.norm.weight"])
  file.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_cut(SHARD, -1), "is truncated.*fetch it again"),
    (_cut(SHARD, 100), "no whole safetensors file"),
    (_cut(SHARD, 3), "no whole safetensors file"),
    (_write(SHARD, b"\x10" + bytes(7) + b"{not json at all" + bytes(64)), "damaged header"),
    (_write(SHARD, b"\x02" + bytes(7) + b"[]" + bytes(64)), "damaged header"),
    (lambda directory: (directory / SHARD).unlink(), f"1 of 3 weight files are missing.*{SHARD}"),
    (_reindex, r"index and the files disagree.*model\.norm\.weight"),
    (_write("model.safetensors.index.json", b'{"metadata": {}}'), "no weight_map"),
    (_write("config.json", b'{"model_type": "llama",'), r"config\.json as JSON"),
    (_write("config.json", b"[1]"), "not a JSON object"),
    (_write("config.json", b"{}"), "names no model_type"),
    (_write("config.json", b'{"model_type": "mamba"}'), "unknown architecture 'mamba'.*llama, m2m_100, .*qwen2"),
    (_write("config.json", b'{"model_type": "llama"}'), "config|hidden_size"),
  ],
)
def test_damaged_directories(tiny, tmp_path, change, message):
  directory = tiny.huggingface(tmp_path / "m", tiny.config(), shards=3)
  load(directory, "float32")  # the control: whole, it loads
  change(directory)
  with pytest.raises(ValueError, match=message):
    load(directory, "float32")


def test_directories_without_a_model(tmp_path):
  with pytest.raises(CheckpointError, match="an empty directory"):
    load(tmp_path)
  (tmp_path / "a.gguf").touch()
  with pytest.raises(CheckpointError, match=r"name the file itself.*a\.gguf"):
    load(tmp_path)
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  (tmp_path / "weights.pt").touch()
  with pytest.raises(CheckpointError, match=r"weights\.pt; save it with"):
    load(tmp_path)
  (tmp_path / "model.safetensors").touch()
  with pytest.raises(CheckpointError, match=r"name .* instead"):
    load(tmp_path / "model.safetensors")
  with pytest.raises(CheckpointError, match="does not exist"):
    load(tmp_path / "nothing")
