"""The scripts as a user types them, on a tiny model: what they print, and how they fail."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import byte_model, few

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
  return byte_model(tmp_path_factory.mktemp("tiny"))


def run(script: str, *flags: str, stdin: str = "", home: Path | None = None) -> subprocess.CompletedProcess:
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  if home is not None:
    environment["XDG_CACHE_HOME"] = str(home)
  command = [sys.executable, str(SCRIPTS / script), *flags]
  return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=240)


def test_json_has_every_field_and_the_seed_reproduces_the_text(tiny, home):
  flags = ["--model", str(tiny), "--output", "json", "--max_new_tokens", "8", "--temperature", "1", "--ignore_eos"]
  done = run("generate.py", *flags, "--prompt", "ab", "--prompt", "c", home=home)
  assert done.returncode == 0, done.stderr
  first, second = (json.loads(line) for line in done.stdout.splitlines())
  fields = "text prompt_ids token_ids finish_reason stop_reason truncated seed settings timings sample"
  fields += " logprobs prompt_logprobs explanation score speculated"
  assert set(first) == set(fields.split())
  timings = "load_s compile_s ttft_ms tpot_ms tokens_per_s prompt_tokens_per_s prompt_tokens new_tokens"
  assert set(first["timings"]) == set(timings.split())
  assert first["timings"]["prompt_tokens"] == 2
  assert len(first["token_ids"]) == 8
  assert first["finish_reason"] == "length"
  again = run("generate.py", *flags, "--prompt", "c", "--seed", str(second["seed"]), home=home)
  assert json.loads(again.stdout)["token_ids"] == second["token_ids"]


def test_beams_are_searched_and_the_best_hypotheses_written(tiny, home):
  flags = ["--model", str(tiny), "--output", "json", "--max_new_tokens", "6", "--set", "num_beams=3", "--set", "n=2"]
  done = run("generate.py", *flags, "--prompt", "ab", home=home)
  assert done.returncode == 0, done.stderr
  best, second = (json.loads(line) for line in done.stdout.splitlines())
  assert best["score"] >= second["score"]
  assert (best["sample"], second["sample"], best["token_ids"] == second["token_ids"]) == (0, 1, False)


def test_text_is_streamed_to_stdout_and_figures_go_to_stderr(tiny, home):
  flags = ["--model", str(tiny), "--max_new_tokens", "8", "--ignore_eos"]
  streamed = run("generate.py", *flags, stdin="hello", home=home)
  assert streamed.returncode == 0, streamed.stderr
  whole = run("generate.py", *flags, "--nostream", "--prompt", "hello", home=home)
  assert streamed.stdout == whole.stdout
  line = streamed.stderr.strip().splitlines()[-1]
  assert line.startswith("prompt 5 tokens")
  assert "8 new tokens" in line
  assert "peak memory" in line


@pytest.mark.slow
def test_tokens_are_told_of_in_tables_json_and_html(tiny, home, tmp_path):
  page = tmp_path / "tokens.html"
  flags = ["--model", str(tiny), "--max_new_tokens", "4", "--ignore_eos", "--prompt", "ab"]
  done = run("generate.py", *flags, "--logprobs", "2", "--explain", "--html", str(page), home=home)
  assert done.returncode == 0, done.stderr
  plain = run("generate.py", *flags, home=home)
  table = done.stdout.removeprefix(plain.stdout)
  assert len(table) < len(done.stdout)
  assert [line.split()[0] for line in table.splitlines() if "rank" in line] == ["1", "2", "3", "4"]
  assert table.count("temperature") == 4
  assert page.read_text(encoding="utf-8").count('class="card"') == 4
  told = run("generate.py", *flags, "--logprobs", "2", "--explain", "--output", "json", home=home)
  plain = json.loads(told.stdout)
  assert [len(one["alternatives"]) for one in plain["logprobs"]] == [2] * 4
  assert len(plain["explanation"]) == 4


@pytest.mark.slow
def test_weights_in_few_bits_write_and_are_compared_with_float32(tiny, home, tmp_path):
  flags = ["--model", str(tiny), "--weights", "int8", "--max_new_tokens", "4", "--ignore_eos", "--output", "json"]
  done = run("generate.py", *flags, "--prompt", "ab", home=home)
  assert done.returncode == 0, done.stderr
  assert len(json.loads(done.stdout)["token_ids"]) == 4
  (tmp_path / "text").write_text("a b c " * 50)
  flags = ["--model", str(tiny), "--text", str(tmp_path / "text"), "--formats"]
  done = run("quality.py", *flags, f"q4_1,q8_0,{tiny}", home=home)
  assert done.returncode == 0, done.stderr
  names, *lines = (line.split() for line in done.stdout.splitlines())
  assert names[0] == "format"
  four, eight, same = (float(line[3]) for line in lines)  # mean KL
  assert four > eight > same == 0
  assert all(line[-1] == "256" for line in lines)
  short = run("quality.py", *flags, "q8_0", "--tokens", "100", home=home)
  assert short.returncode == 2
  assert "at least 256 tokens of text, got 100" in short.stderr


@pytest.mark.slow
def test_chat_wraps_the_prompt_and_a_profile_is_written(tiny, home, tmp_path):
  flags = ["--model", str(tiny), "--max_new_tokens", "2", "--output", "json", "--profile", str(tmp_path)]
  done = run("generate.py", *flags, "--chat", "--system", "s", "--prompt", "hi", home=home)
  assert done.returncode == 0, done.stderr
  assert len(json.loads(done.stdout)["prompt_ids"]) == len("system: s") + 1 + len("user: hi") + 1 + len("assistant: ")
  assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.slow
def test_a_text_can_be_made_to_fit(tiny, home, tmp_path):
  (tmp_path / "schema.json").write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}')
  flags = ["--model", str(tiny), "--output", "json", "--prompt", "a"]
  for schema in (str(tmp_path / "schema.json"), '{"enum": [[true, false]]}'):
    done = run("generate.py", *flags, "--json_schema", schema, home=home)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(json.loads(done.stdout)["text"])) == 2


def test_print_config_tells_where_each_setting_came_from(tmp_path, home):
  model = byte_model(tmp_path)
  (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 7}')
  flags = ["--model", str(model), "--top_p", "0.5", "--set", "max_time=2.5", "--set", "stop_token_ids=[3]"]
  done = run("generate.py", *flags, "--generation_config", "--print_config", home=home)
  assert done.returncode == 0, done.stderr
  rows = {line.split()[0]: line.split(None, 2)[1:] for line in done.stdout.splitlines()}
  assert rows["temperature"] == ["0.6", "generation_config.json"]
  assert rows["top_k"] == ["7", "generation_config.json"]
  assert rows["top_p"] == ["0.5", "flag"]
  assert rows["max_time"] == ["2.5", "flag"]
  assert rows["stop_token_ids"] == ["[3]", "flag"]
  assert rows["max_new_tokens"] == ["256", "default"]
  assert " ".join(rows["chain"]).startswith("temperature → top_k → top_p")
  done = run("generate.py", *flags, "--set", "max_tme=1", "--print_config", home=home)
  assert (done.returncode, done.stdout) == (2, "")
  assert "unknown setting 'max_tme'; did you mean 'max_time'" in done.stderr


@pytest.mark.parametrize(
  ("flags", "says"),
  few(
    [
      (["--no_such_flag", "1"], "no_such_flag"),
      (["--max_new_tokens", "many"], "many"),
      (["--output", "xml"], "xml"),
      (["loose"], "loose"),
      (["--temperature", "-1"], "temperature must be"),
      (["--temperature", "nan"], "temperature must be"),
      (["--top_p", "0"], "temperature=0"),
      (["--top_k", "-2"], "top_k must be"),
      (["--min_p", "1.5"], "min_p must be"),
      (["--max_new_tokens", "-1"], "max_new_tokens must be"),
      (["--seed", "-1"], "seed must be"),
      (["--logprobs", "-1"], "logprobs must be"),
      (["--html", "no/such/folder/x.html"], "no such directory"),
      (["--stop", ""], "stop must be"),
      (["--regex", "a("], "regex cannot be used: invalid regex"),
      (["--json_schema", "{"], "json_schema is not JSON"),
      (["--choice", "yes", "--grammar", "start: /a/"], "one constraint, got grammar and choice"),
      (["--negative_prompt", "b"], "does nothing at guidance_scale 1"),
      (["--system", "x"], "--system needs --chat"),
      (["--model", "smollm2-135m-instrcut"], "smollm2-135m-instruct"),
      (["--model", "missing.gguf"], "missing.gguf"),
      (["--weights", "q9"], "q9"),
      (["--prompt_file", "missing.txt"], "missing.txt"),
      (["--set", "temperature"], "NAME=VALUE"),
      (["--suffix", "x", "--chat"], "leave out --chat"),
    ],
    8,
  ),
)
def test_a_mistake_is_one_line_and_exit_code_2(flags, says):
  done = run("generate.py", "--prompt", "a", *flags)
  assert done.returncode == 2
  assert "Traceback" not in done.stderr
  assert says in done.stderr
  assert done.stdout == ""
  assert len(done.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--prompt", ""], "empty"),
    (["--prompt", "x" * 128], "128 tokens, the context holds 128"),
    (["--prompt", "x" * 20, "--capacity", "16"], "20 tokens, the capacity holds 16"),
  ],
)
def test_a_prompt_that_cannot_be_is_refused_with_both_numbers(tiny, home, flags, says):
  done = run("generate.py", "--model", str(tiny), *flags, home=home)
  assert done.returncode == 2
  assert says in done.stderr
  assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error(tiny, home):
  command = f"'{sys.executable}' '{SCRIPTS / 'generate.py'}' --model '{tiny}' --prompt a --ignore_eos | head -c 1"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)}
  done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=240)
  assert "Traceback" not in done.stderr
  assert "BrokenPipe" not in done.stderr


def test_chat_keeps_what_was_said_and_obeys_its_commands(tiny, home):
  lines = [
    "hi",
    "again\\",
    "two lines",
    "/set temperature 0.5",
    "/set temprature 1",
    "/set temperature",
    "/system be short",
  ]
  lines += ["/system", "hi", '"""', "a", "b", '"""', "/reset", "/nonsense", "/help", "/exit", "never read"]
  done = run(
    "chat.py", "--model", str(tiny), "--max_new_tokens", "4", "--ignore_eos", stdin="\n".join(lines) + "\n", home=home
  )
  assert done.returncode == 0, done.stderr
  out = done.stdout
  held = [int(part.split("/128]")[0]) for part in out.split("[")[1:] if "/128]" in part]
  assert held[0] == 0
  assert 0 < held[1] < held[2]  # the second turn goes on from the first
  assert "unknown setting 'temprature'; did you mean 'temperature'?" in out
  assert "temperature = 0.5" in out
  assert "be short" in out
  assert held[-1] == 0  # after /reset
  assert "unknown command /nonsense" in out
  assert "never read" not in out


def test_chat_says_when_the_context_is_full_and_goes_on_after_a_reset(tiny, home):
  done = run(
    "chat.py", "--model", str(tiny), "--max_new_tokens", "4", "--ignore_eos",
    stdin="x" * 120 + "\n/reset\nhi\n", home=home,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "error: the prompt has" in done.stdout
  assert "[0/128]" in done.stdout.split("error", 1)[1]


def test_ctrl_c_ends_the_program_quietly(tiny, home):
  process = subprocess.Popen(
    [sys.executable, str(SCRIPTS / "chat.py"), "--model", str(tiny), "--max_new_tokens", "4"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)},
  )  # fmt: skip
  assert process.stdout.read(1) == b"["  # the prompt line: it waits for input
  said = b""
  for _ in range(10):  # one that comes while a library cleans up may be swallowed; a user presses again
    process.send_signal(signal.SIGINT)
    while select.select([process.stdout], [], [], 1.0)[0] and b"Ctrl-D" not in said:
      said += os.read(process.stdout.fileno(), 4096)
    if b"Ctrl-D" in said:
      break
  else:
    process.kill()
    pytest.fail(f"no press of Ctrl-C was answered: {said!r}")
  _, err = process.communicate(b"/exit\n", timeout=60)
  assert process.returncode == 0, err
  assert b"Traceback" not in err


@pytest.mark.slow
def test_benchmark_prints_a_table_writes_json_compares_and_draws(tiny, home, tmp_path):
  flags = [
    "--model",
    str(tiny),
    "--weights",
    "float",
    "--prompts",
    "8",
    "--tokens",
    "4",
    "--rounds",
    "1",
    "--json",
    str(tmp_path / "r.json"),
  ]
  done = run("benchmark.py", *flags, "--batches", "1,2", "--plots", str(tmp_path / "out"), home=home)
  assert done.returncode == 0, done.stderr
  heads, *lines = done.stdout.splitlines()
  assert heads.split()[:6] == ["weights", "cache", "batch", "prompt", "position", "capacity"]
  assert [line.split()[2] for line in lines] == ["1", "2"]
  kept = json.loads((tmp_path / "r.json").read_text())
  assert kept["machine"]["cores"] >= 1
  assert kept["breakdown"][0]["whole_ms"] > 0
  assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step_parts.png", "tokens_by_batch.png"]
  assert "not drawn, ttft_by_prompt: wants two prompt lengths" in done.stderr
  more = ["--batches", "2", "--capacities", "8,32,128", "--compare", str(tmp_path / "r.json")]
  again = run("benchmark.py", *flags, *more, home=home)
  assert again.returncode == 0, again.stderr
  assert "capacity 8: --positions 8 and --tokens 4 + 1 do not fit --capacities 8" in again.stderr  # skipped
  assert "capacity 128: a step takes" in again.stdout
  assert "only in this run: weights float, cache float32, batch 2, prompt 8, position 8, capacity 32" in again.stdout
  assert "only in the earlier run: weights float, cache float32, batch 1" in again.stdout


def test_benchmark_prints_the_peers_line_and_the_format_that_ran(tiny, home):
  flags = ["--model", str(tiny), "--peer_line", "--batches", "2", "--weights", "int8"]
  done = run("benchmark.py", *flags, home=home)
  assert done.returncode == 2  # this model's context is too short for the peers' prompts: said, not measured
  assert "context" in done.stderr


@pytest.mark.parametrize(
  ("flags", "says"),
  few(
    [
      (["--batches", "1,x"], "--batches wants whole numbers ≥ 1, joined by commas, got 'x'"),
      (["--prompts", "0"], "--prompts wants"),
      (["--tokens", "1"], "--tokens wants"),
      (["--rounds", "0"], "--rounds wants"),
      (["--formats", "q9"], "--formats knows float, keep"),
      (["--caches", "int3"], "--caches knows float32"),
      (
        ["--positions", "500", "--capacities", "512"],
        "--positions 500 and --tokens 64 + 1 do not fit --capacities 512",
      ),
      (["--compare", "missing.json"], "missing.json"),
      (["--json", "no_such_directory/x.json"], "--json"),
    ],
    3,
  ),
)
def test_benchmark_refuses_a_mistake_before_loading(flags, says):
  done = run("benchmark.py", "--model", "never_loaded.gguf", *flags)
  assert done.returncode == 2
  assert "Traceback" not in done.stderr
  assert says in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_head_is_distilled_and_guesses(tiny, home, tmp_path):
  (tmp_path / "seeds.json").write_text(json.dumps({"templates": ["a {topic}"], "topics": ["b", "c"]}))
  flags = ["--model", str(tiny), "--seeds", str(tmp_path / "seeds.json"), "--out", str(tmp_path / "run")]
  flags += ["--written", "32", "--rows", "16", "--length", "120", "--steps", "4", "--warm_up", "1", "--held_out", "16"]
  done = run("distill.py", *flags, "--texts", "8", "--every", "2", "--tokens", "200", home=home)
  assert done.returncode == 0, done.stderr
  assert "32 texts, written in" in done.stdout
  assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
  head = f"head:{tmp_path / 'run' / 'head'}"
  ask = ["--model", str(tiny), "--prompt", "ab", "--max_new_tokens", "12", "--ignore_eos", "--output", "text"]
  plain, ahead = (run("generate.py", *ask, "--speculate", who, home=home) for who in ("off", head))
  assert ahead.returncode == 0, ahead.stderr
  assert plain.stdout == ahead.stdout
  assert "tokens a step" in ahead.stderr
  assert "without" in ahead.stderr


def test_a_plan_says_whether_it_fits_and_what_would(tmp_path):
  flags = ["--topology", "v5e-1", "--context", "512", "--model", "smollm2-135m-instruct"]
  done = run("plan.py", *flags, "--plot", str(tmp_path / "memory.png"))
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[3].startswith("fits: ")
  assert "could: up to" in done.stdout
  assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
  tight = run("plan.py", *flags, "--batch", "4096", "--json")
  assert tight.returncode == 1, tight.stderr
  told = json.loads(tight.stdout)
  assert told["fits"] is False
  assert any(one.startswith("use a batch of") for one in told["advice"])
  assert told["plans"][0]["bytes"]["total"] > told["device"]["memory"]


@pytest.mark.parametrize(
  ("flags", "says"),
  few(
    [
      (["--topology", "v5e-9"], "the nearest are v5e-4 or v5e-8"),
      (["--model", "llama3-8b"], "did you mean llama-3-8b"),
      (["--weights", "q9"], "unknown weights 'q9'"),
      (["--cache", "int3"], "unknown cache 'int3'"),
      (["--mesh", "tensor=2"], "must multiply to that"),
      (["--mesh", "tensor=8"], "does not divide 9 heads"),
      (["--batch", "0"], "--batch wants"),
      (["--context", "0"], "--context wants"),
      (["--plot", "no/such/folder/x.png"], "does not exist"),
      (["--topology", "h200", "--compile"], "only TPUs can be compiled for"),
    ],
    3,
  ),
)
def test_a_plan_refuses_what_makes_no_sense(flags, says):
  done = run("plan.py", "--model", "smollm2-135m-instruct", "--topology", "v5e-8", "--batch", "8", *flags)
  assert done.returncode == 2
  assert "Traceback" not in done.stderr
  assert says in done.stderr
