"""Prompts read apart from the drawing: shared by samples, told of token by token, scored."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from compiled_test import Compilations
from fixtures import ABE, Letters, facade, prompts, rand_lm, script_lm, table_lm

import decoder
from decoder.programs import Programs

WARM = dict(temperature=1.0, ignore_eos=True, max_new_tokens=12)


class Reads:
  """Counts the rows of each prompt read while open."""

  def __enter__(self):
    self.rows, self._before = [], Programs.begin
    begin = self._before

    def counted(programs, capacity, fields, cache=None):
      self.rows.append(int((fields["length_B"] > 0).sum()))
      return begin(programs, capacity, fields, cache)

    Programs.begin = counted
    return self

  def __exit__(self, *_):
    Programs.begin = self._before


# ---- samples share a prompt ----


def alone(lm, prompt, sample, **settings):
  """One sample with the prompt to itself, as a batch without sharing would draw it."""
  request = lm._group(prompt, decoder.Settings(n=sample + 1, **settings))[sample]
  decoding = lm.start([request])
  while not decoding.done:
    decoding.advance(64)
  return decoding.results(0.0)[0]


@pytest.mark.parametrize("length", [1, 5])
def test_C35_samples_that_share_a_prompt_draw_what_they_would_alone(lm, length):
  prompt = prompts([length], seed=length, size=60)[0]
  with Reads() as reads:
    three = lm.generate(prompt, n=3, seed=7, **WARM)
  assert reads.rows == [1], "the prompt is read once"
  assert len({r.token_ids for r in three}) == 3
  for sample, result in enumerate(three):
    assert (result.sample, result.token_ids) == (sample, alone(lm, prompt, sample, seed=7, **WARM).token_ids)
  two = lm.generate(prompt, n=2, seed=7, **WARM)
  assert [r.token_ids for r in two] == [r.token_ids for r in three[:2]]


def test_C35_shared_and_other_prompts_mix_with_other_settings(lm):
  """Rows find their own prompts, keys and settings."""
  each = [decoder.Settings(seed=1, n=2, **WARM), decoder.Settings(seed=2, **{**WARM, "max_new_tokens": 4})]
  each += [decoder.Settings(seed=3, logprobs=1, **WARM)]
  with Reads() as reads:
    (first, second), other, again = lm.generate(["ABC", "HELLO", "ABC"], each)
  assert reads.rows == [2], "three rows say ABC"
  assert first.token_ids == alone(lm, "ABC", 0, seed=1, **WARM).token_ids
  assert second.token_ids == alone(lm, "ABC", 1, seed=1, **WARM).token_ids
  assert other.token_ids == lm.generate("HELLO", each[1]).token_ids
  assert again.token_ids == lm.generate("ABC", each[2]).token_ids
  assert len(again.logprobs) == 12


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(guidance_scale=1.7, negative_prompt="QQ"), dict(regex="[A-C]{4}[X-Z]{2}")])
def test_C35_samples_share_a_prompt_under_guidance_and_constraints(lm, more):
  with Reads() as reads:
    three = lm.generate("ABC", n=3, seed=7, **WARM, **more)
  assert reads.rows == [1]
  assert len({r.token_ids for r in three}) == 3
  for sample, result in enumerate(three):
    assert result.token_ids == alone(lm, "ABC", sample, seed=7, **WARM, **more).token_ids


@pytest.mark.slow
def test_C35_rows_of_other_limits_do_not_share_where_rope_reads_the_limit():
  lm = facade(*rand_lm("dynamic"), Letters.build())
  settings = [decoder.Settings(seed=1, **{**WARM, "max_new_tokens": n}) for n in (4, 30, 30)]
  got = lm.generate(["ABCDEFGH"] * 3, settings)
  assert [r.token_ids for r in got] == [lm.generate("ABCDEFGH", s).token_ids for s in settings]


def test_sharing_compiles_nothing_a_second_time(lm):
  lm.generate("ABC", n=3, seed=1, **WARM)
  with Compilations() as compiled:
    lm.generate("DEFG", n=4, seed=2, **{**WARM, "temperature": 0.5})
  assert compiled.count == 0


# ---- prompts are told of ----


def test_echo_is_the_float64_oracles(lm):
  result = lm.generate("HELLO[THERE", prompt_logprobs=True, logprobs=3, max_new_tokens=4)
  law_TV = reference.log_softmax(reference.logits(result.prompt_ids))
  assert len(result.prompt_logprobs) == len(result.prompt_ids)
  assert result.prompt_logprobs[0] is None
  for one, token, law_V in zip(result.prompt_logprobs[1:], result.prompt_ids[1:], law_TV):
    order = np.argsort(-law_V, kind="stable")
    assert (one.id, order[one.rank - 1]) == (token, token)
    assert one.logprob == pytest.approx(law_V[token], abs=1e-4)
    assert [a.id for a in one.alternatives] == order[:3].tolist()
  plain = lm.generate("HELLO[THERE", max_new_tokens=4)
  assert plain.token_ids == result.token_ids
  assert plain.prompt_logprobs is None
  shifted = [one.logprob for one in result.prompt_logprobs[2:]]
  assert not np.allclose(shifted, [law_TV[n, t] for n, t in enumerate(result.prompt_ids[2:])]), "negative control"


@pytest.mark.slow
def test_echo_in_chunks_slices_batches_sessions_and_streams(lm, monkeypatch):
  """However a prompt is read, the same is told of it."""
  texts = ["ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 2, "Q", "XYZ"]
  want = [[one.logprob for one in r.prompt_logprobs[1:]] for r in lm.generate(texts, prompt_logprobs=True, **WARM)]
  monkeypatch.setattr("decoder.programs.Programs.chunk", 16)
  monkeypatch.setattr("decoder.strategies.telling.SLICE", 64 * 5)  # five rows of the head at a time
  other = facade(*rand_lm(), Letters.build())
  session = other.session()
  "".join(session.stream("ABCDEFGHIJ", max_new_tokens=2))
  streams = [
    other.stream(texts[0], prompt_logprobs=True, **WARM),
    session.stream(texts[0], prompt_logprobs=True, **WARM),
  ]
  for stream in streams:
    "".join(stream)
  results = [*other.generate(texts, prompt_logprobs=True, **WARM), *(stream.result for stream in streams)]
  for result, logprobs in zip(results, [*want, want[0], want[0]]):
    np.testing.assert_allclose([one.logprob for one in result.prompt_logprobs[1:]], logprobs, atol=1e-5)
  for got, one in zip(other.generate(texts[0], n=2, seed=3, **WARM), lm.generate(texts[0], n=2, seed=3, **WARM)):
    assert got.token_ids == one.token_ids, "samples share a prompt of several chunks too"


def test_echo_without_new_tokens_and_beside_those_who_ask_nothing(lm):
  only = lm.generate("HELLO", prompt_logprobs=True, max_new_tokens=0)
  assert (only.token_ids, only.finish_reason, len(only.prompt_logprobs)) == ((), "length", 6)
  each = [decoder.Settings(prompt_logprobs=True, max_new_tokens=0), decoder.Settings(seed=1, **WARM)]
  told, plain = lm.generate(["HELLO", "ABC"], each)
  np.testing.assert_allclose(
    [one.logprob for one in told.prompt_logprobs[1:]], [one.logprob for one in only.prompt_logprobs[1:]], atol=1e-5
  )
  assert (plain.prompt_logprobs, plain.token_ids) == (None, lm.generate("ABC", each[1]).token_ids)
  stream = lm.stream("HELLO", prompt_logprobs=True, max_new_tokens=0)
  assert (list(stream), len(stream.result.prompt_logprobs)) == ([], 6)


def test_C79_an_impossible_prompt_token_is_null_in_json():
  result = facade(*table_lm(ABE)).generate([1, 0, 2], prompt_logprobs=True, max_new_tokens=1)
  assert result.prompt_logprobs[1].logprob == -math.inf
  plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
  assert plain["prompt_logprobs"][0] is None
  assert plain["prompt_logprobs"][1]["logprob"] is None
  assert plain["prompt_logprobs"][2]["logprob"] == pytest.approx(math.log(0.35))


@pytest.mark.parametrize("tokens", [0, 3])
def test_C81_a_prompt_whose_logits_break_is_an_error(tokens):
  """Only the middle of the prompt is broken: what is drawn after it would not tell."""
  network, params = script_lm([5], 4, size=16)
  broken = network.model._replace(
    head=lambda params, x_BD: jnp.where(x_BD == 1, jnp.nan, network.model.head(params, x_BD))
  )
  lm = facade(network._replace(model=broken), params)
  result = lm.generate([1, 2, 3, 4], prompt_logprobs=True, max_new_tokens=tokens)
  assert (result.finish_reason, result.token_ids, result.prompt_logprobs[2]) == ("error", (), None)
  assert all(math.isfinite(result.prompt_logprobs[n].logprob) for n in (1, 3))
  with pytest.raises(FloatingPointError, match="token 2"):
    lm.score([1, 2], [3, 4])
  assert math.isfinite(lm.score([1, 2, 3], [4]).total), "what the prompt's own logits are is not asked"


# ---- scores ----


def test_scores_are_the_oracles_and_the_forced_decodings(lm):
  """One pass over the text equals drawing it token by token with everything else forbidden."""
  prompt, rest = prompts([4, 9], seed=3, size=60)
  got = lm.score(prompt, rest)
  law_TV = reference.log_softmax(reference.logits([*prompt, *rest]))
  want = [law_TV[3 + n, token] for n, token in enumerate(rest)]
  np.testing.assert_allclose([one.logprob for one in got.tokens], want, atol=1e-4)
  assert got.total == pytest.approx(sum(want), abs=1e-3)
  assert got.mean == pytest.approx(got.total / 9)

  from decoder.sampling import LogitTransform

  def force(logits_V, rest_N, context):
    return jnp.where(jnp.arange(logits_V.shape[0]) == rest_N[context.length - context.prompt], logits_V, -jnp.inf)

  link = LogitTransform(lambda: np.asarray(rest, np.int32), force)
  forced = lm.generate(prompt, transforms=(link,), logprobs=0, max_new_tokens=9, ignore_eos=True)
  assert list(forced.token_ids) == rest
  assert got.total == pytest.approx(sum(one.logprob for one in forced.logprobs), abs=1e-4)


def test_batched_scores_equal_single_ones_in_their_order(lm):
  pairs = list(zip(prompts([3, 30, 1, 7] * 3, 1, 60), prompts([20, 2, 5, 1] * 3, 2, 60)))
  together = lm.score([p for p, _ in pairs], [c for _, c in pairs], logprobs=2)
  for (prompt, rest), got in list(zip(pairs, together))[::3]:
    one = lm.score(prompt, rest, logprobs=2)
    assert [t.id for t in got.tokens] == rest
    assert got.total == pytest.approx(one.total, abs=1e-4)
    assert [[a.id for a in t.alternatives] for t in got.tokens] == [[a.id for a in t.alternatives] for t in one.tokens]
  with Compilations() as compiled:
    lm.score(*pairs[0], logprobs=2)
  assert compiled.count == 0


def test_one_prompt_with_several_continuations_is_a_choice():
  lm = facade(*table_lm(ABE))
  likely, unlikely, never = lm.score([0], [[1, 3], [3], [0, 1]])
  assert likely.total == pytest.approx(math.log(0.55 * 0.33), abs=1e-5)
  assert [t.rank for t in likely.tokens] == [1, 3], "the tie goes to the lower id"
  assert unlikely.total == pytest.approx(math.log(0.10), abs=1e-5)
  assert never.total == -math.inf


def test_texts_are_encoded_as_one(lm):
  got = lm.score("HELLO", "THERE")
  assert got.prompt_ids == (Letters.BOS, *lm.encode("HELLO", add_bos=False))
  assert "".join(t.token for t in got.tokens) == "THERE"
  whole = lm.score("", "HELLOTHERE")
  assert whole.prompt_ids == (Letters.BOS,)
  assert whole.tokens[-1].logprob == pytest.approx(got.tokens[-1].logprob, abs=1e-5)


@pytest.mark.parametrize(
  ("prompt", "rest", "says"),
  [
    ([1], [], "at least one"), (5, "A", "got 5"), ("A", "", "nothing to score"),
    ([1] * 200, [1] * 57, "257 tokens.* 256"),
    (["A", "B"], ["C"], "1 continuations for 2 prompts"), ([], [1], "at least one"), ([1], [99], "99"),
  ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(lm, prompt, rest, says):
  with pytest.raises(ValueError, match=says):
    lm.score(prompt, rest)
  with pytest.raises(ValueError, match="logprobs"):
    lm.score([1], [2], logprobs=-1)


def test_a_text_may_fill_the_context(lm):
  assert len(lm.score([1] * 200, [1] * 56).tokens) == 56
