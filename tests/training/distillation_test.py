"""A head learns what a model says from texts that it wrote, and drafts as it was trained to."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from companions import head_module, small_head, start
from fixtures import CONFIG, V, cache_for, facade, prompts, rand_lm

import decoder
from decoder import checkpoint
from decoder.sampling import chain, temperature
from decoder.strategies import Both, accompanied
from decoder.training import distillation, gathering, loop
from decoder.training.distillation import Plan, frequent, told, train, unroll
from decoder.training.gathering import Texts

PLAN = Plan(steps=60, tokens=48, guesses=2, texts=8, rate=3e-3, warm_up=5, held_out=16, every=30)
TEXTS, LENGTH, ROWS = 64, 40, 16


def asked(stop=None):
  """Prompts of ids without end, or until a kill."""
  for number in itertools.count():
    if number == stop:
      raise KeyboardInterrupt
    yield prompts([3 + number % 5], seed=number, size=V - 2)[0]


def gathered(out, stop=None, **more):
  network, params = rand_lm()
  return gathering.gather(
    network, params, (), asked(stop), out, **dict(texts=TEXTS, length=LENGTH, rows=ROWS, progress=False) | more
  )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  return gathered(tmp_path_factory.mktemp("texts"))


def test_texts_are_what_the_model_writes_and_features_what_it_finds(texts):
  network, params = rand_lm()
  lm = facade(network, params)
  for row in (0, 2, 34):  # at temperature 0
    ids, (begin, end) = texts.ids_NL[row], texts.spans_N2[row]
    want = lm.generate(ids[:begin].tolist(), max_new_tokens=int(end - begin)).token_ids
    assert ids[begin:end].tolist() == list(want)
  assert len({tuple(ids[begin : begin + 9]) for ids, (begin, _) in zip(texts.ids_NL, texts.spans_N2)}) > TEXTS / 2
  place = np.where(np.arange(LENGTH) < texts.spans_N2[:4, 1:] - 1, np.arange(LENGTH)[None], -1)
  features, _ = network.model.forward(
    params, jnp.maximum(texts.ids_NL[:4], 0), jnp.asarray(place), cache_for(network, 4, LENGTH)
  )
  there = (place >= 0)[..., None]
  np.testing.assert_allclose(texts.features_NLD[:4] * there, np.asarray(features) * there, atol=5e-3)  # float16
  assert not texts.features_NLD[:4][place < 0].any()


def test_killed_it_goes_on_to_the_same_texts(texts, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    gathered(tmp_path, stop=2 * ROWS + 5)
  assert len(gathering.read_texts(tmp_path).ids_NL) == 2 * ROWS
  again = gathered(tmp_path)
  for mine, whole in zip(again, texts):
    np.testing.assert_array_equal(mine, whole)
  with pytest.raises(ValueError, match="seed 0, now 5; give another directory"):
    gathered(tmp_path, seed=5)


def test_prompts_fill_every_template_before_any_pair_comes_again():
  given = list(itertools.islice(gathering.filled(["a {topic}", "b {topic}?"], ["x", "y", "z"], 1), 12))
  assert sorted(given[:6]) == sorted(given[6:]) == ["a x", "a y", "a z", "b x?", "b y?", "b z?"]


def test_the_most_frequent_tokens_are_counted_in_what_was_written_alone():
  ids = np.array([[5, 5, 5, 1, 2, 2], [9, 9, 1, 2, 3, -1]])
  texts = Texts(ids, np.array([[3, 6], [2, 5]]), np.zeros((2, 6, 1)))
  assert frequent(texts, 2).tolist() == [1, 2]
  assert frequent(texts, 3, always=(7,)).tolist() == [1, 2, 7]
  assert frequent(texts, 9, always=(7,)).tolist() == [1, 2, 3, 7], "5 and 9 stand in prompts alone"


@pytest.mark.slow
def test_in_training_a_head_guesses_as_it_does_while_it_drafts():
  """Pass s at a token is guess s of a chain that began s − 1 tokens before it."""
  network, params = rand_lm()
  module, head = head_module()
  companion, _ = small_head()
  model, both = accompanied(network.model, companion), Both(params, head)
  ids, place = jnp.asarray(prompts([20])), jnp.arange(20)[None]
  features, _ = network.model.forward(params, ids, place, cache_for(network, 1, 32))
  passes = unroll(module, head, params["embed"]["weight"][ids], features, 3)
  said = [found @ params["embed"]["weight"][::2].T for found in passes]
  for first in (0, 1, 7, 15):
    cache = start(network, companion, [[1]], [30], chain(temperature(1.0)), capacity=32).cache
    if first:
      _, cache = model.forward(both, ids[:, :first], place[:, :first], cache)
    memory = cache.memory
    for guess in range(3):
      at = first + guess
      logits, _, memory = companion.guess(both, ids[:, at], jnp.array([at]), memory)
      np.testing.assert_allclose(logits[0, ::2], said[guess][0, at], rtol=2e-4, atol=2e-4)
  assert not np.allclose(said[1][0, 9], said[0][0, 9], atol=1e-2), "negative control: passes differ"


def test_shares_kept_are_what_two_laws_have_in_common():
  _, params = rand_lm()
  module, head = head_module()
  rng = np.random.default_rng(0)
  features, vectors = (jnp.asarray(rng.normal(size=(2, 6, 32)), jnp.float32) for _ in range(2))
  table = params["embed"]["weight"][:10]
  asked = jnp.asarray(rng.random((2, 6)) < 0.6)
  sums = told(module, head, distillation.Lesson(vectors, features, asked, table), 1)
  q = jax.nn.softmax(unroll(module, head, vectors, features, 1)[0] @ table.T)
  p = jax.nn.softmax(features @ table.T)
  assert float(sums.number_S[0]) == asked.sum()
  assert float(sums.kept_S[0]) == pytest.approx(float((jnp.minimum(p, q).sum(-1) * asked).sum()), rel=1e-4)
  assert float(sums.loss_S[0]) == pytest.approx(float((-(p * jnp.log(q)).sum(-1) * asked).sum()), rel=1e-4)


def run(texts, out, plan=PLAN):
  network, params = rand_lm()
  return train(plan, texts, network, params, CONFIG, (V - 3,), out, progress=False)


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
  out = tmp_path_factory.mktemp("run")
  return out, run(texts, out)


@pytest.mark.slow
def test_it_learns_and_drafts_for_its_model(trained):
  out, head = trained
  log = loop.read_log(out)
  assert [line["step"] for line in log] == [30, 60]
  assert log[1]["held_out"] < log[0]["held_out"]
  assert log[1]["kept_1"] > log[0]["kept_1"]
  network, params = rand_lm()
  lm = facade(network, params)
  plain = [lm.generate(prompt, max_new_tokens=40) for prompt in prompts([4, 9], seed=99, size=V - 2)]
  texts, spec = [list(one.prompt_ids) for one in plain], f"head:{head}"
  lm._drafters[spec] = lm.drafter(spec)._replace(each=0.0)  # beside so small a model a guess is never worth its cost
  for got, want in zip(lm.generate(texts, max_new_tokens=40, speculate=spec), plain):
    assert got.token_ids == want.token_ids
    assert got.speculated.drafted > 0


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_head(trained, texts, tmp_path, monkeypatch):
  kept = loop.Trainer._note

  def killed(self, step, *rest):
    kept(self, step, *rest)
    raise KeyboardInterrupt

  monkeypatch.setattr(loop.Trainer, "_note", killed)
  with pytest.raises(KeyboardInterrupt):
    run(texts, tmp_path)
  monkeypatch.setattr(loop.Trainer, "_note", kept)
  mine, whole = (checkpoint.load(path, progress=False).params for path in (run(texts, tmp_path), trained[1]))
  for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(whole)):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_head_of_another_model_is_refused_by_its_digest(trained):
  network, params = rand_lm()
  other = jax.tree.map(lambda x: x, params)
  other["norm"]["weight"] = params["norm"]["weight"] * 1.5
  with pytest.raises(ValueError, match="was trained for the model with fingerprint"):
    facade(network, other).generate([1, 2], speculate=f"head:{trained[1]}")


def test_a_head_is_no_model(trained):
  with pytest.raises(ValueError, match="a head that drafts for a model, no model"):
    decoder.load(trained[1])
  assert len(json.loads((trained[1] / "config.json").read_text())["draft_tokens"]) <= PLAN.tokens


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"steps": 0}, "steps must be at least 1"),
    ({"fade": 0.0}, "fade must be"),
    ({"held_out": TEXTS}, "texts are too few"),
    ({"warm_up": 60}, "warm_up must lie between 1 and the steps"),
  ],
)
def test_impossible_numbers_are_named(change, message, texts, tmp_path):
  with pytest.raises(ValueError, match=message):
    run(texts, tmp_path, dataclasses.replace(PLAN, **change))


@pytest.mark.parametrize("wrong", [{"texts": 24}, {"texts": 0}, {"length": 8}])
def test_impossible_numbers_of_texts_are_named(wrong, tmp_path):
  with pytest.raises(ValueError, match="texts must be a multiple of rows, 16, and length at least 32"):
    gathered(tmp_path, **wrong)


def test_prompts_that_are_all_too_long_are_no_endless_search(tmp_path):
  network, params = rand_lm()
  with pytest.raises(ValueError, match="a thousand prompts in a row have more than 10 tokens"):
    gathering.gather(
      network, params, (), itertools.repeat([1] * 11), tmp_path, texts=16, length=40, rows=16, progress=False
    )


def test_the_scripts_defaults_are_the_plans():
  source = (Path(__file__).parents[2] / "scripts" / "distill.py").read_text()
  for field in dataclasses.fields(Plan):
    (given,) = re.findall(rf'flags\.DEFINE_\w+\("{field.name}", ([^,]+),', source)
    assert float(given) == field.default, field.name
