"""scripts/translate.py as a user types it, on a tiny model: lines, files that are gone on with, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import published
import pytest
from fixtures import byte_model, few
from scripts_test import SCRIPTS, run
from sources import marian_directory

WORDS = published.ENGLISH.split()
TEXTS = [" ".join(WORDS[n % 40 : n % 40 + 1 + n % 7]) for n in range(90)]
TEXTS[4] = TEXTS[5] = TEXTS[-2] = ""
TEXTS[8] = "  "
SHORT = ("--set", "no_repeat_ngram_size=1", "--max_new_tokens", "12", "--num_beams", "2")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
  return str(marian_directory(tmp_path_factory.mktemp("marian"), published.marian(several=False)))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
  path = tmp_path_factory.mktemp("texts") / "in.txt"
  path.write_text("\n".join(TEXTS) + "\n", "utf-8")
  return str(path)


@pytest.fixture(scope="session")
def translated(model, texts, home):
  """What a run that nothing disturbs writes."""
  done = run("translate.py", "--model", model, *SHORT, "--input", texts, home=home)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_each_line_gives_one_in_order_from_files_and_streams(model, texts, home, translated, tmp_path):
  lines = translated.split("\n")
  assert (len(lines), lines.pop()) == (len(TEXTS) + 1, "")
  assert [not line for line in lines] == [not text.strip() for text in TEXTS]
  assert len(set(lines)) > 30
  streamed = run("translate.py", "--model", model, *SHORT, stdin="\n".join(TEXTS), home=home)
  assert streamed.stdout == translated
  assert streamed.stderr.splitlines()[-2].startswith("90 lines, ")
  assert " a second, compiled in " in streamed.stderr
  assert (
    "translations are cut at their limit of tokens, see --max_new_tokens: line 3, line 4, line 8, …" in streamed.stderr
  )
  (tmp_path / "windows.txt").write_bytes("\r\n".join(TEXTS[:3]).encode())
  (tmp_path / "rest.txt").write_bytes("\n".join(TEXTS[3:]).encode())
  files = ["--input", str(tmp_path / "windows.txt"), "--input", str(tmp_path / "rest.txt")]
  assert run("translate.py", "--model", model, *SHORT, *files, home=home).stdout == translated


def test_json_has_text_score_and_source(model, home, translated):
  done = run("translate.py", "--model", model, *SHORT, "--output_format", "json", stdin="\n".join(TEXTS), home=home)
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  assert [list(row) for row in rows] == [["text", "score", "source"]] * len(TEXTS)
  assert [row["source"] for row in rows] == TEXTS
  assert [row["text"] for row in rows] == translated.splitlines()
  assert all((row["score"] is None) == (not row["source"].strip()) for row in rows)
  assert all(row["score"] is None or row["score"] < 0 for row in rows)


@pytest.fixture(scope="session")
def several(tmp_path_factory):
  return str(marian_directory(tmp_path_factory.mktemp("marian"), published.marian()))


@pytest.mark.slow
def test_a_killed_run_goes_on_and_writes_the_same(model, texts, home, translated, tmp_path):
  out, progress = tmp_path / "out.txt", tmp_path / "out.txt.progress"
  flags = ["--model", model, *SHORT, "--input", texts, "--output", str(out), "--batch_tokens", "160"]
  whole = run("translate.py", *flags[:-4], *flags[-2:], home=home).stdout
  process = subprocess.Popen(
    [sys.executable, str(SCRIPTS / "translate.py"), *flags], stderr=subprocess.DEVNULL,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)},
  )  # fmt: skip
  deadline = time.monotonic() + 120
  while not progress.exists() or progress.read_bytes().count(b"\n") < 3:
    assert process.poll() is None, "it was over before it could be killed"
    assert time.monotonic() < deadline
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.wait()
  kept = progress.read_bytes()
  batches = kept.count(b"\n") - 1
  assert b'"complete"' not in kept
  assert out.read_text("utf-8") != whole
  progress.write_bytes(kept + b"[0, [[1, [")  # as if it was killed while it wrote
  again = run("translate.py", *flags, home=home)
  assert again.returncode == 0, again.stderr
  assert f"going on after {batches} batches" in again.stderr
  assert out.read_text("utf-8") == whole
  assert sum(a != b for a, b in zip(whole.splitlines(), translated.splitlines())) <= 2, "rounding of other batches"
  once_more = run("translate.py", *flags, home=home)
  assert (once_more.returncode, once_more.stdout) == (0, "")
  assert "out.txt is complete; remove it and out.txt.progress to begin anew" in once_more.stderr
  other = run("translate.py", *flags, "--length_penalty", "0.5", home=home)
  assert (other.returncode, other.stdout) == (2, "")
  assert "out.txt was begun with length_penalty 1.0, now 0.5; use the same again, name another file" in other.stderr
  Path(texts).with_name("other.txt").write_text("the light\n")
  other = run("translate.py", *flags, "--input", str(Path(texts).with_name("other.txt")), home=home)
  assert "was begun with input '90 lines, sha256 " in other.stderr
  assert out.read_text("utf-8") == whole


@pytest.mark.slow
def test_a_reference_gives_bleu_and_chrf(model, texts, home, translated, tmp_path):
  pytest.importorskip("sacrebleu")
  (tmp_path / "same.txt").write_text(translated, "utf-8")
  flags = ["--model", model, *SHORT, "--input", texts]
  done = run("translate.py", *flags, "--reference", str(tmp_path / "same.txt"), home=home)
  assert done.stdout == translated
  assert "BLEU = 100.00" in done.stderr
  assert "chrF2 = 100.00" in done.stderr
  assert "tok:13a" in done.stderr
  (tmp_path / "other.txt").write_text("\n".join(TEXTS) + "\n", "utf-8")
  flags += [
    "--output",
    str(tmp_path / "out.json"),
    "--output_format",
    "json",
    "--reference",
    str(tmp_path / "other.txt"),
  ]
  first, second = (run("translate.py", *flags, home=home) for _ in range(2))
  assert first.stdout.startswith("BLEU = 0.")
  assert second.stdout == first.stdout, "of the file that is complete"


@pytest.mark.slow
def test_a_line_beyond_the_context_is_named_or_split(model, home, tmp_path):
  long = " ".join(["In the beginning God created the heaven."] * 12)
  (tmp_path / "in.txt").write_text(f"light\n\n{long}\n")
  flags = ["--model", model, *SHORT, "--input", str(tmp_path / "in.txt")]
  done = run("translate.py", *flags, home=home)
  assert (done.returncode, done.stdout) == (2, "")
  assert "in.txt, line 3 has " in done.stderr
  assert "reads at most 64; shorten it, or split it at the ends of its sentences (--split)" in done.stderr
  split = run("translate.py", *flags, "--split", home=home)
  assert (split.returncode, len(split.stdout.splitlines())) == (0, 3), split.stderr


def test_a_closed_pipe_is_no_error(model, texts, home):
  command = (
    f"'{sys.executable}' '{SCRIPTS / 'translate.py'}' --model '{model}' --input '{texts}' {' '.join(SHORT)} | head -1"
  )
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)}
  done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=240)
  assert "Traceback" not in done.stderr
  assert "BrokenPipe" not in done.stderr
  assert done.stdout.count("\n") == 1


def test_print_config_tells_where_each_setting_came_from(home):
  done = run(
    "translate.py", "--model", "none", "--num_beams", "6", "--set", "min_new_tokens=2", "--print_config", home=home
  )
  rows = {line.split()[0]: line.split(None, 2)[1:] for line in done.stdout.splitlines()}
  assert rows["num_beams"] == ["6", "flag"]
  assert rows["min_new_tokens"] == ["2", "flag"]
  assert rows["length_penalty"] == ["1.0", "default"]


@pytest.mark.parametrize(
  ("flags", "says"),
  few(
    [
      (["--num_beams", "0"], "num_beams must be an integer 1 … 1024, got 0"),
      (["--max_new_tokens", "3", "--set", "min_new_tokens=5"], "min_new_tokens 5 > max_new_tokens 3"),
      (["--num_beams", "1", "--length_penalty", "2"], "length_penalty acts on a search alone"),
      (["--batch_tokens", "0"], "batch_tokens"),
      (["--output_format", "xml"], "xml"),
      (["--input", "missing.txt"], "missing.txt"),
      (["--input", "{latin}"], "latin.txt, line 2 is not UTF-8 text: it has byte 0xe9"),
      (["--input", "{two}", "--reference", "{three}"], "three.txt has 3 lines, the input 2"),
      (["--input", "{two}", "--output", "{two}"], "would overwrite what is read"),
      (["--input", "{two}", "--output", "{three}"], "three.txt exists, and no run is known to have written it"),
      (["--input", "{two}", "--output", "no/such/folder/x.txt"], "there is no such directory"),
      (["--input", "{two}", "--model", "smollm2-135m-instrcut"], "did you mean smollm2-135m-instruct"),
      (["extra.txt"], "extra.txt"),
    ],
    4,
  ),
)
def test_a_mistake_is_one_line_before_anything_is_loaded(tmp_path, home, flags, says):
  (tmp_path / "two.txt").write_text("a\nb\n")
  (tmp_path / "three.txt").write_text("a\nb\nc")
  (tmp_path / "latin.txt").write_bytes("a\né\n".encode("latin-1"))
  named = {name: str(tmp_path / f"{name}.txt") for name in ("two", "three", "latin")}
  done = run("translate.py", "--model", "never_loaded.gguf", *(flag.format(**named) for flag in flags), home=home)
  assert (done.returncode, done.stdout) == (2, "")
  assert says in done.stderr
  assert "Traceback" not in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert (tmp_path / "two.txt").read_text() == "a\nb\n"


@pytest.mark.parametrize(
  ("flags", "says"),
  few(
    [
      (["--tgt", "fre"], "did you mean 'fra'"),
      (["--src", "eng"], "src says nothing to it"),
      (["--set", "forced_tokens=[9999]"], "forced_tokens has token 9999"),
      (["--set", "forced_bos=9999"], "9999"),
      (["--set", "n=2"], "a line has one translation, got n=2"),
    ],
    2,
  ),
)
def test_what_the_model_cannot_follow_is_refused_before_any_compute(several, home, flags, says):
  done = run("translate.py", "--model", several, *flags, stdin="the light\n", home=home)
  assert (done.returncode, done.stdout) == (2, "")
  assert says in done.stderr
  assert "Traceback" not in done.stderr


def test_a_model_without_an_encoder_is_refused(tmp_path, home):
  done = run("translate.py", "--model", str(byte_model(tmp_path)), stdin="a\n", home=home)
  assert done.returncode == 2
  assert "continues texts and translates none; name an encoder–decoder" in done.stderr


def test_the_readmes_command_translates_a_sentence(home):
  """Nothing is downloaded: the model lies in checkpoints/."""
  done = run("translate.py", stdin="En el principio crió Dios los cielos y la tierra.\n\nDios es amor.\n", home=home)
  assert done.returncode == 0
  assert done.stdout == "In the beginning, God created the heavens and the earth.\n\nGod is love.\n"


def test_without_sacrebleu_a_reference_is_refused(tmp_path, home, model):
  (tmp_path / "sacrebleu.py").write_text("raise ImportError('none')")
  (tmp_path / "a.txt").write_text("a\n")
  flags = ["--input", str(tmp_path / "a.txt"), "--reference", str(tmp_path / "a.txt"), "--model", model]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
  command = [sys.executable, str(SCRIPTS / "translate.py"), *flags]
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
  assert done.returncode == 2
  assert "--reference needs the package sacrebleu; pip install 'decoder[translate]'" in done.stderr
