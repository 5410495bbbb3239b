"""Texts that must fit: whatever the model, what ends by 'stop' fits, and every bounded text does end."""

import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from default_model import load_or_skip
from fixtures import Letters, facade, rand_lm
from schemas import random_schema

import decoder
from decoder import constrained
from decoder.cache import LayerSpec
from decoder.models.registry import Network
from decoder.ops.kernels import build, channel
from decoder.text import tokenizer_from_gguf
from decoder.text.constraints import Constraint
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


WARM = dict(temperature=1.0, max_new_tokens=200)
PERSON = {
  "type": "object",
  "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
  "required": ["name", "age"],
  "additionalProperties": False,
}
ASKED = [
  decoder.Settings(json_schema=PERSON, seed=1, **WARM),
  decoder.Settings(seed=2, temperature=1.0, max_new_tokens=9, ignore_eos=True),
  decoder.Settings(choice=YES_NO, seed=3, **WARM),
  decoder.Settings(regex="(é|漢|yes){2,5}[0-9]{3}", seed=4, **WARM),
  decoder.Settings(grammar='start: "(" start ")" | "[" /[ab]{1,3}/ "]"', seed=5, **WARM),
]
PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8, 9, 10], [3, 3], [4] * 20, [5, 6, 7]]


@pytest.fixture(scope="module")
def alone():
  return [pairs_lm().generate(prompt, each) for prompt, each in zip(PROMPTS, ASKED)]


def test_each_kind_fits(alone):
  person, _, choice, match, nested = (result.text for result in alone)
  jsonschema.validate(json.loads(person), PERSON)
  assert choice in YES_NO
  assert re.fullmatch("(é|漢|yes){2,5}[0-9]{3}", match)
  assert re.fullmatch(r"\(*\[[ab]{1,3}\]\)*", nested)
  assert nested.count("(") == nested.count(")")
  assert [r.finish_reason for r in alone] == ["stop", "length", "stop", "stop", "stop"]
  assert len(alone[1].token_ids) == 9


def test_batch_equals_single_constrained_or_not(alone):
  for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
    got = pairs_lm().generate([PROMPTS[i] for i in order], [ASKED[i] for i in order])
    assert [(r.token_ids, r.finish_reason) for r in got] == [
      (alone[i].token_ids, alone[i].finish_reason) for i in order
    ]


def test_streams_and_sessions_equal_generate(alone):
  session = pairs_lm().session()
  for index in (3, 0, 1, 4):
    for stream in (pairs_lm().stream, session.stream):
      running = stream(PROMPTS[index], ASKED[index])
      assert "".join(running) == running.result.text == alone[index].text
  longer = [*alone[4].prompt_ids, *alone[4].token_ids, 1]
  held = session.held
  assert held >= len(longer) - 2
  again = session.stream(longer, ASKED[0])
  assert "".join(again) == pairs_lm().generate(longer, ASKED[0]).text


def test_two_calls_a_step_write_the_same_as_one_for_many(alone, monkeypatch):
  """As on accelerators, and without a compiler."""
  made = []
  for kind in (constrained.Constrained, constrained.Asked):
    monkeypatch.setattr(kind, "loop", noted(kind.loop, kind.__name__, made))
  monkeypatch.setattr(constrained, "build", SimpleNamespace(ready=lambda: False))
  got = pairs_lm().generate(PROMPTS, ASKED)
  assert [r.token_ids for r in got] == [r.token_ids for r in alone]
  calls = len(made)
  assert set(made) == {"Constrained"}
  if build.ready():
    monkeypatch.undo()
    monkeypatch.setattr(constrained.Asked, "loop", noted(constrained.Asked.loop, "Asked", made))
    assert pairs_lm().generate(PROMPTS, ASKED)[0].token_ids == alone[0].token_ids
    assert set(made[calls:]) == {"Asked"}
    assert 8 * len(made[calls:]) < calls


def noted(function, name, made):
  def called(*arguments):
    made.append(name)
    return function(*arguments)

  return called


def test_an_error_of_the_host_ends_the_call_that_waits_for_it(alone, monkeypatch):
  really, left = Constraint.mask, [4]

  def breaks(self):
    left[0] -= 1
    if left[0] < 0:
      raise RuntimeError("no more masks")
    return really(self)

  monkeypatch.setattr(Constraint, "mask", breaks)
  with pytest.raises(RuntimeError, match="no more masks"):
    pairs_lm().generate(PROMPTS[3], ASKED[3])
  monkeypatch.undo()
  assert pairs_lm().generate(PROMPTS[3], ASKED[3]).token_ids == alone[3].token_ids


@pytest.mark.skipif(not build.ready(), reason="no C++ compiler is on the PATH here")
def test_a_program_whose_listener_is_gone_fails_and_does_not_wait():
  told = jax.jit(channel.tell)
  with pytest.raises(Exception, match="nobody listens"):
    jax.block_until_ready(told(np.int32(-5), *(np.zeros((1, 1), np.int32) for _ in range(2)), np.zeros(1, np.int32)))


def test_samples_of_one_prompt_each_have_their_own_parser():
  four = pairs_lm().generate([1], n=4, json_schema=PERSON, seed=7, **WARM)
  assert len({r.text for r in four}) == 4
  for result in four:
    jsonschema.validate(json.loads(result.text), PERSON)
  request = pairs_lm().request([1], ASKED[0])
  for _ in range(2):  # and so has each start of one request
    decoding = pairs_lm().start([request])
    while not decoding.done:
      decoding.advance(5)
    assert decoding.results(0.0)[0].finish_reason == "stop"


def test_a_text_ends_where_nothing_can_follow_and_may_where_it_fits():
  """Exactly 'no' or a longer text of the choice: after 'no' the model decides; after 'yes' nothing is drawn."""
  ends = pairs_lm().ends
  seen = {}
  for seed in range(40):
    result = pairs_lm().generate([1, 2], choice=YES_NO, seed=seed, **WARM)
    seen.setdefault(result.text, set()).add(result.stop_reason)
  assert seen["yes"] == {None}
  assert seen["no"] <= set(ends)
  assert set(seen) == set(YES_NO) or len(seen) > 2
  empty = pairs_lm().generate([1], regex="a{0}", **WARM)
  assert (empty.text, empty.finish_reason, empty.token_ids) == ("", "stop", ())


def test_without_end_ids_it_ends_only_where_nothing_can_follow():
  for seed in range(5):
    result = pairs_lm().generate([1], regex="[ab]{1,6}", seed=seed, ignore_eos=True, **WARM)
    assert (len(result.text), result.finish_reason) == (6, "stop")


def test_a_stop_string_ends_a_text_before_it_fits():
  result = pairs_lm().generate([1], regex="[0-9]{4}ab[0-9]{4}", stop=["ab"], **WARM)
  assert re.fullmatch("[0-9]{4}", result.text)
  assert (result.finish_reason, result.stop_reason) == ("stop", "ab")
  short = pairs_lm().generate([1], regex="[0-9]{40}", temperature=1.0, max_new_tokens=5)
  assert (len(short.text), short.finish_reason) == (5, "length")
  exact = pairs_lm().generate([1], regex="[0-9]{5}", temperature=1.0, max_new_tokens=5)
  assert (len(exact.text), exact.finish_reason) == (5, "stop")


def test_a_row_that_fails_leaves_the_others_alone(alone):
  """Letters has no digits: a row that needs one ends with the reason; its neighbour fits."""
  lm = facade(*rand_lm(), Letters.build())
  stuck, fine = lm.generate(["AB", "CD"], [decoder.Settings(regex="AB[0-9]"), decoder.Settings(regex="[XY]{3}Z")])
  assert (stuck.text, stuck.finish_reason) == ("AB", "error")
  assert stuck.stop_reason == "no token of the vocabulary can follow"
  assert re.fullmatch("[XY]{3}Z", fine.text)
  with pytest.raises(ValueError, match="this tokenizer could begin"):
    lm.generate("AB", regex="[0-9]")


def test_filters_act_on_what_is_allowed(alone):
  """top_k 1 after the mask is greedy among the allowed; never an empty set."""
  greedy = pairs_lm().generate([1], json_schema=PERSON, max_new_tokens=200)
  filtered = pairs_lm().generate([1], json_schema=PERSON, top_k=1, top_p=0.1, min_p=0.9, **WARM)
  assert greedy.finish_reason == "stop"
  assert filtered.text == greedy.text


def test_constraints_compile_once():
  lm = pairs_lm()
  lm.generate([1, 2], regex="[0-9]{3}", **WARM)
  before = lm._compiler.seconds
  lm.generate([3], json_schema=PERSON, **WARM)
  assert lm._compiler.seconds == before


def test_settings_are_refused_before_any_compute():
  with pytest.raises(ValueError, match="one constraint, got json_schema and regex"):
    decoder.Settings(json_schema={}, regex="a")
  with pytest.raises(ValueError, match="Unimplemented keys"):
    decoder.Settings(json_schema={"not": {}})
  with pytest.raises(ValueError, match="came without a tokenizer"):
    facade(*rand_lm()).generate([1], regex="a")
