"""Encoder–decoders that transformers makes and runs, loaded and run by us: features, logits, greedy and beam texts.

Skipped without the extra `parity`. Tiny random models of each family; rows of unlike lengths together in one batch,
against transformers' single runs.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity.beam_test import NEW, check, combination

import decoder
from decoder.cache import allocate
from decoder.checkpoint import CheckpointError
from decoder.checkpoint.mapping import flatten
from decoder.models import registry
from decoder.models.t5 import bucket_of_distances

torch = pytest.importorskip("torch", reason="the live comparison needs the extra 'parity'")
transformers = pytest.importorskip("transformers", reason="the live comparison needs the extra 'parity'")

V, WRITTEN, READ_AT_ONCE, TOLERANCE = 199, 40, 16, 1e-4
LENGTHS = (50, 23)
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)

T5 = {
  "vocab_size": V, "d_model": 96, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4,
  "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
BART = {
  "vocab_size": V, "d_model": 96, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 6,
  "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 128, "max_position_embeddings": 128,
  "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip
MARIAN = {**BART, "pad_token_id": 0, "decoder_start_token_id": 0, "activation_function": "swish"}
CASES = {
  "t5": ("T5", T5),
  "flan-t5": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
  "mt5": ("MT5", {**T5, "num_decoder_layers": 1}),
  "bart": ("Bart", {**BART, "scale_embedding": False}),
  "marian": ("Marian", {**MARIAN, "scale_embedding": True}),
  "nllb": ("M2M100", {**BART, "scale_embedding": True, "forced_bos_token_id": 11}),
}
NAMES = {"Marian": "MarianMTModel"}


def make(name):
  """A lively random model of transformers: weights large enough that texts differ."""
  kind, fields = CASES[name]
  forced = fields.get("forced_bos_token_id")
  fields = {field: value for field, value in fields.items() if field != "forced_bos_token_id"}
  torch.manual_seed(0)
  config = getattr(transformers, f"{kind}Config")(**fields)
  model = getattr(transformers, NAMES.get(kind, f"{kind}ForConditionalGeneration"))(config).eval()
  with torch.no_grad():
    for path, weight in model.named_parameters():
      if weight.requires_grad:
        weight.add_(torch.randn_like(weight) * 0.1) if weight.ndim == 1 else weight.normal_(0, 0.15)
      if kind.endswith("T5") and path.endswith(".q.weight"):
        weight.mul_(0.25)  # T5 does not divide its scores by √16
    if name == "t5":
      model.shared.weight.mul_(4)  # its head divides by √96
    if hasattr(model, "final_logits_bias"):
      model.final_logits_bias.normal_()
  if name == "flan-t5":
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.15)
  model.generation_config.forced_bos_token_id = forced
  model.generation_config.forced_eos_token_id = None
  return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  @functools.cache
  def load(name):
    model, directory = make(name), tmp_path_factory.mktemp("seq2seq") / "model"
    model.save_pretrained(directory)
    return model, decoder.load(directory, dtype="float32"), directory

  return load


def texts(lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(4, V, length).tolist() for length in lengths]


def padded(rows):
  tokens, positions = (np.full((len(rows), 64), value, np.int32) for value in (0, -1))
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
  return jnp.asarray(tokens), jnp.asarray(positions)


@pytest.mark.parametrize("name", CASES)
def test_features_and_logits(pair, name):
  model, lm, _ = pair(name)
  sources, written = texts(LENGTHS), np.array(texts([WRITTEN] * len(LENGTHS), seed=1), np.int32)
  tokens_BS, positions_BS = padded(sources)
  module = registry._module(lm.config, jnp.float32)
  features_BSD = module.apply({"params": lm.params}, tokens_BS, positions_BS, method=type(module).read)
  cache = allocate(lm.network.cache_spec, len(LENGTHS), 64, source=64)
  cache = jax.jit(lm.network.encode)(lm.params, tokens_BS, positions_BS, cache)
  forward, parts = jax.jit(lm.network.model.forward), []
  starts = [*range(0, 32, READ_AT_ONCE), *range(32, WRITTEN)]
  for start, end in zip(starts, [*starts[1:], WRITTEN]):
    at_BT = jnp.broadcast_to(jnp.arange(start, end), (len(LENGTHS), end - start))
    features_BTD, cache = forward(lm.params, jnp.asarray(written[:, start:end]), at_BT, cache)
    parts.append(features_BTD)
  read_BTD = jnp.concatenate(parts, axis=1)
  logits_RV = lm.network.model.head(lm.params, read_BTD.reshape(-1, read_BTD.shape[-1]))
  logits_BTV = np.asarray(logits_RV).reshape(len(LENGTHS), WRITTEN, V)
  for row, source in enumerate(sources):
    with torch.no_grad():
      out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor(written[row : row + 1]).long())
    theirs = out.encoder_last_hidden_state[0].numpy()
    assert np.abs(out.logits[0].numpy()).max() > 1, "logits that could tell a difference"
    np.testing.assert_allclose(features_BSD[row, : len(source)], theirs, atol=TOLERANCE)
    np.testing.assert_allclose(logits_BTV[row], out.logits[0].numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_greedy_texts_of_a_batch(pair, name):
  model, lm, _ = pair(name)
  sources = texts((3, 30, 17), seed=2)
  results = lm.generate(sources, max_new_tokens=NEW, ignore_eos=True)
  for source, result in zip(sources, results):
    ids = torch.tensor([source])
    asked = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, use_cache=False)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=1, eos_token_id=V + 1, **asked)
    assert list(result.token_ids) == want[0, 1:].tolist()
    assert result.prompt_ids == tuple(source)


def check_beams(pair, name, beams, seeds):
  """Without transformers' cache, which fails for stacks of unlike depth; a text starts after the start token."""
  model, lm, _ = pair(name)
  check(model, lm, [combination(seed, beams, 4, PENALTIES) for seed in seeds], begin=1, use_cache=False)


@pytest.mark.parametrize("name", CASES)
def test_the_same_hypotheses(pair, name):
  check_beams(pair, name, 4, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("beams", [2, 3, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_same_hypotheses_of_other_numbers_of_beams(pair, name, beams):
  check_beams(pair, name, beams, range(8))


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (64, 256), (16, 50)])
def test_buckets_of_distances(buckets, farthest, both_ways):
  layer = transformers.models.t5.modeling_t5.T5Attention
  distances = torch.arange(-farthest, farthest + 1)
  want = layer._relative_position_bucket(distances, both_ways, buckets, farthest)
  np.testing.assert_array_equal(bucket_of_distances(buckets, farthest, both_ways), want.numpy())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["t5", "marian"])
def test_files_of_pytorch_give_the_same_weights(pair, name, zipped, tmp_path):
  model, lm, directory = pair(name)
  (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
  torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
  other = decoder.load(tmp_path, dtype="float32")
  jax.tree.map(np.testing.assert_array_equal, flatten(other.params), flatten(lm.params))


def test_views_and_types_of_pytorch_tensors(tmp_path):
  from decoder.checkpoint.torchfile import read_torch

  whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
  tensors = {
    "turned": whole.T, "part": whole[1:, 2:4], "half": whole.half(), "bf16": whole.bfloat16(), "long": whole.long(),
    "one": torch.tensor(3.0), "none": torch.zeros(0, 5), "parameter": torch.nn.Parameter(whole),
  }  # fmt: skip
  for zipped in (True, False):
    torch.save(tensors, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    read = read_torch(tmp_path / "x.bin")
    for name, tensor in tensors.items():
      assert read[name].shape == tuple(tensor.shape)
      np.testing.assert_array_equal(read[name].read().astype(np.float64), tensor.detach().double().numpy())


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_pytorch_that_wants_more_is_refused_and_nothing_runs(tmp_path, zipped):
  from decoder.checkpoint.torchfile import read_torch

  class Harm:
    def __reduce__(self):
      return open, (str(tmp_path / "harm"), "w")

  torch.save({"x": torch.zeros(2), "y": Harm()}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
  with pytest.raises(CheckpointError, match=r"wants more than tensors.*io\.open"):
    read_torch(tmp_path / "x.bin")
  assert not (tmp_path / "harm").exists()
  with pytest.raises(pickle.UnpicklingError):  # as PyTorch itself says
    torch.load(tmp_path / "x.bin", weights_only=True)
