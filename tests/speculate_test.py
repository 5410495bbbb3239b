"""Guessing ahead behind the façade: the same texts, figures and reports as without, in fewer steps."""

import pytest
from compiled_test import Compilations

import decoder
from decoder import Settings

WARM = dict(temperature=1.0, ignore_eos=True, max_new_tokens=40)
AHEAD = dict(speculate="lookup", draft_tokens=3)
TEXTS = ["ABCABCABCABC", "HELLO[THERE", "Q", "the_quick_brown_fox"]
COLD = dict(max_new_tokens=40, ignore_eos=True)  # greedy texts of a small model go in circles


def same(got, want):
  assert (got.text, got.token_ids, got.finish_reason, got.stop_reason, got.truncated) == (
    want.text, want.token_ids, want.finish_reason, want.stop_reason, want.truncated,
  )  # fmt: skip


def test_texts_of_a_ragged_batch_are_those_of_plain_decoding(lm):
  each = [Settings(seed=n, **WARM) if n % 2 else Settings(**COLD) for n in range(4)]
  ahead = [Settings(seed=n, **WARM, **AHEAD) if n % 2 else Settings(**COLD, **AHEAD) for n in range(4)]
  for got, want in zip(lm.generate(TEXTS, ahead), lm.generate(TEXTS, each)):
    same(got, want)
    assert want.speculated is None
    told = got.speculated
    assert 0 <= told.accepted <= told.drafted
    assert len(got.token_ids) == 1 + told.steps + told.accepted


@pytest.mark.slow
def test_a_text_that_repeats_itself_takes_fewer_steps(lm):
  """Two tokens to choose from, the most probable each time: soon it goes in a circle."""
  narrow = dict(COLD, allowed_tokens=[1, 2])
  got = lm.generate(TEXTS[0], **narrow, **AHEAD)
  same(got, lm.generate(TEXTS[0], **narrow))
  assert got.speculated.accepted > 10
  assert got.speculated.steps < 30


@pytest.mark.parametrize(
  "stop", [{"stop": "A"}, {"stop_token_ids": [5]}, {"stop": ("AB", "c"), "include_stop": True}, {}]
)
def test_streams_and_stops(lm, stop):
  for seed in range(4):
    want = lm.generate("ABCABC", seed=seed, **{**WARM, "ignore_eos": False}, **stop)
    stream = lm.stream("ABCABC", seed=seed, **{**WARM, "ignore_eos": False}, **stop, **AHEAD)
    assert "".join(stream) == want.text
    same(stream.result, want)


def test_samples_log_probs_and_explanations(lm):
  asked = dict(WARM, seed=3, logprobs=2, explain=True, top_k=9, repetition_penalty=1.2)
  plain = lm.generate(TEXTS[0], n=2, **asked)
  for got, want in zip(lm.generate(TEXTS[0], n=2, **asked, **AHEAD), plain):
    same(got, want)
    assert [token.id for token in got.logprobs] == [token.id for token in want.logprobs]
    assert [token.logprob for token in got.logprobs] == pytest.approx(
      [token.logprob for token in want.logprobs], abs=1e-4
    )
    assert [told.kept for told in got.explanation] == [told.kept for told in want.explanation]
  told = lm.generate(TEXTS[0], prompt_logprobs=True, **COLD, **AHEAD)
  assert told.prompt_logprobs[1].logprob == pytest.approx(
    lm.generate(TEXTS[0], prompt_logprobs=True, **COLD).prompt_logprobs[1].logprob, abs=1e-4
  )


def test_a_session_goes_on_from_what_was_kept(lm):
  session = lm.session(capacity=64)
  said = [1, 2, 3, 1, 2]
  for number in range(3):
    want = lm.generate(said, seed=number, **{**WARM, "max_new_tokens": 9})
    stream = session.stream(said, seed=number, **{**WARM, "max_new_tokens": 9}, **AHEAD)
    assert "".join(stream) == want.text
    said = [*said, *want.token_ids, 9]
    assert session.held == len(said) - 2


def test_c40_the_seed_has_its_effect(lm):
  """C40: speculation on, T=1, seeds 0 … 19: more than one text, and the same for the same seed."""
  texts = [lm.generate(TEXTS[0], seed=seed, **{**WARM, "max_new_tokens": 12}, **AHEAD).token_ids for seed in range(20)]
  assert len(set(texts)) > 10
  for seed in (0, 7, 19):
    assert lm.generate(TEXTS[0], seed=seed, **{**WARM, "max_new_tokens": 12}, **AHEAD).token_ids == texts[seed]


def test_c40_seeds_of_a_batch_belong_to_its_rows(lm):
  each = [Settings(seed=seed, **{**WARM, "max_new_tokens": 12}, **AHEAD) for seed in (5, 6, 5)]
  first, second, third = lm.generate(["AB"] * 3, each)
  assert first.token_ids == third.token_ids != second.token_ids


@pytest.mark.slow
def test_c92_the_context_is_never_passed(lm):
  got = lm.generate(TEXTS[0], capacity=20, **{**COLD, "max_new_tokens": None}, **AHEAD)
  same(got, lm.generate(TEXTS[0], capacity=20, **{**COLD, "max_new_tokens": None}))
  assert got.truncated == "context"


def test_nothing_recompiles_while_acceptance_varies(lm):
  lm.generate(TEXTS[0], **COLD, **AHEAD)
  with Compilations() as compiled:
    for seed in range(3):
      lm.generate(TEXTS[1], seed=seed, **WARM, **AHEAD)
      lm.generate(TEXTS[0], **COLD, **AHEAD)
  assert compiled.count == 0


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"speculate": "luck"}, "speculate must be 'off', 'lookup'"),
    ({"draft_tokens": 4}, "draft_tokens must be 1, 3 or 7"),
    ({"draft_tokens": 0}, "draft_tokens must be 1, 3 or 7"),
    ({"speculate": "lookup", "num_beams": 2}, "not offered together with beams"),
    ({"speculate": "lookup", "guidance_scale": 2.0}, "not offered together with guidance_scale"),
  ],
)
def test_what_is_not_offered_is_said(wrong, message):
  with pytest.raises(ValueError, match=message):
    decoder.Settings(**wrong)
