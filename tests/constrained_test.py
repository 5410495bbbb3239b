"""Texts that must fit: whatever the model, what ends by 'stop' fits, and every bounded text does end."""

import functools
import json

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from default_model import load_or_skip
from fixtures import facade
from schemas import random_schema

import decoder
from decoder.cache import LayerSpec
from decoder.models.registry import Network
from decoder.text import tokenizer_from_gguf
from decoder.types import Model

LONG = [
  *'{}[]":,0123456789',
  '{"',
  '":',
  '": "',
  '",',
  '"}',
  "],",
  "]}",
  "true",
  "null",
  "é",
  "漢",
  "  ",
  "\n\n",
  "yes",
  "ab",
]
YES_NO = ["yes", "no", "not at all", "nothing"]


def random_lm(tokenizer, size, context=4096):
  """A model whose logits are noise that depends on the last token and the position."""
  rows = jnp.asarray(np.random.default_rng(5).normal(size=(61, size)) * 2, jnp.float32)

  def forward(params, tokens_BT, positions_BT, cache):
    return (7 * tokens_BT + 13 * positions_BT)[..., None].astype(jnp.float32), cache.claim(positions_BT)

  def head(params, features_BD):
    return jnp.take(params, features_BD[:, 0].astype(jnp.int32) % 61, axis=0)

  network = Network(Model(forward, head), (LayerSpec("global", 1, 1),), size, context, jnp.float32)
  return facade(network, rows, tokenizer)


def byte_pairs():
  """A token a byte, then some longer ones; 3 specials."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = iter(range(0x100, 0x200))
  letter = {byte: chr(byte) if byte in printable else chr(next(others)) for byte in range(256)}
  pieces = dict.fromkeys("".join(letter[b] for b in text.encode()) for text in LONG)
  longer = [piece for piece in pieces if len(piece) > 1]
  tokens = [*letter.values(), *longer, "<bos>", "<eos>", "<turn>"]
  return tokenizer_from_gguf({
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3, "tokenizer.ggml.merges": [],
    "tokenizer.ggml.bos_token_id": len(tokens) - 3, "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    "tokenizer.ggml.eot_token_id": len(tokens) - 1,
  })  # fmt: skip


@functools.cache
def pairs_lm():
  tokenizer = byte_pairs()
  return random_lm(tokenizer, tokenizer.vocab_size + 5)


def faults(lm, schemas, *, constrained=True, batch=16):
  """What is wrong with the texts for these schemas."""
  wrong = []
  for start in range(0, len(schemas), batch):
    some = schemas[start : start + batch]
    asked = [
      decoder.Settings(
        json_schema=s if constrained else None, temperature=1.0, seed=start + i, max_new_tokens=None, capacity=2048
      )
      for i, s in enumerate(some)
    ]
    for schema, result in zip(some, lm.generate([[i % 7 + 1] * (i % 5 + 1) for i in range(len(some))], asked)):
      wrong += [(schema, result.text, problem) for problem in _faults(schema, result)]
  return wrong


def _faults(schema, result):
  if result.finish_reason != "stop":
    return [result.finish_reason]
  try:
    jsonschema.validate(json.loads(result.text), schema)
  except (json.JSONDecodeError, jsonschema.ValidationError) as error:
    return [str(error)]
  return []


def schemas(count, seed=0):
  rng = np.random.default_rng(seed)
  return [random_schema(rng) for _ in range(count)]


def test_texts_of_random_schemas_end_parse_and_validate():
  assert faults(pairs_lm(), schemas(48)) == []


def test_negative_control_without_masks_none_of_them_does():
  some = [s for s in schemas(16) if s.get("type") == "object"]
  assert len(faults(pairs_lm(), some, constrained=False)) == len(some)


@pytest.mark.slow
def test_texts_of_1000_random_schemas_end_parse_and_validate():
  assert faults(pairs_lm(), schemas(1000, seed=1)) == []


@pytest.mark.slow
def test_texts_of_random_schemas_fit_with_the_real_tokenizer():
  tokenizer = load_or_skip().tokenizer
  assert faults(random_lm(tokenizer, tokenizer.vocab_size), schemas(200, seed=2), batch=8) == []
