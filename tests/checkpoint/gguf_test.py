"""GGUF files: what is read back is what was meant."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.checkpoint import CheckpointError, load, open_source
from decoder.checkpoint.gguf import llama3_from_factors, unpermute
from decoder.ops.rope import rope

LLAMA3 = {
  "rope_type": "llama3",
  "factor": 32.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


def test_c117_unpermute_is_the_inverse_for_grouped_heads(tiny):
  """C117: (H, Hkv) = (8, 2); the negative control takes the query heads for k."""
  rows = np.random.default_rng(0).standard_normal((2 * 32, 256), np.float32)
  np.testing.assert_array_equal(unpermute(tiny.permute(rows, 2), 2), rows)
  assert not np.array_equal(unpermute(tiny.permute(rows, 2), 8), rows)
  query = np.random.default_rng(1).standard_normal((8 * 32, 256), np.float32)
  np.testing.assert_array_equal(unpermute(tiny.permute(query, 8), 8), query)


def test_c117_interleaved_and_half_split_rope_give_the_same_logits(tiny):
  """C117: q·k at positions 0..64 of llama.cpp's order, rotated by neighbours, and of ours, rotated by halves."""
  generator = np.random.default_rng(0)
  weights = {name: generator.standard_normal((heads * 32, 256)) / 16 for name, heads in (("q", 8), ("k", 2))}
  stored = {"q": tiny.permute(weights["q"], 8), "k": tiny.permute(weights["k"], 2)}
  x_TD = generator.standard_normal((65, 256))
  angle_Th = np.arange(65)[:, None] * 10000.0 ** -(np.arange(16) / 16)

  def scores(matrices, rotate):
    heads = {name: (x_TD @ w.T).reshape(65, -1, 32) for name, w in matrices.items()}
    q, k = rotate(heads["q"]), np.repeat(rotate(heads["k"]), 4, axis=1)
    return np.einsum("tnh,snh->nts", q, k)

  def turn(a, b):
    cos, sin = np.cos(angle_Th)[:, None], np.sin(angle_Th)[:, None]
    return a * cos - b * sin, b * cos + a * sin

  def neighbours(x):
    return np.stack(turn(x[..., 0::2], x[..., 1::2]), axis=-1).reshape(x.shape)

  def halves(x):
    return np.concatenate(turn(x[..., :16], x[..., 16:]), axis=-1)

  restored = {"q": unpermute(stored["q"], 8), "k": unpermute(stored["k"], 2)}
  np.testing.assert_allclose(scores(restored, halves), scores(stored, neighbours), atol=1e-10)
  wrong = {"q": unpermute(stored["q"], 8), "k": unpermute(stored["k"], 8)}
  assert np.abs(scores(wrong, halves) - scores(stored, neighbours)).max() > 0.1
  assert np.abs(scores(stored, halves) - scores(stored, neighbours)).max() > 0.1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_gguf_file_holds_what_the_hugging_face_directory_holds(tiny, tmp_path, kind):
  config = tiny.config()
  tensors = tiny.tensors(config)
  ours = load(tiny.gguf(tmp_path / "m.gguf", config, tensors, kind), "float32").params
  quantisation = gguf.GGMLQuantizationType[kind]
  for name in ("q", "k", "v", "o"):
    weight = tensors[f"model.layers.1.self_attn.{name}_proj.weight"]
    wanted = gguf.dequantize(gguf.quantize(weight, quantisation), quantisation)
    np.testing.assert_array_equal(ours["layers_1"]["attention"][name]["weight"], wanted)
  np.testing.assert_array_equal(ours["norm"]["weight"], tensors["model.norm.weight"])
  assert ours["head"]["weight"].shape == (96, 256)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0", "MXFP4"])
def test_block_types_that_are_read_only(tiny, tmp_path, kind):
  """Any bytes are a valid block of these types, so random ones do; the library's dequantisation is the reference."""
  quantisation = gguf.GGMLQuantizationType[kind]
  config = tiny.config(tie_word_embeddings=True)
  bytes_ = np.random.default_rng(0).integers(
    0, 60, gguf.quant_shape_to_byte_shape((96, 256), quantisation), dtype=np.uint8
  )
  file = tmp_path / "m.gguf"
  writer = gguf.GGUFWriter(str(file), "llama")
  sizes = {"block_count": 2, "context_length": 64, "embedding_length": 256, "feed_forward_length": 512}
  for key, value in sizes.items():
    writer.add_uint32(f"llama.{key}", value)
  writer.add_head_count(8)
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_tensor("token_embd.weight", bytes_, raw_dtype=quantisation)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  tensor = open_source(file).tensors["embed/weight"]
  assert tensor.shape == (96, 256)
  np.testing.assert_array_equal(tensor.read(), gguf.dequantize(bytes_, quantisation))


def test_dequantisation_in_blocks_changes_nothing(tiny, tmp_path, monkeypatch):
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), "Q8_0")
  whole = open_source(file).tensors["layers_0/mlp/up/weight"].read()
  monkeypatch.setattr("decoder.checkpoint.gguf._BLOCK", 3 * 256)
  np.testing.assert_array_equal(open_source(file).tensors["layers_0/mlp/up/weight"].read(), whole)


def test_metadata_becomes_the_config_that_was_written(tiny, tmp_path):
  config = tiny.config()
  found = open_source(tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config))).config
  assert {key: found[key] for key in config} == config


def test_qwen2_has_biases_and_no_permutation(tiny, tmp_path):
  config = tiny.config(model_type="qwen2", tie_word_embeddings=True)
  tensors = tiny.tensors(config)
  loaded = load(tiny.gguf(tmp_path / "m.gguf", config, tensors, architecture="qwen2"), "float32")
  attention = loaded.params["layers_0"]["attention"]
  np.testing.assert_array_equal(attention["q"]["weight"], tensors["model.layers.0.self_attn.q_proj.weight"])
  np.testing.assert_array_equal(attention["k"]["bias"], tensors["model.layers.0.self_attn.k_proj.bias"])
  assert loaded.config["model_type"] == "qwen2"
  assert "head" not in loaded.params


def test_a_window_makes_a_llama_a_mistral(tiny, tmp_path):
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), extra=[lambda w: w.add_sliding_window(16)])
  found = open_source(file).config
  assert (found["model_type"], found["sliding_window"]) == ("mistral", 16)


@pytest.mark.parametrize(
  ("add", "wanted"),
  [
    (
      [
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        lambda w: w.add_rope_scaling_factor(4.0),
      ],
      {"rope_type": "linear", "factor": 4.0},
    ),
    ([lambda w: w.add_float32("llama.rope.scale_linear", 2.0)], {"rope_type": "linear", "factor": 2.0}),
    ([lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE)], None),
    (
      [
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda w: w.add_rope_scaling_factor(4.0),
        lambda w: w.add_rope_scaling_orig_ctx_len(32),
      ],
      {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
      },
    ),
  ],
)
def test_c118_rope_scaling_of_the_metadata(tiny, tmp_path, add, wanted):
  """C118: scaling that is lost reads well until the context is long."""
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), extra=add)
  assert open_source(file).config["rope_scaling"] == wanted


def test_c118_an_unknown_scaling_is_refused(tiny, tmp_path):
  config = tiny.config()
  add = [lambda w: w.add_string("llama.rope.scaling.type", "spiral")]
  with pytest.raises(CheckpointError, match="spiral"):
    open_source(tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), extra=add))


def test_c118_llama3_factors_are_recognised_in_a_file(tiny, tmp_path):
  config = tiny.config(max_position_embeddings=131072)
  plain_h = rope({"rope_theta": 10000.0}, 32, 131072).inverse_h
  factors = plain_h / rope(LLAMA3 | {"rope_theta": 10000.0}, 32, 131072).inverse_h
  assert factors.max() > 31
  add = [lambda w: w.add_tensor("rope_freqs.weight", factors.astype(np.float32))]
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), extra=add)
  assert open_source(file).config["rope_scaling"] == LLAMA3


def test_c118_other_factors_keep_their_frequencies():
  factors = np.linspace(1.0, 7.0, 16).astype(np.float32)
  scaling = llama3_from_factors(factors, 10000.0, 4096)
  made = rope(scaling | {"rope_theta": 10000.0}, 32, 4096)
  plain_h = rope({"rope_theta": 10000.0}, 32, 4096).inverse_h
  for extent in (5, 4096, 100000):
    np.testing.assert_allclose(made.stretch(jnp.asarray([extent]))[0], plain_h / factors, rtol=1e-6)
  assert made.scale == 1.0


@pytest.mark.parametrize("keep", [3, 4, 20, 200, 900, -100000, -1])
def test_a_truncated_file_is_refused(tiny, tmp_path, keep):
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config))
  file.write_bytes(file.read_bytes()[:keep])
  with pytest.raises(CheckpointError, match=r"m\.gguf.*fetch it again"):
    open_source(file)


def test_a_file_of_something_else_is_refused(tmp_path):
  (tmp_path / "m.gguf").write_text("<html>404</html>" * 100)
  with pytest.raises(CheckpointError, match="not a GGUF file"):
    open_source(tmp_path / "m.gguf")
  (tmp_path / "m.gguf").write_bytes(b"GGUF" + np.random.default_rng(0).bytes(5000))
  with pytest.raises(CheckpointError, match="cannot read"):
    open_source(tmp_path / "m.gguf")


def test_unknown_architectures_are_refused(tiny, tmp_path):
  config = tiny.config()
  with pytest.raises(CheckpointError, match=r"unknown architecture 'mamba'.*llama, qwen2"):
    open_source(tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), architecture="mamba"))
  experts = [lambda w: w.add_expert_count(8)]
  with pytest.raises(CheckpointError, match=r"no Mixtral but qwen2: got 8 experts"):
    open_source(
      tiny.gguf(tmp_path / "e.gguf", config, tiny.tensors(config), extra=experts, architecture="qwen2"),
    )


def test_one_part_of_a_split_model_is_refused(tiny, tmp_path):
  config = tiny.config()
  parts = [lambda w: w.add_uint16("split.count", 3)]
  with pytest.raises(CheckpointError, match="one part of a split model"):
    open_source(tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), extra=parts))
