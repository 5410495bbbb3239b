"""The tiny models of `shared/cases/cases.md`, nothing to download, and the façade around one.

RAND-LM: a random 2-layer transformer, V=64, D=32, float32, in the variants of `VARIANTS`. TABLE-LM: next-token
probabilities by the last token. SCRIPT-LM: a prescribed list of tokens after a prompt of known length.
"""

import functools
import json
import socket
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from decoder.cache import Contiguous, LayerSpec, Raw, allocate
from decoder.checkpoint import Checkpoint
from decoder.generate import LM
from decoder.models import blocks, llama
from decoder.models.llama import Llama, LlamaConfig
from decoder.models.mixtral import MixtralConfig
from decoder.models.registry import Network, as_model, initialise
from decoder.ops.linear import linear
from decoder.sampling import chain, request_key, temperature
from decoder.strategies import init, pending
from decoder.text import tokenizer_from_gguf
from decoder.types import Model

V, D, LAYERS = 64, 32, 2
WINDOW = 8

CONFIG = {
  "model_type": "llama",
  "vocab_size": V,
  "hidden_size": D,
  "intermediate_size": 48,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-5,
}


class Absolute(nn.Module):
  """RAND-LM with learned absolute positions instead of rotary ones."""

  dtype: Any = jnp.float32

  def setup(self):
    self.embed, self.place = blocks.Embedding(V, D), blocks.Embedding(512, D)
    self.attention = [blocks.Attention(i, 4, 4, D // 4, qkv_bias=True, name=f"attention_{i}") for i in range(LAYERS)]
    self.mlp = [blocks.GatedMLP(48, "gelu", name=f"mlp_{i}") for i in range(LAYERS)]
    self.norm = blocks.RMSNorm(1e-5)

  def __call__(self, tokens_BT, positions_BT, cache):
    cache = cache.claim(positions_BT)
    x_BTD = blocks.take_rows(self.embed(), tokens_BT, self.dtype)
    x_BTD = x_BTD + blocks.take_rows(self.place(), jnp.maximum(positions_BT, 0), self.dtype)
    for attention, mlp in zip(self.attention, self.mlp):
      seen_BTD, cache = attention(self.norm(x_BTD), positions_BT, cache)
      x_BTD = x_BTD + seen_BTD
      x_BTD = x_BTD + mlp(self.norm(x_BTD))
    return self.norm(x_BTD).array(), cache

  def head(self, features_BD):
    return linear(features_BD, self.embed())

  def cache_spec(self):
    return tuple(LayerSpec("global", 4, D // 4) for _ in range(LAYERS))


def _llama(**changes):
  return lambda dtype: Llama(LlamaConfig.from_dict({**CONFIG, **changes}), dtype)


VARIANTS = {
  "rope": _llama(),
  "absolute": Absolute,
  "window": _llama(model_type="mistral", sliding_window=WINDOW, num_key_value_heads=2),
  "gqa": _llama(num_key_value_heads=1, tie_word_embeddings=True),
  "mixed": _llama(
    model_type="qwen2", num_key_value_heads=2, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1
  ),
  "dynamic": _llama(rope_scaling={"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8}),
  "experts": lambda dtype: Llama(MixtralConfig.from_dict({**CONFIG, "num_local_experts": 4}), dtype),
}


@functools.cache
def rand_lm(variant: str = "rope", dtype: Any = jnp.float32) -> tuple[Network, Any]:
  """RAND-LM as (network, params). Weights are large enough that its texts are lively."""
  module = VARIANTS[variant](dtype)
  rng = np.random.default_rng(1)

  def values(leaf):
    drawn = rng.normal(size=leaf.shape) * 0.25
    return jnp.asarray(1 + 0.3 * drawn if leaf.ndim < 2 else drawn, dtype)

  params = jax.tree.map(values, jax.eval_shape(lambda key: initialise(module, key), jax.random.key(0)))
  tables = llama.tables if isinstance(module, Llama) else None
  return Network(as_model(module), module.cache_spec(), V, 256, dtype, tables=tables), params


def table_lm(table_VV: Any, context: int = 256) -> tuple[Network, Any]:
  """TABLE-LM: row t holds the probabilities after token t."""
  table_VV = jnp.asarray(table_VV, jnp.float32)

  def forward(params, tokens_BT, positions_BT, cache):
    return jnp.take(params["log"], tokens_BT, axis=0, mode="clip"), cache.claim(positions_BT)

  spec = (LayerSpec("global", 1, 1),)
  model = Model(forward, lambda params, features_BD: features_BD)
  return Network(model, spec, table_VV.shape[0], context, jnp.float32), {"log": jnp.log(table_VV)}


ABE = np.array([[0, 0.55, 0.35, 0.10], [0, 0.34, 0.33, 0.33], [0, 0.05, 0.05, 0.90], [0, 0, 0, 1]])  # ^ a b E


def script_lm(script: list[int], prompt: int, size: int = 128, context: int = 256) -> tuple[Network, Any]:
  """SCRIPT-LM: after a prompt of `prompt` tokens, `script`, whatever the input; its last token repeats."""

  def forward(params, tokens_BT, positions_BT, cache):
    return positions_BT[..., None].astype(jnp.float32), cache.claim(positions_BT)

  def head(params, features_BD):
    index_B = features_BD[:, 0].astype(jnp.int32) - (prompt - 1)
    token_B = jnp.take(params["script"], jnp.clip(index_B, 0, len(script) - 1))
    return 50.0 * jax.nn.one_hot(token_B, size)

  network = Network(Model(forward, head), (LayerSpec("global", 1, 1),), size, context, jnp.float32)
  return network, {"script": jnp.asarray(script, jnp.int32)}


def rescript(lm: LM, script: list[int]) -> LM:
  """Gives the façade of a SCRIPT-LM another script, its last token repeated to the same length; compiles nothing."""
  size = lm.params["script"].shape[0]
  lm.params["script"] = jnp.asarray([*script, *script[-1:] * size][:size], jnp.int32)
  for programs in lm._programs.values():
    bound = [key for key, program in programs._compiled.items() if isinstance(program, functools.partial)]
    for key in bound:  # to the old parameters
      del programs._compiled[key]
  return lm


class Letters:
  """A tokenizer without a library: one printable character an id, then three specials. 62 ids, so that the networks'
  ids 62 and 63 are padding."""

  PAD, BOS, EOS = 59, 60, 61

  @staticmethod
  def build(**changes):
    """changes: GGUF keys; None takes one away."""
    letters = [chr(ord("A") + i) for i in range(58)] + ["~"]
    tokens = [*letters, "<pad>", "<bos>", "<eos>"]
    metadata = {
      "tokenizer.ggml.model": "gpt2",
      "tokenizer.ggml.pre": "gpt-2",
      "tokenizer.ggml.tokens": tokens,
      "tokenizer.ggml.token_type": [1] * 59 + [3] * 3,
      "tokenizer.ggml.merges": [],
      "tokenizer.ggml.bos_token_id": Letters.BOS,
      "tokenizer.ggml.eos_token_id": Letters.EOS,
      "tokenizer.ggml.padding_token_id": Letters.PAD,
      "tokenizer.ggml.add_bos_token": True,
    } | changes
    return tokenizer_from_gguf({name: value for name, value in metadata.items() if value is not None})


def facade(network: Network, params: Any, tokenizer: Any = None, generation: Any = None) -> LM:
  """A network behind the public façade."""
  lm = LM(Checkpoint("tiny", CONFIG, generation or {}, tokenizer, params, Path()), network.dtype)
  lm.network = network
  return lm


def cache_for(network: Network, rows: int, capacity: int, layout: Any = Contiguous, codec: Any = None):
  return allocate(network.cache_spec, rows, capacity, layout=layout, codec=codec or Raw(network.dtype))


def blocks_of(size: int) -> Any:
  """Contiguous, read in blocks of `size` slots: small ones make small caches have many."""

  class Blocks(Contiguous):
    @classmethod
    def allocate(cls, batch, capacity, block=size):
      return Contiguous.allocate(batch, capacity, block)

  return Blocks


def prompts(lengths: list[int], seed: int = 0, size: int = V) -> list[list[int]]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, size, n).tolist() for n in lengths]


def ragged(rows: list[list[int]], left: int = 0, right: int = 0, pad: int = 0):
  """Token rows and their positions, padded on the left by at least `left`, on the right by at least `right`."""
  width = max(len(r) for r in rows) + left + right
  tokens, positions = np.full((len(rows), width), pad, np.int32), np.full((len(rows), width), -1, np.int32)
  for b, row in enumerate(rows):
    start = width - right - len(row) if left else 0
    tokens[b, start : start + len(row)] = row
    positions[b, start : start + len(row)] = np.arange(len(row))
  return jnp.asarray(tokens), jnp.asarray(positions)


def begin(network: Network, rows: list[list[int]], limits: list[int], *, seeds=None, transforms=None, ends=(),
          capacity: int = 64, layout: Any = Contiguous, codec: Any = None, settings: Any = None):  # fmt: skip
  """A State whose prompts are pending as one block. `settings` (one chain state a row) overrides `transforms`."""
  batch, width = len(rows), max(len(r) for r in rows)
  context = np.zeros((batch, capacity), np.int32)
  for b, row in enumerate(rows):
    context[b, : len(row)] = row
  lengths = jnp.asarray([len(r) for r in rows], jnp.int32)
  link = transforms or chain(temperature(0.0))
  each = settings or [link.init()] * batch
  stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *each)
  keys = jax.vmap(request_key)(jnp.asarray([*(seeds or range(batch))], jnp.uint32))
  ends_BE = jnp.broadcast_to(jnp.asarray([*ends, -1], jnp.int32), (batch, len(ends) + 1))
  state = init(
    cache_for(network, batch, capacity, layout, codec), jnp.asarray(context), lengths,
    jnp.asarray(limits, jnp.int32), ends_BE, keys, stacked,
  )  # fmt: skip
  return pending(state, lengths - width, width)


def few(cases: list, quick: int) -> list:
  """The first of some cases as they are; the others are slow."""
  rest = [case if isinstance(case, tuple) else (case,) for case in cases[quick:]]
  return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


def free_port() -> int:
  with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    return one.getsockname()[1]


def byte_model(directory: Path) -> Path:
  """Writes a Hugging Face directory: one layer, one token a byte, an end token, a chat template."""
  D, F, V = 16, 32, 260
  config = {
    "model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": True,
  }  # fmt: skip
  shapes = {"model.embed_tokens": (V, D), "model.norm": (D,)}
  layer = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (D // 2, D), "self_attn.v_proj": (D // 2, D)}
  layer |= {"self_attn.o_proj": (D, D), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
  layer |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
  shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
  random = np.random.default_rng(0)
  save_file(
    {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()},
    directory / "model.safetensors",
  )
  (directory / "config.json").write_text(json.dumps(config))
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(["<|end|>"])
  tokenizer.save(str(directory / "tokenizer.json"))
  template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant: "
  (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
  return directory
