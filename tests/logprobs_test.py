"""What a Result says of its tokens: log-probs, ranks, alternatives, explanations, and which samples are best."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from compiled_test import Compilations
from fixtures import facade, script_lm, table_lm

import decoder
from decoder.sampling import LogitTransform

WARM = dict(temperature=1.3, top_k=12, ignore_eos=True, max_new_tokens=20)
TEXTS = ["ABC", "HELLO[THERE", "Q"]


@pytest.fixture(scope="module")
def told(lm):
  return [lm.generate(text, seed=i, logprobs=3, **WARM) for i, text in enumerate(TEXTS)]


def logits(result):
  """float64 [T, V], what each drawn token was drawn by."""
  ids = [*result.prompt_ids, *result.token_ids]
  return reference.logits(ids)[len(result.prompt_ids) - 1 : len(ids) - 1]


def law(result):
  return reference.log_softmax(logits(result))


def test_raw_logprobs_are_the_float64_oracles(lm, told):
  for result in told:
    assert len(result.logprobs) == len(result.token_ids) == 20
    for one, token, law_V in zip(result.logprobs, result.token_ids, law(result)):
      assert (one.id, one.token, one.bytes) == (token, lm.tokenizer.decode([token], skip_special=False),
                                                lm.tokenizer.token_bytes(token))  # fmt: skip
      order = np.argsort(-law_V, kind="stable")
      assert one.logprob == pytest.approx(law_V[token], abs=1e-4)
      assert order[one.rank - 1] == token
      assert [a.id for a in one.alternatives] == order[:3].tolist()
      np.testing.assert_allclose([a.logprob for a in one.alternatives], law_V[order[:3]], atol=1e-4)


def test_processed_logprobs_are_of_what_was_drawn_from(lm, told):
  result = lm.generate(TEXTS[0], seed=0, logprobs=20, logprobs_mode="processed", **WARM)
  assert result.token_ids == told[0].token_ids
  for one, token, law_V in zip(result.logprobs, result.token_ids, law(result)):
    law_V = np.where(np.arange(64) < 62, law_V / WARM["temperature"], -np.inf)  # ids beyond the tokenizer
    law_V = np.where(law_V >= np.sort(law_V)[-12], law_V, -np.inf)
    law_V = reference.log_softmax(law_V)
    assert one.logprob == pytest.approx(law_V[token], abs=1e-4)
    finite = [a for a in one.alternatives if a.logprob > -math.inf]
    assert len(finite) == 12
    assert sum(math.exp(a.logprob) for a in finite) == pytest.approx(1, abs=1e-5)
    assert one.logprob != pytest.approx(told[0].logprobs[0].logprob, abs=1e-6), "negative control: another law"


def test_at_temperature_0_what_is_drawn_is_certain(lm):
  cold = dict(max_new_tokens=5, logprobs=2, ignore_eos=True)
  raw, processed = (lm.generate("ABC", logprobs_mode=mode, **cold) for mode in ("raw", "processed"))
  assert [one.logprob for one in processed.logprobs] == [0.0] * 5
  assert all(one.alternatives[1].logprob == -math.inf for one in processed.logprobs)
  assert [one.rank for one in raw.logprobs] == [1] * 5
  assert all(one.logprob < 0 for one in raw.logprobs)


def near(got, want):
  """The same tokens, ranks and alternatives; log-probs to rounding, which other batch shapes change."""
  assert [(t.id, t.rank, [a.id for a in t.alternatives]) for t in got] == [
    (t.id, t.rank, [a.id for a in t.alternatives]) for t in want
  ]
  np.testing.assert_allclose([t.logprob for t in got], [t.logprob for t in want], atol=1e-5)


def test_batch_equals_single_and_each_row_is_told_what_it_asked(lm, told):
  """C36's kind: other numbers of alternatives, other points and none at all beside it."""
  each = [decoder.Settings(seed=i, logprobs=3, **WARM) for i in range(3)]
  for got, want in zip(lm.generate(TEXTS, each), told):
    near(got.logprobs, want.logprobs)
  mixed = [
    each[0],
    decoder.Settings(seed=1, **WARM),
    decoder.Settings(seed=2, logprobs=0, logprobs_mode="processed", explain=True, **WARM),
  ]
  first, second, third = lm.generate(TEXTS, mixed)
  near(first.logprobs, told[0].logprobs)
  assert (second.token_ids, second.logprobs, second.explanation) == (told[1].token_ids, None, None)
  assert third.token_ids == told[2].token_ids
  assert {len(t.alternatives) for t in third.logprobs} == {0}
  assert len(third.explanation) == 20


def test_stream_equals_generate(lm, told):
  stream = lm.stream(TEXTS[1], seed=1, logprobs=3, **WARM)
  assert "".join(stream) == told[1].text
  near(stream.result.logprobs, told[1].logprobs)


def test_text_does_not_depend_on_what_is_asked(lm, told):
  plain = lm.generate(TEXTS[0], seed=0, **WARM)
  assert (plain.token_ids, plain.logprobs, plain.explanation) == (told[0].token_ids, None, None)


def test_other_numbers_compile_nothing(lm):
  numbers = [dict(logprobs=n, temperature=t, top_k=k) for n, t, k in ((2, 0.7, 3), (5, 1.1, None), (4, 0.0, 9))]
  lm.generate("ABC", **{**WARM, **numbers[0]})
  with Compilations() as compiled:
    for changes in numbers:
      result = lm.generate("ABC", **{**WARM, **changes})
      assert {len(one.alternatives) for one in result.logprobs} == {changes["logprobs"]}
  assert compiled.count == 0


def test_the_end_token_is_told_and_what_follows_a_stop_string_is_not(lm):
  scripted = facade(*script_lm([5, 1], 3), generation={"eos_token_id": [1]})
  result = scripted.generate([1, 2, 3], logprobs=1, max_new_tokens=9)
  assert result.token_ids == (5,)
  assert [(t.id, t.token, t.rank) for t in result.logprobs] == [(5, None, 1), (1, None, 1)]
  text = lm.generate(TEXTS[0], seed=0, **WARM).text
  stopped = lm.generate(TEXTS[0], seed=0, stop=text[9:11], logprobs=0, **WARM)
  assert stopped.finish_reason == "stop"
  assert [t.id for t in stopped.logprobs] == list(stopped.token_ids)
  assert len(stopped.token_ids) < 20


# ---- JSON and what is not finite ----


def odd(lift=False):
  """A transform that forbids even ids; or lifts id 4, which the model rules out."""
  if lift:
    return LogitTransform(lambda: np.float32(0), lambda x_V, s, c: jnp.where(jnp.arange(x_V.shape[0]) == 4, 99.0, x_V))
  return LogitTransform(
    lambda: np.float32(0), lambda x_V, s, c: jnp.where(jnp.arange(x_V.shape[0]) % 2 == 1, x_V, -jnp.inf)
  )


def impossible_four():
  """TABLE-LM of 8 ids, uniform but for 4, which is never next."""
  row = np.full(8, 1 / 7)
  row[4] = 0
  return facade(*table_lm(np.tile(row, (8, 1))))


@pytest.mark.parametrize(
  ("settings", "drawn_null"),
  [
    (dict(transforms=(odd(),), logprobs_mode="processed"), False),  # a masked token among the alternatives
    (dict(), False),  # an impossible token among the model's own
    (dict(transforms=(odd(lift=True),)), True),  # the drawn token itself
  ],
)
def test_C79_minus_infinity_becomes_null_in_json(settings, drawn_null):
  result = impossible_four().generate([1], logprobs=8, temperature=1.0, max_new_tokens=4, seed=3, **settings)
  text = json.dumps(result.to_json(), allow_nan=False)
  assert "Infinity" not in text
  assert "NaN" not in text
  for one, plain in zip(result.logprobs, json.loads(text)["logprobs"]):
    got = {a["id"]: a["logprob"] for a in plain["alternatives"]}
    assert got[4] is None
    assert (plain["logprob"] is None) == drawn_null == (one.logprob == -math.inf)


@pytest.mark.parametrize("text", ["ABC", "~Q", "[a"])
def test_C80_a_log_prob_needs_no_alternatives_and_has_the_bytes_of_its_token(lm, text):
  """`logprobs=0`, and what the text's tokens are in UTF-8, alternatives too."""
  bare = lm.generate(text, logprobs=0, max_new_tokens=6, temperature=1.0, seed=len(text))
  told = lm.generate(text, logprobs=2, max_new_tokens=6, temperature=1.0, seed=len(text))
  assert all(one.alternatives == () for one in bare.logprobs)
  assert [one.logprob for one in bare.logprobs] == pytest.approx([one.logprob for one in told.logprobs], abs=1e-5)
  for one in (*bare.logprobs, *told.logprobs, *(a for each in told.logprobs for a in each.alternatives)):
    padding = one.id >= lm.tokenizer.vocab_size  # the model's logits have two ids more than there are texts
    assert one.bytes == one.token.encode() == (b"" if padding else lm.tokenizer.token_bytes(one.id))
  plain = json.loads(json.dumps(told.to_json(), allow_nan=False))["logprobs"]
  assert [bytes(one["bytes"]) for one in plain] == [one.bytes for one in told.logprobs]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_C32_a_single_logit_that_is_not_finite_is_an_error(bad, place):
  """Not a row of them: one id's, be it the first, the last or between."""
  network, params = table_lm(np.full((8, 8), 1 / 8))
  lm = facade(network, {"log": params["log"].at[1, place].set(bad)})
  for settings in (dict(temperature=0.0), dict(temperature=1.0, seed=1, top_k=3)):
    result, well = lm.generate([[5, 1], [5, 2]], max_new_tokens=3, allowed_tokens=[2, 4], **settings)
    assert (result.finish_reason, result.token_ids) == ("error", ())
    assert (well.finish_reason, len(well.token_ids)) == ("length", 3)


@pytest.fixture(scope="module")
def sick():
  """TABLE-LM whose logits are NaN after token 1 and infinite after token 2."""
  network, params = table_lm(np.full((8, 8), 1 / 8))
  bad_V = jnp.zeros(8).at[1].set(jnp.nan).at[2].set(jnp.inf)
  return facade(network, {"log": params["log"] + bad_V[:, None]})


@pytest.mark.parametrize("prompt", [[5, 1], [5, 2]])
@pytest.mark.parametrize("asked", [dict(logprobs=2), dict(logprobs=0, logprobs_mode="processed", explain=True)])
def test_C81_logits_that_are_not_finite_are_an_error_and_never_a_number(sick, prompt, asked):
  """A broken row beside a sound one, which says 0 for ever."""
  result, well = sick.generate([prompt, [5, 0]], temperature=0.0, max_new_tokens=2, **asked)
  assert (result.finish_reason, result.token_ids, result.logprobs) == ("error", (), ())
  assert result.explanation in (None, ())
  assert [t.logprob for t in well.logprobs] == pytest.approx(
    [math.log(1 / 8)] * 2 if "explain" not in asked else [0, 0]
  )
  json.dumps(result.to_json(), allow_nan=False)


def test_C81_a_script_that_breaks_midway_keeps_what_was_sound():
  network, params = script_lm([5, 6, 7], 1, size=16)
  broken = network.model._replace(
    head=lambda params, x_BD: jnp.where(x_BD >= 2, jnp.nan, network.model.head(params, x_BD))
  )
  result = facade(network._replace(model=broken), params).generate([1], logprobs=1, max_new_tokens=5)
  assert (result.finish_reason, result.token_ids) == ("error", (5, 6))
  assert [t.id for t in result.logprobs] == [5, 6]
  assert all(t.logprob <= 0 for t in result.logprobs)


# ---- best of ----


def test_best_of_gives_the_samples_of_highest_mean_logprob(lm):
  settings = dict(seed=5, logprobs=0, temperature=1.5, max_new_tokens=12)
  every = lm.generate("ABC", n=6, **settings)
  means = [np.mean([t.logprob for t in result.logprobs]) for result in every]
  order = sorted(range(6), key=lambda i: -means[i])
  best = lm.generate("ABC", n=2, best_of=6, **settings)
  assert [r.sample for r in best] == order[:2] != [0, 1]
  assert [r.token_ids for r in best] == [every[i].token_ids for i in order[:2]]
  alone = lm.generate("ABC", best_of=6, **{**settings, "logprobs": None})
  assert (alone.token_ids, alone.logprobs) == (best[0].token_ids, None)


def test_best_of_goes_by_the_model_whatever_is_reported():
  """A transform turns the model's preference round: by the processed law the other sample would win."""
  lm = facade(*table_lm(np.tile([[0.7, 0.2, 0.1]], (3, 1))))
  against = LogitTransform(lambda: np.float32(0), lambda x_V, s, c: x_V - jnp.asarray([5.0, 0.0, 0.0]))
  settings = dict(transforms=(against,), temperature=2.0, max_new_tokens=3, seed=1, logprobs=0)
  every = lm.generate([1], n=16, **settings)
  best = lm.generate([1], best_of=16, logprobs_mode="processed", **{**settings, "logprobs": 0})
  raw = [sum(t.logprob for t in r.logprobs) for r in every]
  assert best.sample == int(np.argmax(raw))


# ---- explain ----


def test_explain_tells_what_the_oracles_chain_does(lm, told):
  """Counts and probabilities by link, recomputed in float64."""
  settings = dict(WARM, min_p=0.1, repetition_penalty=1.4)
  result = lm.generate(TEXTS[1], seed=1, explain=True, **settings)
  seen = set(result.prompt_ids)
  for step, token, logits_V in zip(result.explanation, result.token_ids, logits(result)):
    stages = chain_oracle(logits_V, seen, settings)
    named = {change.transform: change for change in step.changes}
    before_V = logits_V
    for name, x_V in stages.items():
      change = named[name]
      kept, had = x_V > -np.inf, before_V > -np.inf
      assert change.kept == kept.sum(), name
      assert change.removed == (had & ~kept).sum()
      assert change.best_removed == (~kept[np.argmax(before_V)])
      assert change.probability == pytest.approx(np.exp(reference.log_softmax(x_V))[token], abs=1e-5)
      before_V = x_V
    assert sum(change.removed for change in step.changes) == 64 - step.kept, "no link besides these did anything"
    assert step.before == pytest.approx(np.exp(reference.log_softmax(logits_V))[token], abs=1e-5)
    assert (step.after, step.kept) == (named["min_p"].probability, named["min_p"].kept)
    seen.add(token)
  assert any(step.kept < 12 for step in result.explanation), "min_p had something to do"


def chain_oracle(logits_V, seen, settings):
  """Logits after the masks and after each link that is on, one by one."""
  x_V = np.where(np.arange(64) < 62, logits_V, -np.inf)
  stages, penalty = {"masks": x_V}, settings["repetition_penalty"]
  less_V = np.where(x_V < 0, x_V * penalty, x_V / penalty)
  stages["repetition"] = np.where(np.isin(np.arange(64), list(seen)), less_V, x_V)
  stages["temperature"] = stages["repetition"] / settings["temperature"]
  order = np.argsort(-stages["temperature"], kind="stable")
  top = np.isin(np.arange(64), order[: settings["top_k"]])
  stages["top_k"] = np.where(top, stages["temperature"], -np.inf)
  x_V = stages["top_k"]
  stages["min_p"] = np.where(x_V - x_V.max() >= np.log(settings["min_p"]), x_V, -np.inf)
  return stages


def test_explain_says_which_transform_took_the_favourite():
  lm = facade(*table_lm(np.tile([[0.1, 0.2, 0.6, 0.1]], (4, 1))))

  def ban_two(x_V, state, context):
    return jnp.where(jnp.arange(x_V.shape[0]) == 2, -jnp.inf, x_V)

  ban = LogitTransform(lambda: np.float32(0), ban_two)
  step = lm.generate([1], transforms=(ban,), max_new_tokens=1, explain=True).explanation[0]
  took = [change for change in step.changes if change.best_removed]
  assert [(change.transform, change.removed, change.kept) for change in took] == [("ban_two", 1, 3)]
  assert (step.id, step.after) == (1, 1.0)
  assert step.before == pytest.approx(0.2)
  plain = lm.generate([1], max_new_tokens=1, explain=True).explanation[0]
  assert not any(change.best_removed for change in plain.changes), "negative control"


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    (dict(logprobs=-1), "logprobs"), (dict(logprobs=True), "logprobs"), (dict(logprobs=1001), "logprobs"),
    (dict(logprobs_mode="cooked"), "logprobs_mode"), (dict(prompt_logprobs=1), "prompt_logprobs"),
    (dict(explain="yes"), "explain"), (dict(best_of=1, n=2), "best_of"), (dict(best_of=2, temperature=0), "best_of=2"),
  ],
)  # fmt: skip
def test_what_makes_no_sense_is_named(changes, says):
  with pytest.raises(ValueError, match=says):
    decoder.Settings(**{"temperature": 1.0, **changes})


def test_a_stream_writes_one_sample(lm):
  with pytest.raises(ValueError, match="n or best_of of 3"):
    lm.stream("A", best_of=3, temperature=1.0)
