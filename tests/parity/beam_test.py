"""Beam search against transformers' own, on tiny random Llamas: the same hypotheses, in order, with the same scores.

Skipped without the extra `parity`. Where transformers is wrong the test says so; what is right is then the exhaustive
oracle's word, in tests/strategies/beam_test.py.
"""

import functools

import numpy as np
import pytest
from parity.live_test import CASES, Case, open_theirs, save

import decoder

torch = pytest.importorskip("torch", reason="the comparison needs the extra 'parity'")

ENDS, NEW = [*range(3, 199, 10)], 12  # enough ends that texts end at all lengths
MODELS = {"gqa": CASES["gqa"], "window": CASES["window"], "tied": Case("llama", {"tie_word_embeddings": True})}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  @functools.cache
  def load(name):
    directory = save(MODELS[name], tmp_path_factory.mktemp("beams") / "model")
    return open_theirs(directory), decoder.load(directory, dtype="float32")

  return load


def combination(seed, beams, least=3, penalties=(-1.0, 0.0, 0.5, 1.0, 1.7, 2.0)):
  """Settings in our names, most of what transformers can be asked, and ids to read. least: of max_new_tokens."""
  rng = np.random.default_rng([seed, beams])
  most = int(rng.integers(least, NEW + 1))
  return dict(
    num_beams=beams, n=beams, length_penalty=float(rng.choice(penalties)),
    early_stopping=[True, False, "never"][rng.integers(3)], max_new_tokens=most,
    min_new_tokens=int(rng.integers(0, most)) if rng.random() < 0.5 else 0,
  ), rng.integers(4, 199, int(rng.integers(1, 30))).tolist()  # fmt: skip


def theirs(model, prompt, settings, begin=None, **more):
  """(score, new tokens) of each hypothesis, the best first. begin: where those start; None: after the prompt."""
  begin = len(prompt) if begin is None else begin
  names = ("num_beams", "length_penalty", "early_stopping", "max_new_tokens", "min_new_tokens")
  ids = torch.tensor([prompt])
  asked = {name: settings[name] for name in names if settings.get(name)}
  asked["length_penalty"] = settings["length_penalty"]
  out = model.generate(
    ids, attention_mask=torch.ones_like(ids), do_sample=False, num_return_sequences=settings["n"], eos_token_id=ENDS,
    return_dict_in_generate=True, output_scores=True, output_logits=True, **{"pad_token_id": 1, **asked, **more},
  )  # fmt: skip
  lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
  texts = [row[begin:].tolist() for row in out.sequences]
  return [(float(s), tuple(text[:n])) for s, text, n in zip(out.sequences_scores, texts, lengths)], texts


def mine(lm, prompt, settings, **more):
  results = lm.generate(prompt, **{**settings, **more}, stop_token_ids=ENDS, ignore_eos=True, include_stop=True)
  return [(result.score, result.token_ids) for result in results]


def compare(got, want):
  assert [text for _, text in got] == [text for _, text in want]
  np.testing.assert_allclose([score for score, _ in got], [score for score, _ in want], rtol=1e-5, atol=1e-4)


def check(model, lm, combinations, **more):
  """more: for `theirs`."""
  unlike = 0
  for settings, prompt in combinations:
    want, _ = theirs(model, prompt, settings, **more)
    compare(mine(lm, prompt, settings), want)
    unlike += len({len(text) for _, text in want}) > 1
  lm._programs.clear()  # of this number of beams alone; a process cannot hold those of all
  assert unlike, "hypotheses of unlike lengths"


def test_the_same_hypotheses(pair):
  check(*pair("gqa"), [combination(seed, 4) for seed in range(12)])


@pytest.mark.slow
@pytest.mark.parametrize("beams", [2, 3, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_hypotheses_of_other_models_and_beams(pair, name, beams):
  check(*pair(name), [combination(seed, beams) for seed in range(16)])


def test_C10_transformers_pads_with_an_end_where_the_pad_is_id_0(pair):
  """It takes 0 for "not set". Ours has no padding at all."""
  model, lm = pair("gqa")
  settings, prompt = combination(0, 4)
  settings |= dict(max_new_tokens=NEW, min_new_tokens=0, early_stopping=False, length_penalty=1.0)
  want, padded = theirs(model, prompt, settings, pad_token_id=0)
  short = [row[len(text) :] for row, (_, text) in zip(padded, want) if len(text) < len(row)]
  assert short, "texts of unequal lengths"
  assert all(0 not in rest and set(rest) <= set(ENDS) for rest in short), "transformers has been mended: see C10"
  compare(mine(lm, prompt, settings), want)


def test_C30_transformers_penalises_log_probs(pair):
  """Every log-prob is negative, so its penalty multiplies all; a logit above 0 is divided. Ours equals a search over
  penalised logits, which a processor that undoes the softmax makes of transformers."""
  from transformers import LogitsProcessor

  class OnLogits(LogitsProcessor):
    def __call__(self, input_ids, scores):
      logits = scores - scores.mean(dim=1, keepdim=True) + self.mean
      seen = torch.gather(logits, 1, input_ids)
      logits = logits.scatter(1, input_ids, torch.where(seen < 0, seen * 1.5, seen / 1.5))
      return logits.log_softmax(dim=-1)

  model, lm = pair("gqa")
  settings, prompt = combination(1, 4)
  settings |= dict(max_new_tokens=6, min_new_tokens=0, early_stopping="never", length_penalty=1.0)
  processor, head = OnLogits(), model.lm_head
  hook = head.register_forward_hook(
    lambda module, inputs, output: setattr(processor, "mean", output[:, -1].mean(dim=1, keepdim=True))
  )
  try:
    want, _ = theirs(model, prompt, settings, logits_processor=[processor])
  finally:
    hook.remove()
  got = mine(lm, prompt, settings, repetition_penalty=1.5)
  compare(got, want)
  wrong, _ = theirs(model, prompt, settings, repetition_penalty=1.5)
  assert abs(wrong[0][0] - got[0][0]) > 1e-2
