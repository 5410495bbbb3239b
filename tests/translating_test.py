"""Lines in batches: each is what it is alone, in order, planned alike by whoever goes on."""

import collections
import functools

import numpy as np
import pytest
from sources import translator
from translator_test import MANY, MARKED, PLAIN

from decoder.journal import Journal
from decoder.programs import bucket
from decoder.settings import Settings
from decoder.translating import BATCH_TOKENS, WINDOW, Lines, translate_windows

Asked = functools.partial(Settings, max_new_tokens=None)
BEAMS = Asked(num_beams=3, no_repeat_ngram_size=1)
GREEDY = Asked(no_repeat_ngram_size=1)


def text_of(rng, words):
  return " ".join(f"w{number}" for number in rng.integers(0, 50, words))


def texts(number, longest=40, seed=0):
  """Of all lengths, some of them empty or the same as others."""
  rng = np.random.default_rng(seed)
  made = [text_of(rng, int(rng.integers(1, longest))) for _ in range(number)]
  made[2::9] = [""] * len(made[2::9])
  made[5::17] = ["  "] * len(made[5::17])
  made[7::11] = [made[0]] * len(made[7::11])
  return made


def job(settings=GREEDY, batch_tokens=1500, split=False, tokenizer=PLAIN, name="marian"):
  return Lines(translator(name, tokenizer), settings, batch_tokens, split)


def all_of(job, lines, **more):
  return [pair for window in job.windows(lines) for pair in job.translate(window, **more)]


BOTH = [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(BEAMS, id="beams")]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_each_line_is_translated_as_alone_and_in_its_place(beams):
  lines, settings = texts(40, 28), Settings(num_beams=beams, max_new_tokens=10, no_repeat_ngram_size=1)
  got = all_of(job(settings), lines)
  assert [source for source, _ in got] == lines
  for line, (_, told) in zip(lines, got):
    if not line.strip():
      assert told == ("", None, "stop")
      continue
    alone = translator("marian", PLAIN).generate(line, settings, logprobs=0)
    assert (told.text, told.finish_reason) == (alone.text, alone.finish_reason)
    mean = sum(token.logprob for token in alone.logprobs) / len(alone.logprobs)
    assert told.score == pytest.approx(alone.score if beams > 1 else mean, abs=1e-4)
  assert len({told.text for _, told in got}) > 15


def test_what_is_written_is_bounded_by_what_was_read():
  lines = [text_of(np.random.default_rng(1), words) for words in (3, 12)]
  for line, (_, told) in zip(lines, all_of(job(Asked(ignore_eos=True)), lines)):
    assert (len(told.text.split()), told.finish_reason) == (3 * 16 + 15, "length"), line
  assert job()._settings_for(17).max_new_tokens == 63, "of the context's 64"


@pytest.mark.parametrize("settings", [GREEDY, BEAMS, Settings(num_beams=2, max_new_tokens=9)])
@pytest.mark.parametrize("budget", [1, 700, 5000])
def test_batches_hold_every_part_once_and_keep_to_the_budget(settings, budget):
  planner = job(settings, budget)
  (window,) = planner.windows(texts(200))
  assert sorted(part for batch in window.batches for part in batch) == list(range(len(window.parts)))
  lengths = [[window.parts[part].length for part in batch] for batch in window.batches]
  assert [size for batch in lengths for size in batch] == sorted((part.length for part in window.parts), reverse=True)
  for batch in lengths:
    new = settings.max_new_tokens or min(3 * bucket(batch[0], 16) + 15, 63)
    tokens = bucket(len(batch)) * (bucket(batch[0], 16) + settings.num_beams * new)
    assert tokens <= budget or len(batch) == 1
    assert 2 * planner.rows(batch[0]) * (bucket(batch[0], 16) + settings.num_beams * new) > budget, (
      "no smaller than need be"
    )


def test_lines_of_one_text_are_translated_once_unless_drawn():
  lines = ["w1 w2", "w3", "w1 w2", "", "w1 w2"]
  (window,) = job().windows(lines)
  assert (len(window.parts), [line.parts for line in window.lines]) == (2, [(0,), (1,), (0,), (), (0,)])
  (window,) = job(Asked(temperature=1.0, seed=1)).windows(lines)
  assert len(window.parts) == 4


@pytest.mark.parametrize("settings", BOTH)
@pytest.mark.slow
def test_few_programs_are_compiled_for_many_lines(settings):
  fresh = translator.__wrapped__("marian", PLAIN)
  lines = texts(1000, 28, seed=3)
  assert len(all_of(Lines(fresh, settings), lines)) == 1000
  (programs,) = fresh._programs.values()
  kinds = collections.Counter(str(key[0]) for key in programs._compiled if key[0] != "flat")
  assert max(kinds.values()) <= 3, "for sources of 16 and 32, and a rest"
  assert sum(kinds.values()) <= 12
  all_of(Lines(fresh, settings), texts(900, 28, seed=3))
  again = collections.Counter(str(key[0]) for key in programs._compiled if key[0] != "flat")
  assert max(again.values()) <= 4, "but for the rows of the rest"


@pytest.mark.slow
def test_lines_come_as_soon_as_those_before_them_are_done_and_windows_one_by_one():
  lines, seen = [*texts(30), *[""] * WINDOW, "w1"], []
  planner = job(batch_tokens=700)
  windows = planner.windows(iter(lines))
  (first, second) = windows
  assert (len(first.lines), len(second.lines), second.batches) == (WINDOW, 31, ((0,),))
  done = set()

  def keep(translations, results):
    done.update(translations)
    seen.append(len(got))

  got = []
  for number, pair in enumerate(planner.translate(first, keep=keep)):
    assert set(first.lines[number].parts) <= done
    got.append(pair)
  ready = [max((place for place, batch in enumerate(first.batches, 1) if set(batch) & set(line.parts)), default=0)
           for line in first.lines]  # fmt: skip
  reached = np.maximum.accumulate(ready)
  assert seen == [int((reached < place).sum()) for place in range(1, len(first.batches) + 1)]


def sentences(*sizes):
  rng = np.random.default_rng(4)
  return [f"{text_of(rng, size)}." for size in sizes]


@pytest.mark.slow
def test_a_line_beyond_the_context_is_split_at_ends_of_sentences():
  """Words with a full stop are unknown ones here; the context is 64 tokens, an end among them."""
  parts = sentences(30, 30, 10, 40, 20)
  line = " ".join(parts)
  want = [" ".join(parts[:2]), " ".join(parts[2:4]), parts[4]]
  (window,) = job(split=True).windows(["w1", line])
  assert [window.parts[part].text for part in window.lines[1].parts] == want
  (_, (source, told)) = all_of(job(split=True), ["w1", line])
  each = [told for _, told in all_of(job(), want)]
  assert (source, told.text) == (line, " ".join(one.text for one in each))
  assert told.score == pytest.approx(np.mean([one.score for one in each]), abs=1e-4)
  short = " ".join(sentences(20, 20))
  assert all_of(job(split=True), [short]) == all_of(job(), [short]), "what fits is not split"


@pytest.mark.parametrize(
  ("text", "want"),
  [
    ('He said "No." Then? Yes!  (Why.) End', ['He said "No." ', "Then? ", "Yes!  ", "(Why.) ", "End"]),
    ("3.5 is a.b", ["3.5 is a.b"]),
    ("起初。神创造！天地", ["起初。", "神创造！", "天地"]),
    ("क्या? हाँ। अच्छा", ["क्या? ", "हाँ। ", "अच्छा"]),
  ],
)
def test_where_sentences_end(text, want):
  from decoder.translating import _sentences

  assert _sentences(text) == want
  assert "".join(want) == text


def test_parts_are_joined_as_their_script_is():
  from decoder.translating import Translation, _joined

  def join(*parts):
    return _joined([Translation(text, -1.0, reason) for text, reason in parts])

  assert join(("Yes.", "stop"), ("No.", "length")) == ("Yes. No.", -1.0, "length")
  assert join(("是。", "stop"), ("不。", "stop")).text == "是。不。"
  assert join(("", "stop"), ("No.", "stop")).text == "No."


@pytest.mark.parametrize(
  ("make", "lines", "message"),
  [
    (job, ["w1", "w1 " * 80], r"line 2 has 81 tokens, tiny reads at most 64.*--split"),
    (functools.partial(job, split=True), ["w1", *sentences(80)], r"line 2 has a sentence of 81 tokens"),
    (functools.partial(job, Asked(tgt="fre"), tokenizer=MARKED), ["w1"], "did you mean 'fra'"),
    (functools.partial(job, Asked(src="eng_Latm", tgt="deu_Latn"), tokenizer=MANY, name="nllb"), ["w1"], "eng_Latn"),
    (functools.partial(job, Asked(src="eng_Latn", tgt="deu_Latm"), tokenizer=MANY, name="nllb"), ["w1"], "deu_Latn"),
    (functools.partial(job, Asked(forced_tokens=[999])), ["w1"], "forced_tokens has token 999"),
    (functools.partial(job, Asked(forced_tokens=[5] * 80)), ["w1"], "forced_tokens are 80, there is room for 63"),
    (functools.partial(job, Asked(min_new_tokens=70)), ["w1"], "min_new_tokens 70 > max_new_tokens 63"),
    (functools.partial(job, Asked(n=2, num_beams=2)), [], "a line has one translation, got n=2"),
    (functools.partial(job, batch_tokens=0), [], "batch_tokens must be at least 1, got 0"),
  ],
)
def test_what_cannot_be_translated_is_refused_before_any_compute(monkeypatch, make, lines, message):
  monkeypatch.setattr("decoder.generate.LM.answer", None)
  with pytest.raises(ValueError, match=message):
    list(make().windows(lines))


def test_a_model_that_only_continues_texts_is_refused(lm):
  with pytest.raises(ValueError, match="tiny continues texts and translates none"):
    Lines(lm, GREEDY)


class Stopped(Exception):
  pass


@pytest.mark.parametrize("settings", BOTH)
@pytest.mark.parametrize("stop_after", [1, 2, 5])
@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_batch_it_was_at(tmp_path, settings, stop_after):
  lines, batches = texts(60, seed=5), []
  planner = job(settings, 1200)
  want = all_of(planner, lines)

  def run(heard):
    with Journal(tmp_path / "out.txt", {}) as journal:
      return list(translate_windows(planner, planner.windows(lines), journal, heard))

  def hear_few(results):
    batches.append(len(results))
    if len(batches) == stop_after:
      raise Stopped

  with pytest.raises(Stopped):
    run(hear_few)
  assert run(lambda results: batches.append(len(results))) == want
  (window,) = planner.windows(lines)
  assert batches == [len(batch) for batch in window.batches], "none twice, none left out"


@pytest.mark.slow
def test_another_budget_goes_on_too(tmp_path):
  lines, again = texts(60, seed=5), []
  with Journal(tmp_path / "out.txt", {}) as journal:
    planner = job(batch_tokens=1200)
    stream = translate_windows(planner, planner.windows(lines), journal, lambda results: None)
    first = [next(stream) for _ in range(3)]
  with Journal(tmp_path / "out.txt", {}) as journal:
    planner = job(batch_tokens=600)
    got = list(translate_windows(planner, planner.windows(lines), journal, lambda results: again.append(len(results))))
  assert got[:3] == first
  assert [source for source, _ in got] == lines
  assert 0 < sum(again) < 60


def test_the_default_budget_bounds_rows():
  planner = job(BEAMS, BATCH_TOKENS)
  assert [planner.rows(length) for length in (1, 16, 17, 64)] == [64, 64, 64, 64]
  assert job(Settings(num_beams=4, max_new_tokens=60), BATCH_TOKENS).rows(64) == 32
