"""Encoder–decoders behind the façade: what is read, what is written, languages, and what is refused."""

import functools
import json

import jax
import numpy as np
import pytest
from sources import CONFIGS, V, padded, sources, tiny, translator

import decoder
from decoder.cache import allocate
from decoder.generate import LM, kind_of
from decoder.text import tokenizer_from_files
from decoder.translator import Translator

LANGUAGES = ["eng_Latn", "deu_Latn", "spa_Latn", "zho_Hans"]
MARKS = [">>fra<<", ">>ron<<"]


def words(*special):
  """A tokenizer of one token a word, which ends texts with </s>, and of these special tokens."""
  texts = ["<s>", "<pad>", "</s>", "<unk>", *special]
  texts += [f"w{number}" for number in range(V - len(texts))]
  source = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [
      {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
       "special": True}
      for number, text in enumerate(texts) if not text.startswith("w")
    ],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": {
      "type": "TemplateProcessing", "pair": [],
      "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
      "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    },
    "decoder": None,
    "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {text: n for n, text in enumerate(texts)}},
  }  # fmt: skip
  config = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
  files = {"tokenizer.json": json.dumps(source).encode(), "tokenizer_config.json": json.dumps(config).encode()}
  return tokenizer_from_files(files)


MANY, MARKED, PLAIN = words(*LANGUAGES), words(*MARKS), words()


@functools.cache
def recomputation(name):
  """(source, its positions, what is written, its positions) -> logits after each, from an empty cache."""
  network, params = tiny(name)

  def logits(source_BS, at_BS, written_BT, at_BT):
    cache = network.encode(params, source_BS, at_BS, allocate(network.cache_spec, 1, 16, source=16))
    features_BTD, _ = network.model.forward(params, written_BT, at_BT, cache)
    return network.model.head(params, features_BTD[0])

  return jax.jit(logits)


def uncached(name, source, written):
  """Logits after `written`, all of it read at once."""
  return np.array(recomputation(name)(*padded([source]), *padded([written], 8))[len(written) - 1])


def greedy(name, source, start, steps, forced=None, never=()):
  """By recomputing everything for each token."""
  written = [start]
  for step in range(steps):
    logits_V = uncached(name, source, written)
    logits_V[list(never)] = -np.inf
    written.append(forced if step == 0 and forced is not None else int(logits_V.argmax()))
  return tuple(written[1:])


@pytest.mark.parametrize("name", ["flan", "marian"])
def test_greedy_texts_of_a_batch_are_those_recomputed(name):
  rows = sources(3, 14, 9)
  results = translator(name).generate(rows, max_new_tokens=7, ignore_eos=True)
  start = CONFIGS[name]["decoder_start_token_id"]
  assert [result.token_ids for result in results] == [greedy(name, row, start, 7) for row in rows]
  assert [result.prompt_ids for result in results] == [tuple(row) for row in rows]
  assert len({result.token_ids for result in results}) > 1, "texts that depend on what was read"


@pytest.mark.slow
def test_a_stream_and_samples_of_one_source():
  """Samples fork from one reading: each is what it is alone."""
  lm, (row,) = translator("marian", PLAIN), sources(11)
  asked = dict(max_new_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
  drawn = lm.generate(row, n=3, **asked)
  assert drawn[0].token_ids == lm.generate(row, **asked).token_ids
  assert len({one.token_ids for one in drawn}) == 3
  stream = lm.stream(row, **asked)
  assert "".join(stream) == stream.result.text == drawn[0].text


def test_beams_are_best_first_and_scores_are_sums():
  lm, (row,) = translator("marian"), sources(12)
  found = lm.generate(row, num_beams=4, n=4, max_new_tokens=6, ignore_eos=True, length_penalty=0.0)
  assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
  for one in found:
    written, total = [2], 0.0
    for token in one.token_ids:
      logits_V = uncached("marian", row, written).astype(np.float64)
      total += logits_V[token] - np.logaddexp.reduce(logits_V)
      written.append(token)
    assert one.score == pytest.approx(total, abs=1e-3)
  assert found[0].score >= sum_of_greedy(row) - 1e-3


def sum_of_greedy(row):
  written, total = [2], 0.0
  for _ in range(6):
    logits_V = uncached("marian", row, written).astype(np.float64)
    written.append(int(logits_V.argmax()))
    total += logits_V.max() - np.logaddexp.reduce(logits_V)
  return total


@pytest.mark.slow
def test_what_the_checkpoint_asks_of_every_text():
  generation = json.dumps({"forced_bos_token_id": 9, "bad_words_ids": [[1], [17], [23]]})
  lm, (row,) = translator("marian", None, generation), sources(12)
  got = lm.generate(row, max_new_tokens=6, ignore_eos=True)
  assert got.token_ids == greedy("marian", row, 2, 6, forced=9, never=(1, 17, 23))
  assert lm.generate(row, max_new_tokens=2, forced_bos=11).token_ids[0] == 11
  plain = translator("marian").generate(row, max_new_tokens=6, ignore_eos=True)
  assert plain.token_ids != got.token_ids, "negative control"


@pytest.mark.slow
def test_languages_by_codes():
  """The source's token stands before the text, and the translation begins with the target's."""
  lm = translator("nllb", MANY)
  got = lm.generate("w1 w2 w3", src="eng_Latn", tgt="spa_Latn", max_new_tokens=5, ignore_eos=True)
  source = [MANY.find(token) for token in ("eng_Latn", "w1", "w2", "w3", "</s>")]
  assert got.prompt_ids == tuple(source)
  assert got.token_ids == greedy("nllb", source, 2, 5, forced=MANY.find("spa_Latn"))
  assert "spa_Latn" not in got.text
  beams = lm.generate("w1 w2 w3", src="eng_Latn", tgt="spa_Latn", max_new_tokens=5, num_beams=3)
  assert beams.token_ids[0] == MANY.find("spa_Latn")
  assert lm.generate(source, tgt="spa_Latn", max_new_tokens=5, ignore_eos=True).token_ids == got.token_ids


def test_languages_by_marks():
  lm = translator("marian", MARKED)
  got = lm.generate("w1 w2", tgt="ron", max_new_tokens=4, ignore_eos=True)
  assert got.prompt_ids == tuple(MARKED.find(token) for token in (">>ron<<", "w1", "w2", "</s>"))


@pytest.mark.parametrize(
  ("tokenizer", "asked", "message"),
  [
    (MANY, {"src": "eng_Latm", "tgt": "deu_Latn"}, "src: this model knows no language 'eng_Latm'; did you mean 'eng_L"),
    (MANY, {"src": "eng_Latn", "tgt": "german"}, "tgt: this model knows no language 'german'"),
    (MANY, {"tgt": "deu_Latn"}, r"reads 4 languages; name one with src="),
    (MANY, {"src": "eng_Latn"}, r"writes 4 languages; name one with tgt="),
    (MARKED, {"tgt": "fre"}, "did you mean 'fra'"),
    (MARKED, {"src": "fra"}, "src says nothing to it"),
    (PLAIN, {"tgt": "fra"}, "tgt says nothing to it"),
    (PLAIN, {"tgt": 3}, "tgt must be the code of a language"),
    (PLAIN, {"guidance_scale": 2.0}, "guidance_scale is not offered"),
    (PLAIN, {"prompt_logprobs": True}, "prompt_logprobs are of tokens that a decoder reads"),
    (PLAIN, {"truncate": "left"}, "truncate is not offered"),
  ],
)
def test_what_makes_no_sense_is_refused(tokenizer, asked, message):
  with pytest.raises(ValueError, match=message):
    translator("nllb", tokenizer).generate("w1 w2", **asked)


def test_texts_that_are_empty_or_too_long_are_refused():
  lm = translator("marian", PLAIN)
  for text in ("", "  "):
    with pytest.raises(ValueError, match="the text is empty"):
      lm.generate(text)
  lm.generate(" ".join(["w1"] * 63), max_new_tokens=1)
  with pytest.raises(ValueError, match="65 tokens, tiny reads at most 64"):
    lm.generate(["w1", " ".join(["w1"] * 64)])
  with pytest.raises(ValueError, match="src names the language of a text"):
    lm.generate([5, 6], src="eng_Latn")


def test_what_is_for_models_without_an_encoder_is_refused():
  lm = translator("marian", PLAIN)
  with pytest.raises(ValueError, match="an Infill prompt is for models"):
    lm.generate(decoder.Infill("w1", "w2"))
  with pytest.raises(ValueError, match="score"):
    lm.score("w1", "w2")
  with pytest.raises(ValueError, match="nothing for a session to keep"):
    lm.session()


def test_models_without_an_encoder_know_no_languages(lm):
  with pytest.raises(ValueError, match="src and tgt name languages"):
    lm.generate("A", tgt="deu_Latn")


def test_the_kind_of_a_model():
  assert {name: kind_of(config) for name, config in CONFIGS.items()} == dict.fromkeys(CONFIGS, Translator)
  assert kind_of({"model_type": "llama"}) is LM


def test_a_checkpoint_without_a_start_is_refused():
  lm = translator("marian", None, '{"bos_token_id": 4}')
  assert lm.start_id == 2, "of the config"
  config, lm.config = lm.config, {}
  del lm.start_id
  assert lm.start_id == 4
  lm.generation = {}
  del lm.start_id
  with pytest.raises(ValueError, match="names no decoder_start_token_id"):
    lm.generate([5])
  lm.config = config
