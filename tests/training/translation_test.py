"""A run from pairs to a checkpoint: it learns, goes on where it was killed, and refuses what it cannot do."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import decoder
from decoder.checkpoint import CheckpointError, save
from decoder.models import registry
from decoder.training import loop
from decoder.training.translation import Plan, train

NUMBERS = {"one": "uno", "two": "dos", "three": "tres", "four": "cuatro", "five": "cinco", "six": "seis",
           "seven": "siete"}  # fmt: skip
PLAN = Plan(
  steps=320, vocab_size=285, width=32, heads=2, hidden=64, encoder_layers=1, decoder_layers=1, context=32,
  batch_tokens=512, rate=1e-2, warm_up=20, noise=0.0, every=160,
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  directory = tmp_path_factory.mktemp("pairs")
  texts = [" ".join(words) for words in itertools.permutations(NUMBERS, 3)]
  lines = [f"{text}\t{' '.join(NUMBERS[word] for word in text.split())}\n" for text in texts]
  np.random.default_rng(0).shuffle(lines)
  (directory / "train.tsv").write_text("".join(lines[:-16]))
  (directory / "valid.tsv").write_text("".join(lines[-16:]))
  return directory


def run(files, out, plan=PLAN):
  return train(plan, files / "train.tsv", files / "valid.tsv", out, progress=False)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
  out = tmp_path_factory.mktemp("run")
  return out, run(files, out)


@pytest.mark.slow
def test_it_learns_and_the_checkpoint_translates(trained, files):
  out, model = trained
  log = loop.read_log(out)
  assert [line["step"] for line in log] == [160, 320]
  assert log[-1]["held_out"] < 0.3, "knowing nothing costs ln 285 = 5.7"
  lm = decoder.load(str(model))
  lines = [line.split("\t") for line in (files / "valid.tsv").read_text().splitlines()]
  told = lm.generate([source for source, _ in lines], num_beams=2, max_new_tokens=20)
  assert sum(one.text == target for one, (_, target) in zip(told, lines)) >= 12, "of 16 that it has not seen"


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(trained, files, tmp_path, monkeypatch):
  class Killed(Exception):
    pass

  kept = loop.Trainer._note

  def killed(self, step, *rest):
    kept(self, step, *rest)
    raise Killed

  monkeypatch.setattr(loop.Trainer, "_note", killed)
  with pytest.raises(Killed):
    run(files, tmp_path / "run")
  monkeypatch.setattr(loop.Trainer, "_note", kept)
  again = run(files, tmp_path / "run")
  assert [line["step"] for line in loop.read_log(tmp_path / "run")] == [160, 320]
  mine, whole = (decoder.load(str(model)).params for model in (again, trained[1]))
  for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(whole)):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_directory_of_another_plan_is_refused(trained, files):
  with pytest.raises(ValueError, match=r"steps 320, now 400; give another directory"):
    run(files, trained[0], dataclasses.replace(PLAN, steps=400))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"steps": 0}, "steps must be at least 1"),
    ({"width": 33}, "multiple of 2 · heads"),
    ({"smoothing": 1.0}, "smoothing is a share"),
    ({"rate": 0.0}, "rate must be"),
    ({"heads": 1.5}, "heads must be"),
  ],
)
def test_impossible_numbers_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(PLAN, **change)


def test_what_does_not_fit_the_data_is_named(files, tmp_path):
  with pytest.raises(ValueError, match="warm_up must lie between 1 and the steps"):
    run(files, tmp_path / "a", dataclasses.replace(PLAN, warm_up=320))
  with pytest.raises(ValueError, match="vocab_size 100000 does not suit"):
    run(files, tmp_path / "b", dataclasses.replace(PLAN, vocab_size=100_000))


def test_a_saved_model_is_the_one_in_memory(tmp_path):
  config = PLAN.config()
  params = registry.fresh(config, jax.random.key(1))
  out = save(params, config, {"tokenizer_config.json": b"{}"}, tmp_path / "m", origin={"by": "a test"}, progress=False)
  loaded = decoder.load(str(out))
  for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params)):
    np.testing.assert_array_equal(a, b)
  assert json.loads((out / "manifest.json").read_text())["source"]["by"] == "a test"


def test_parameters_of_another_config_are_refused_and_nothing_is_written(tmp_path):
  params = registry.fresh(PLAN.config(), jax.random.key(1))
  with pytest.raises(CheckpointError):
    save(params, dataclasses.replace(PLAN, width=64).config(), {}, tmp_path / "m", progress=False)
  assert not (tmp_path / "m").exists()


def test_the_scripts_defaults_are_the_plans():
  source = (Path(__file__).parents[2] / "scripts" / "train.py").read_text()
  for field in dataclasses.fields(Plan):
    (given,) = re.findall(rf'flags\.DEFINE_\w+\("{field.name}", ([^,]+),', source)
    assert float(given) == field.default, field.name
