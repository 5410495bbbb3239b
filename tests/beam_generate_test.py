"""Beams through the façade: n-best results with scores, in any batch, and what is refused before any compute."""

import functools
import threading

import numpy as np
import pytest
from compiled_test import Compilations
from fixtures import ABE, Letters, facade, rand_lm, table_lm

import decoder

pytestmark = pytest.mark.filterwarnings("error:Some donated buffers")

TWO = dict(num_beams=2, stop_token_ids=[3], max_new_tokens=6, include_stop=True)
LONG = dict(TWO, n=2, length_penalty=2.0, early_stopping="never")  # C3: aaaabE −0.1402, aaabE −0.1588
FOUR = dict(num_beams=4, max_new_tokens=8)


@functools.cache
def abe():
  return facade(*table_lm(ABE))


def test_the_n_best_come_with_their_scores():
  best, second = abe().generate([0], **LONG)
  assert (best.token_ids, second.token_ids) == ((1, 1, 1, 1, 2, 3), (1, 1, 1, 2, 3))
  np.testing.assert_allclose([best.score, second.score], [-0.1402, -0.1588], atol=1e-4)
  assert (best.sample, second.sample) == (0, 1)
  assert (best.finish_reason, best.stop_reason) == ("stop", 3)
  assert best.to_json()["score"] == best.score
  without = abe().generate([0], **{**LONG, "include_stop": False, "n": 1})
  assert without.token_ids == best.token_ids[:-1]
  assert without.score == best.score


def test_a_prompts_hypotheses_do_not_depend_on_the_batch():
  """C1: other lengths, penalties and numbers of hypotheses beside it."""
  alone = abe().generate([0], **LONG)
  asked = [decoder.Settings(**TWO), decoder.Settings(**LONG), decoder.Settings(**TWO, early_stopping=True)]
  other, mine, last = abe().generate([[0, 1, 0, 1, 2], [0], [1]], asked)
  assert [(r.token_ids, r.score) for r in mine] == [(r.token_ids, r.score) for r in alone]
  assert isinstance(other, decoder.Result)
  assert len(last.token_ids) < 6


def test_one_prompt_without_beams_is_as_before(lm):
  plain = lm.generate("HELLO", max_new_tokens=8)
  forced = lm.generate("HELLO", max_new_tokens=8, forced_tokens=list(plain.token_ids[:3]))
  assert forced.token_ids == plain.token_ids, "one beam is greedy"
  assert (plain.score, forced.score is None) == (None, False)


@pytest.mark.slow
def test_rules_compile_nothing(lm):
  rules = [
    dict(length_penalty=-1.0), dict(early_stopping=True, patience=2.0), dict(length_norm="gnmt"), dict(n=3),
    dict(early_stopping="never", repetition_penalty=1.5), dict(temperature=1.0, seed=3), dict(forced_tokens=[4, 5]),
    dict(logit_bias={3: -2.0}, min_new_tokens=3),
  ]  # fmt: skip
  lm.generate("HELLO", **FOUR)
  lm.generate("HELLO", **FOUR, min_new_tokens=2)
  with Compilations() as compiled:
    results = [lm.generate("THERE", **FOUR, **more) for more in rules]
  assert compiled.count == 0
  assert [len(r) if isinstance(r, list) else 1 for r in results] == [1, 1, 1, 3, 1, 1, 1, 1]


def test_log_probs_are_those_that_scores_are_of(lm):
  results = lm.generate("HELLO", **FOUR, n=4, logprobs=2, logprobs_mode="processed", repetition_penalty=1.3)
  for result in results:
    each = [one.logprob for one in result.logprobs]
    np.testing.assert_allclose(result.score * len(each), sum(each), atol=1e-4)
    assert all(len(one.alternatives) == 2 for one in result.logprobs)
  raw = lm.generate("HELLO", **FOUR, logprobs=0)
  scored = lm.score("HELLO", list(raw.token_ids))
  np.testing.assert_allclose(
    [t.logprob for t in raw.logprobs][: len(raw.token_ids)], [t.logprob for t in scored.tokens], atol=1e-4
  )


def test_sampled_beams_repeat_with_their_seed(lm):
  first = lm.generate("HELLO", **FOUR, n=2, temperature=1.0)
  again = lm.generate("HELLO", **FOUR, n=2, temperature=1.0, seed=first[0].seed)
  assert [r.token_ids for r in again] == [r.token_ids for r in first]
  others = {lm.generate("HELLO", **FOUR, temperature=1.0, seed=seed).token_ids for seed in range(4)}
  assert len(others) > 1


def test_continuations_are_texts_or_ids(lm):
  texts = ["YES", "NO", "NOT"]
  answers = lm.generate("HELLO", num_beams=4, n=4, max_new_tokens=8, continuations=texts)
  assert sorted(one.text for one in answers) == sorted(texts), "there are no more than three"
  assert answers[0].score >= answers[1].score >= answers[2].score
  by_id = lm.generate("HELLO", num_beams=4, max_new_tokens=8, continuations=[list(lm.encode(t, False)) for t in texts])
  assert by_id.text == answers[0].text


def test_what_ends_early_has_what_was_found():
  cancel = threading.Event()
  cancel.set()
  result = abe().generate([0], cancel=cancel, **TWO)
  assert (result.finish_reason, result.score, result.token_ids) == ("cancelled", None, ())
  late = abe().generate([0], max_time=1e-9, **TWO)
  assert (late.finish_reason, late.score) == ("time", None)


def test_nothing_may_be_written():
  result = abe().generate([0], **{**TWO, "max_new_tokens": 0})
  assert (result.finish_reason, result.token_ids, result.score) == ("length", (), None)


def test_where_nothing_may_follow_it_is_an_error():
  result = abe().generate([0], **TWO, suppress_tokens=[1, 2, 3], n=2)
  assert [(r.finish_reason, r.score) for r in result] == [("error", None)]


def test_broken_logits_end_their_prompt_alone():
  """The first row finds `E` before it meets NaN after b; the second never does."""
  network, params = table_lm(ABE)
  lm = facade(network, {"log": params["log"].at[2].set(np.nan)})
  broken, sound = lm.generate([[0], [3]], **TWO)
  assert (broken.finish_reason, broken.token_ids, broken.score) == ("error", (), None)
  assert (sound.finish_reason, sound.token_ids) == ("stop", (3,))


REFUSED = {
  "num_beams must be an integer 1": dict(num_beams=0),
  "num_beams must be": dict(num_beams=2.5),
  "min_new_tokens 9 > max_new_tokens 4": dict(num_beams=2, min_new_tokens=9, max_new_tokens=4),
  "forced_tokens has token 64, but the model's tokens are 0 … 61": dict(num_beams=2, forced_tokens=[64]),
  "forced_tokens must": dict(num_beams=2, forced_tokens=[-1]),
  "continuations has token 99": dict(num_beams=2, continuations=[[99]]),
  "holds the end token 61": dict(num_beams=2, continuations=[[5, 61]]),
  "forced_tokens are 3, there is room for 2": dict(forced_tokens=[4, 5, 6], max_new_tokens=2),
  r"continuations: \(7, 8\) takes 4 tokens with its end, there is room for 3": dict(
    forced_tokens=[4], continuations=[[7], [7, 8]], max_new_tokens=3
  ),
  "continuations: the tokenizer has no tokens": dict(num_beams=2, continuations=["A", "é"]),
  "there is none; give stop_token_ids": dict(num_beams=2, continuations=["A"], ignore_eos=True),
  "not a multiple of num_beam_groups 3": dict(num_beams=4, num_beam_groups=3),
  "n=3 hypotheses need as many beams": dict(num_beams=2, n=3),
  "length_penalty acts on a search alone": dict(length_penalty=0.5),
  "length_penalty must be a number": dict(num_beams=2, length_penalty=float("nan")),
  "length_norm must be": dict(num_beams=2, length_norm="words"),
  "early_stopping must be True, False or 'never'": dict(num_beams=2, early_stopping="always"),
  "patience acts where": dict(num_beams=2, patience=2.0),
  "patience must be above 0": dict(num_beams=2, patience=0, early_stopping=True),
  "diversity_penalty acts between groups": dict(num_beams=2, diversity_penalty=1.0),
  "use stop_token_ids": dict(num_beams=2, stop="x"),
  "use continuations": dict(num_beams=2, choice=["A", "B"]),
  "guidance_scale is not offered": dict(num_beams=2, guidance_scale=2.0),
  "best_of draws samples": dict(num_beams=2, best_of=3, temperature=1.0),
  "prompt_logprobs are not offered": dict(num_beams=2, prompt_logprobs=True),
  "explain tells of draws": dict(num_beams=2, explain=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused(lm, message):
  with Compilations() as compiled, pytest.raises(ValueError, match=message):
    lm.generate("HELLO", **REFUSED[message])
  assert compiled.count == 0


def test_a_stream_of_beams_is_refused_and_told_why(lm):
  with pytest.raises(ValueError, match="only at the end, since hypotheses overtake each other"):
    lm.stream("HELLO", num_beams=2)
  with pytest.raises(ValueError, match="only at the end"):
    lm.session().stream("HELLO", num_beams=2)


def test_rows_of_other_numbers_of_beams_are_refused(lm):
  with pytest.raises(ValueError, match="as many beams"):
    lm.generate(["A", "B"], [decoder.Settings(num_beams=2), decoder.Settings(num_beams=3)])


def test_padded_ids_are_never_written():
  """RAND-LM has 64 logits and this tokenizer 62 ids."""
  lm = facade(*rand_lm(), Letters.build())
  results = lm.generate("HELLO", num_beams=4, n=4, max_new_tokens=8, ignore_eos=True)
  assert all(token < 62 for result in results for token in result.token_ids)
