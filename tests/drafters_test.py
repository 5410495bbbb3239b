"""Who guesses ahead behind the façade: heads and draft models change nothing of what is written, or are refused."""

import shutil

import jax
import numpy as np
import pytest
from companions import head_module
from compiled_test import Compilations
from fixtures import CONFIG, V, byte_model, facade, few, rand_lm

import decoder
from decoder import CheckpointError, Settings, checkpoint, drafters, generate
from decoder.checkpoint.fingerprint import fingerprint
from decoder.models import registry
from decoder.models.draft_head import head_config
from decoder.ops.quantised import quantise

COLD = dict(max_new_tokens=30, ignore_eos=True)
WARM = dict(COLD, temperature=1.0)
TEXTS = ["ABCABCABCABC", "HELLO[THERE", "Q"]


def saved(config, params, out):
  return checkpoint.save(params, config, {}, out, progress=False)


KINDS = few(["draft", "head"], 1)


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
  """A head for RAND-LM and a draft model, on disk."""
  directory = tmp_path_factory.mktemp("drafters")
  _, head = head_module()
  _, params = rand_lm()
  config = {**head_config(CONFIG, range(0, V, 2)), "target": fingerprint(params)}
  draft = {**CONFIG, "num_hidden_layers": 1}
  lively = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, registry.fresh(draft, jax.random.key(5)))
  return {
    "head": f"head:{saved(config, head, directory / 'head')}",
    "draft": f"draft:{saved(draft, lively, directory / 'draft')}",
  }


@pytest.fixture(autouse=True)
def free(monkeypatch):
  """Beside so small a model no guess is worth its cost, and none would be made."""
  monkeypatch.setattr(generate, "find", lambda lm, spec: drafters.find(lm, spec)._replace(each=0.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [(), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_greedy_texts_of_a_ragged_batch_are_those_of_plain_decoding(lm, specs, kind, tree):
  ahead = dict(COLD, speculate=specs[kind], draft_tokens=3, draft_tree=tree)
  for got, want in zip(lm.generate(TEXTS, **ahead), lm.generate(TEXTS, **COLD)):
    assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
    assert got.speculated.drafted > 0
    assert len(got.token_ids) == 1 + got.speculated.steps + got.speculated.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_repeat_and_differ(lm, specs, kind):
  """C40, C90."""
  texts = [lm.generate(TEXTS[0], seed=seed, speculate=specs[kind], **WARM).token_ids for seed in (1, 2, 1)]
  assert texts[0] == texts[2] != texts[1]


@pytest.mark.slow
def test_a_tree_writes_the_text_of_the_seed(lm, specs):
  for seed in range(3):
    ahead = dict(speculate=specs["draft"], draft_tree=(3, 2))
    assert (
      lm.generate(TEXTS[1], seed=seed, **WARM, **ahead).token_ids == lm.generate(TEXTS[1], seed=seed, **WARM).token_ids
    )


@pytest.mark.parametrize("kind", KINDS)
def test_streams_stops_log_probs_and_constraints(lm, specs, kind):
  ahead = dict(COLD, speculate=specs[kind])
  want = lm.generate(TEXTS[0], **COLD)
  stop = want.text[9:11]
  stream = lm.stream(TEXTS[0], stop=stop, **ahead)
  assert "".join(stream) == lm.generate(TEXTS[0], stop=stop, **COLD).text
  assert stream.result.stop_reason == stop
  told, plain = (lm.generate(TEXTS[0], logprobs=2, **each) for each in (ahead, COLD))
  assert [one.logprob for one in told.logprobs] == pytest.approx([one.logprob for one in plain.logprobs], abs=1e-4)
  fits = dict(regex="[A-F]{5,9}")
  assert lm.generate(TEXTS, **ahead, **fits)[1].text == lm.generate(TEXTS, **COLD, **fits)[1].text


@pytest.mark.slow
def test_a_session_goes_on_with_or_without(lm, specs):
  session, said = lm.session(capacity=64), [1, 2, 3, 1, 2]
  for speculate in ("off", specs["head"], specs["head"], specs["draft"], "lookup"):
    changes = dict(COLD, max_new_tokens=6)
    want = lm.generate(said, **changes)
    stream = session.stream(said, speculate=speculate, **changes)
    assert "".join(stream) == want.text
    said = [*said, *want.token_ids, 9]
    assert session.held == len(said) - 2


def test_nothing_recompiles_while_acceptance_varies(lm, specs):
  for text, seed in zip(TEXTS, range(2)):
    lm.generate(text, seed=seed, speculate=specs["head"], **WARM)
  with Compilations() as compiled:
    for seed in range(4):
      lm.generate(TEXTS[0], seed=seed, speculate=specs["head"], **WARM)
      lm.generate(TEXTS[0], seed=seed, speculate=specs["head"], **dict(WARM, temperature=0.3))
  assert compiled.count == 0


def test_a_drafter_is_loaded_once(lm, specs, monkeypatch):
  lm.generate(TEXTS[0], speculate=specs["head"], **COLD)
  monkeypatch.setattr(generate, "find", None)
  lm.generate(TEXTS[0], speculate=specs["head"], **WARM)


def test_the_model_is_known_in_whatever_form_its_weights_are(lm):
  _, params = rand_lm()
  bits = jax.tree.map(lambda x: quantise(np.asarray(x), "q8_0", striped=False) if x.shape[-1:] == (32,) and x.ndim == 2
                      else x, params)  # fmt: skip
  half = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), params)
  assert fingerprint(params) == fingerprint(bits) == fingerprint(half)
  other = {**params, "norm": {"weight": params["norm"]["weight"] + 0.1}}
  assert fingerprint(other) != fingerprint(params)


def test_c92_a_draft_model_of_another_vocabulary_is_refused(lm, tmp_path):
  """C92: V = 60 against 64; and as many tokens that stand for other texts."""
  small = {**CONFIG, "vocab_size": 60}
  path = saved(small, registry.fresh(small, jax.random.key(0)), tmp_path / "small")
  with pytest.raises(ValueError, match=r"has 60 tokens in its vocabulary, tiny has 64; .* same tokenizer"):
    lm.generate("A", speculate=f"draft:{path}")
  (tmp_path / "bytes").mkdir()
  other = decoder.load(byte_model(tmp_path / "bytes"))
  shutil.copytree(tmp_path / "bytes", tmp_path / "turned")
  words = (tmp_path / "turned" / "tokenizer.json").read_text()
  (tmp_path / "turned" / "tokenizer.json").write_text(words.replace('"A":', '"swap":').replace('"B":', '"A":').replace(
    '"swap":', '"B":'))  # fmt: skip
  with pytest.raises(ValueError, match=r"token \d+ is b'[AB]' to draft:.* and b'[AB]' to bytes"):
    other.generate("A", speculate=f"draft:{tmp_path / 'turned'}")
  assert other.generate("A", speculate=f"draft:{tmp_path / 'bytes'}", max_new_tokens=3).speculated is not None


def test_what_is_no_drafter_is_refused(lm, specs, tmp_path):
  with pytest.raises(ValueError, match="is a llama, no head that drafts; use draft:"):
    lm.generate("A", speculate=specs["draft"].replace("draft:", "head:"))
  with pytest.raises(ValueError, match="a head that drafts for a model, no model"):
    lm.generate("A", speculate=specs["head"].replace("head:", "draft:"))
  with pytest.raises(CheckpointError, match="unknown model 'nobody'"):
    lm.generate("A", speculate="draft:nobody")
  with pytest.raises(ValueError, match="no registered head for tiny"):
    lm.generate("A", speculate="head")
  with pytest.raises(ValueError, match="is an encoder–decoder"):
    lm.generate("A", speculate="draft:bible-es-en")
  network, params = rand_lm("absolute")
  with pytest.raises(ValueError, match="tiny has no head that drafts: that is offered for Llama's family"):
    facade(network, params).generate([1], speculate=specs["head"])


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"speculate": "luck"}, "speculate must be 'off', 'lookup', 'head', 'head:NAME' or 'draft:NAME', got 'luck'"),
    ({"speculate": "draft"}, "speculate must be"),
    ({"speculate": "draft:"}, "speculate must be"),
    ({"speculate": 7}, "speculate must be"),
    ({"speculate": "head", "draft_tree": (0,)}, "draft_tree must be a list of numbers of guesses, from 1"),
    ({"speculate": "head", "draft_tree": 3}, "draft_tree must be"),
    ({"speculate": "head", "draft_tree": (9, 9)}, "has 18 guesses a step"),
    ({"speculate": "lookup", "draft_tree": (2,)}, "draft_tree is for a head or a draft model"),
    ({"speculate": "head", "draft_tree": (2,), "regex": "A"}, "draft_tree is not offered together with a schema"),
    ({"speculate": "head", "num_beams": 2}, "not offered together with beams"),
  ],
)
def test_what_makes_no_sense_is_said(wrong, message):
  with pytest.raises(ValueError, match=message):
    Settings(**wrong)
