"""Settings of the draw through the façade: mixed batches, no recompilation, what is refused, what is reported."""

import functools
import json

import numpy as np
import pytest
from compiled_test import Compilations
from fixtures import Letters, facade, rand_lm, script_lm, table_lm
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import decoder
from decoder.programs import Programs

WARM = dict(temperature=1.0, ignore_eos=True, max_new_tokens=12)
RARE = [
  dict(typical_p=0.7), dict(bad_words=[[i] for i in range(20)]), dict(mirostat_tau=2.0, mirostat_eta=0.2),
  dict(dry_multiplier=1.0, dry_breakers=[3]), dict(xtc_probability=0.5, xtc_threshold=0.02),
  dict(logit_bias={4: 3.0, 9: -5.0}), dict(dynatemp_range=0.4), dict(no_repeat_ngram_size=1, top_n_sigma=1.5),
]  # fmt: skip


@functools.cache
def both():
  """RAND-LM whose full chain is compiled for one row and for two."""
  lm = facade(*rand_lm(), Letters.build())
  lm.generate("THERE", **WARM, typical_p=0.9)
  lm.generate(["A", "B"], **WARM, typical_p=0.9)
  return lm


@pytest.mark.slow
def test_a_batch_may_mix_any_settings_and_each_row_is_as_if_alone(lm):
  """A plain request draws the same under the short chain, alone, as under the full one, beside another."""
  plain = decoder.Settings(**WARM, seed=3, top_k=9, repetition_penalty=1.2)
  alone = lm.generate("HELLO", plain)
  for number, rare in enumerate(RARE):
    asked = decoder.Settings(**WARM, seed=number, **rare)
    mixed = both().generate(["HELLO", "THERE"], [plain, asked])
    assert mixed[0].token_ids == alone.token_ids
    assert mixed[1].token_ids == both().generate("THERE", asked).token_ids


@pytest.mark.slow
def test_nothing_recompiles_once_the_full_chain_is_there():
  lm = both()
  with Compilations() as compiled:
    for number, rare in enumerate(RARE):
      lm.generate("THERE", **WARM, seed=number, **rare)
      lm.generate(["A", "B"], [decoder.Settings(**WARM, **rare), decoder.Settings(top_p=0.5, temperature=2.0)])
  assert compiled.count == 0


def test_plain_requests_keep_the_short_chain(monkeypatch):
  """What they compile and run is what they need."""
  made = []
  before = Programs.__init__

  def noted(self, network, params, settings, full, *rest):
    made.append((full, len(settings.chain(full).update.links)))
    before(self, network, params, settings, full, *rest)

  monkeypatch.setattr(Programs, "__init__", noted)
  lm = facade(*rand_lm(), Letters.build())
  lm.start([lm.request("A", temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)])
  lm.start([lm.request("A", temperature=0.7, eta_cutoff=0.1)])
  assert [full for full, _ in made] == [False, True]
  assert made[0][1] == 5


def test_rows_of_other_orders_are_refused(lm):
  with pytest.raises(ValueError, match="same order"):
    lm.generate(["A", "B"], [decoder.Settings(preset="hf"), decoder.Settings()])


def test_C29_penalties_act_before_the_argmax_and_the_response_says_so():
  """SCRIPT-LM copies; DRY and no-repeat break a copy even at temperature 0, and the result tells."""
  script = [5, 6, 7, 5, 6, 7, 5, 6, 7]
  lm = facade(*script_lm(script, 3))
  asked = dict(max_new_tokens=9)
  copied = lm.generate([1, 2, 3], **asked)
  assert list(copied.token_ids) == script
  assert [link["name"] for link in copied.settings.describe()["chain"]] == ["temperature"]
  for change, name in ((dict(dry_multiplier=100.0), "dry"), (dict(no_repeat_ngram_size=2), "no_repeat_ngram"),
                       (dict(frequency_penalty=100.0), "frequency")):  # fmt: skip
    other = lm.generate([1, 2, 3], **asked, **change)
    assert list(other.token_ids) != script
    (said,) = [link for link in other.settings.describe()["chain"] if link["name"] == name]
    assert said[next(iter(change))] == next(iter(change.values()))


@pytest.mark.parametrize(("logit", "penalty", "want"), [(2.0, 2.0, 1.0), (-3.0, 2.0, -6.0), (0.5, 0.25, 2.0)])
def test_C30_the_repetition_penalty_is_on_logits(logit, penalty, want):
  from sampling.full_chain_test import run
  from sampling.oracle import Row

  logits = np.array([logit, 1.0] + [-1.0] * 15)
  left = run(dict(temperature=1.0, repetition_penalty=penalty), logits, Row((0,), 1))
  assert left[0] - left[1] == pytest.approx(want - 1.0, abs=1e-5)
  log_probability = logits[0] - np.log(np.exp(logits).sum())  # where transformers' beam search has it
  assert left[0] - left[1] != pytest.approx(log_probability * penalty - (logits[1] - logits[0] + log_probability))


def test_C54_no_end_id_of_any_source_before_min_new_tokens():
  """Ends 1 and 106 by the generation config, none by a tokenizer; a model that always wants to end."""
  table = np.full((128, 128), 1e-6)
  table[:, 1], table[:, 106], table[:, 5:9] = 10.0, 9.0, 0.01
  lm = facade(*table_lm(table), generation={"eos_token_id": [1, 106]})
  assert lm.generate([3], max_new_tokens=20).token_ids == ()
  for number in (1, 5, 9):
    result = lm.generate([3], max_new_tokens=20, min_new_tokens=number)
    assert len(result.token_ids) == number
    assert (result.finish_reason, result.stop_reason) == ("stop", 1)
    drawn = lm.generate([3], max_new_tokens=20, min_new_tokens=number, temperature=1.0, seed=1)
    assert len(drawn.token_ids) >= number
    assert not {1, 106} & set(drawn.token_ids)


def test_forced_tokens_stand_at_the_ends_of_the_output():
  lm = facade(*table_lm(np.full((16, 16), 1 / 16)))
  result = lm.generate([3, 3], max_new_tokens=6, temperature=1.0, seed=0, forced_bos=4, forced_eos=9)
  assert (result.token_ids[0], result.token_ids[-1], len(result.token_ids)) == (4, 9, 6)
  result = lm.generate([3, 3], max_new_tokens=4, temperature=1.0, allowed_tokens=[2, 5], begin_suppress_tokens=[2])
  assert result.token_ids[0] == 5
  assert set(result.token_ids) <= {2, 5}


def test_the_result_states_the_chain_in_its_order(lm):
  settings = dict(preset="llamacpp", temperature=0.8, top_k=40, min_p=0.05, repetition_penalty=1.1, logit_bias={3: 1.0})
  described = lm.generate("A", max_new_tokens=2, **settings).to_json()["settings"]
  json.dumps(described, allow_nan=False)
  assert [link.pop("name") for link in described["chain"]] == [
    "logit_bias", "repetition", "top_k", "min_p", "temperature"
  ]  # fmt: skip
  assert described["chain"][1] == {"repetition_penalty": 1.1, "repetition_scope": 64}


REFUSED = [
  (dict(min_new_tokens=5, max_new_tokens=4), "min_new_tokens 5 > max_new_tokens 4"),
  (dict(temperature=1.0, mirostat_tau=3.0, top_k=5), "mirostat_tau .* top_k"),
  (dict(mirostat_tau=3.0), "mirostat_tau .*temperature"),
  (dict(dynatemp_range=0.5), "dynatemp_range .*temperature"),
  (dict(allowed_tokens=[]), "allowed_tokens must hold"),
  (dict(allowed_tokens=[3], suppress_tokens=[3, 4]), "allowed_tokens leaves no token"),
  (dict(allowed_tokens=3), "allowed_tokens must be a list"),
  (dict(bad_words=[[]]), "bad_words must hold"),
  (dict(bad_words=[["ab"]]), "bad_words must"),
  (dict(bad_words=[""]), "bad_words must"),
  (dict(logit_bias=[3]), "logit_bias must be a mapping"),
  (dict(logit_bias={-1: 3.0}), "logit_bias must hold token ids"),
  (dict(logit_bias={1: float("nan")}), "logit_bias must be"),
  (dict(sequence_bias={3: 1.0}), "sequence_bias must be a list"),
  (dict(length_decay=3), "length_decay must be"),
  (dict(length_decay=(3, -1.0)), "length_decay must be"),
  (dict(repetition_scope="prompt"), "repetition_scope must be"),
  (dict(penalty_scope=0), "penalty_scope must be"),
  (dict(dry_base=0.5), "dry_base must be"),
  (dict(dry_multiplier=True), "dry_multiplier must be"),
  (dict(typical_p=0), "typical_p must be"),
  (dict(eta_cutoff=1.0), "eta_cutoff must be"),
  (dict(epsilon_cutoff="a"), "epsilon_cutoff must be"),
  (dict(xtc_probability=1.5), "xtc_probability must be"),
  (dict(top_n_sigma=-1), "top_n_sigma must be"),
  (dict(no_repeat_ngram_size=1.5), "no_repeat_ngram_size must be"),
  (dict(forced_bos="a"), "forced_bos must hold"),
  (dict(suppress_tokens=[True]), "suppress_tokens must hold"),
]


@pytest.mark.parametrize(("asked", "named"), REFUSED)
def test_what_makes_no_sense_is_refused_by_name(asked, named):
  with pytest.raises(ValueError, match=named):
    decoder.Settings(**asked)


@pytest.mark.parametrize(
  "asked",
  [
    dict(forced_eos=62), dict(bad_words=[[1, 62]]), dict(logit_bias={99: 1.0}), dict(sequence_bias={(1, 63): 1.0}),
    dict(allowed_tokens=[1, 63]), dict(suppress_tokens=[64]), dict(dry_multiplier=1.0, dry_breakers=[100]),
  ],
)  # fmt: skip
def test_ids_beyond_the_vocabulary_are_refused(lm, asked):
  """62 tokens; the network's two more are padding."""
  with pytest.raises(ValueError, match=r"has token \d+, but the model's tokens are 0 … 61"):
    lm.generate("A", **asked)


def test_settings_are_copies():
  bias, banned = {3: 1.0}, [[1, 2]]
  settings = decoder.Settings(logit_bias=bias, bad_words=banned)
  bias[4], banned[0] = 2.0, [9]
  assert settings.logit_bias == {3: 1.0}
  assert settings.bad_words == ((1, 2),)


def test_what_json_gives_means_the_same():
  """It has no ids as keys: pairs instead, as described settings have them."""
  settings = decoder.Settings(temperature=1.0, logit_bias={3: 1.0}, sequence_bias={(1, 2): -1.0}, bad_words=[(4,)])
  again = json.loads(json.dumps(settings.describe()))
  names = ("logit_bias", "sequence_bias", "bad_words")
  assert decoder.Settings(temperature=1.0, **{name: again[name] for name in names}) == settings


ANY = st.fixed_dictionaries({}, optional={
  "temperature": st.sampled_from([0.0, 0.3, 1.0, 1e-30, 1e30]), "top_k": st.sampled_from([None, 0, 1, 7, 10**9]),
  "top_p": st.sampled_from([None, 0.0, 0.3, 1.0]), "min_p": st.sampled_from([0.0, 0.3, 1.0]),
  "typical_p": st.sampled_from([0.1, 0.9]), "epsilon_cutoff": st.sampled_from([0.1, 0.9]),
  "eta_cutoff": st.sampled_from([0.1, 0.9]), "top_n_sigma": st.sampled_from([0.1, 3.0]),
  "xtc_probability": st.sampled_from([0.5, 1.0]), "mirostat_tau": st.sampled_from([0.1, 5.0]),
  "dynatemp_range": st.sampled_from([0.5, 5.0]), "repetition_penalty": st.sampled_from([1e-3, 1.3, 1e6]),
  "repetition_scope": st.sampled_from(["all", "output", 3, -1]), "presence_penalty": st.sampled_from([-2.0, 2.0, 1e30]),
  "frequency_penalty": st.sampled_from([-2.0, 2.0]), "dry_multiplier": st.sampled_from([1.0, 1e20]),
  "dry_base": st.sampled_from([1.0, 4.0]), "no_repeat_ngram_size": st.integers(0, 4),
  "logit_bias": st.dictionaries(st.integers(0, 70), st.sampled_from([-9.0, 1e20])),
  "bad_words": st.lists(st.lists(st.integers(0, 61), max_size=3), max_size=3),
  "allowed_tokens": st.one_of(st.none(), st.lists(st.integers(0, 61))),
  "suppress_tokens": st.lists(st.integers(0, 61)), "min_new_tokens": st.integers(0, 9),
  "forced_bos": st.sampled_from([None, 0, 61, 62]), "forced_eos": st.sampled_from([None, 3]),
  "length_decay": st.sampled_from([None, (1, 1.5), (0, 100.0)]),
})  # fmt: skip


@given(ANY, st.integers(0, 9))
@examples(max_examples=150, deadline=None, derandomize=True)
def test_any_settings_run_or_are_refused_by_name(asked, seed):
  try:
    request = both().request("AB", seed=seed, max_new_tokens=6, **asked)
  except ValueError:
    with pytest.raises(ValueError, match="|".join(name.split("_")[0] for name in asked)):
      both().request("AB", seed=seed, max_new_tokens=6, **asked)
    return
  decoding = both().start([request])
  while not decoding.done:
    decoding.advance(6)
  (result,) = decoding.results(0.0)
  assert result.finish_reason in ("stop", "length", "error")
  assert len(result.token_ids) <= 6
  json.dumps(result.to_json(), allow_nan=False)
