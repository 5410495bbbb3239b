"""Several processes decode as one: what they agree on; and with real ones on this machine, that their texts are those
of one process, and that none outlives the others."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from fixtures import byte_model, free_port

from decoder import processes
from decoder.decoding import Decoding
from decoder.processes import ALONE, Together
from decoder.reader import Reader

ROOT = Path(__file__).parents[1]
SECONDS = 480  # for all that real processes do: most of it is compiling


class Store:
  """In place of the coordinator's key-value store, for threads in place of processes."""

  def __init__(self, count):
    self.values, self._changed = {}, threading.Condition()
    self._barriers, self._count = {}, count

  def key_value_set(self, key, value, allow_overwrite=False):
    with self._changed:
      if key in self.values and not allow_overwrite:
        raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
      self.values[key] = value
      self._changed.notify_all()

  def blocking_key_value_get(self, key, milliseconds):
    with self._changed:
      if not self._changed.wait_for(lambda: key in self.values, milliseconds / 1e3):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
      return self.values[key]

  def key_value_delete(self, folder):
    with self._changed:
      self.values = {key: value for key, value in self.values.items() if not key.startswith(f"{folder}/")}

  def wait_at_barrier(self, name, milliseconds):
    with self._changed:
      barrier = self._barriers.setdefault(name, threading.Barrier(self._count))
    barrier.wait(milliseconds / 1e3)


def together(count, work):
  """What work(lead, number) gives in each of so many threads that stand for processes."""
  store = Store(count)
  with ThreadPoolExecutor(count) as pool:
    running = [pool.submit(work, Together(store, number, count), number) for number in range(count)]
    return store, [one.result(timeout=SECONDS) for one in running]


def test_all_take_what_process_0_says_and_old_values_are_dropped(monkeypatch):
  monkeypatch.setattr(processes, "_KEPT", 4)
  store, told = together(3, lambda lead, number: [lead.agree([call + number, "ä", None]) for call in range(11)])
  assert told == [[[call, "ä", None] for call in range(11)]] * 3
  assert len(store.values) <= 8
  assert ALONE.agree(5) == 5  # control: who is alone says it itself


def test_what_differs_is_named_to_all():
  def compare(lead, number):
    lead.same(lambda: {"--seed": 1, "code": "a"})
    with pytest.raises(ValueError, match="not the same") as raised:
      lead.same(lambda: {"--seed": 1, "code": "b" if number == 2 else "a", f"only {number}": number})
    return str(raised.value)

  _, (first, *others) = together(3, compare)
  assert others == [first] * 2
  assert "code is 'b' in process 2, 'a' in process 0" in first
  assert "only 1 is 1 in process 1, None in process 0" in first
  assert "--seed" not in first


def test_who_gives_no_sign_of_life_is_dead():
  seen = {}
  looks = [processes.silent([("x/0", str(n)), ("x/1", "7"), ("x/2", str(n // 20))], seen) for n in range(27)]
  assert looks[:26] == [[]] * 26
  assert looks[26] == ["process 1 has died: no sign of life for 25 s"]


def test_code_and_checkpoints_are_told_apart(tmp_path):
  one, other = tmp_path / "one", tmp_path / "other"
  one.mkdir()
  byte_model(one)
  shutil.copytree(one, other)
  assert processes.digest_of(one) == processes.digest_of(other)
  with open(other / "model.safetensors", "r+b") as file:
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(-1, os.SEEK_END)
    file.write(bytes([last[0] ^ 1]))
  assert processes.digest_of(one) != processes.digest_of(other)
  assert processes.facts() == processes.facts()


def _calls(lm, lead, number, **settings):
  """How many tokens a row had been written after each call, in a process whose clock runs 50 times as fast as that of
  the one before."""
  request = lm.request("ab", max_new_tokens=60, ignore_eos=True, **settings)
  cancel = threading.Event()
  decoding = Decoding(
    lm.programs([request.settings]), [Reader(request, lm.tokenizer)], capacity=128, compiled_s=lambda: 0.0,
    cancel=cancel, lead=lead,
  )  # fmt: skip
  looks = iter(range(10**6))
  decoding._elapsed = lambda: 50.0**number * next(looks)
  written = []
  while not decoding.done:
    decoding.advance(16, ahead=True)
    written.append(decoding._written)
    if number == 0 and len(written) == 4 and "max_time" not in settings:
      cancel.set()
  (result,) = decoding.results(0.0)
  return written, result.token_ids, result.finish_reason


@pytest.mark.parametrize(("settings", "reason"), [({}, "cancelled"), ({"max_time": 0.008}, "time")])
def test_time_and_other_threads_speak_in_process_0_alone(lm, settings, reason):
  alone = _calls(lm, ALONE, 1, **settings)
  _, (first, second) = together(2, lambda lead, number: _calls(lm, lead, number, **settings))
  assert first == second
  assert first[2] == reason
  assert alone[0] != first[0]  # control: alone, its own clock tells it otherwise


@pytest.mark.parametrize(
  ("given", "says"),
  [
    (("localhost:1", None, 2), "give process_id too"),
    ((None, 1, None), "give coordinator and num_processes too"),
    (("localhost:1", 2, 2), "got 2 of 2"),
    (("localhost:1", 0, 0), "got 0 of 0"),
    (("localhost", 0, 2), "host:port"),
    (("localhost:99999", 0, 2), "host:port"),
  ],
)
def test_what_cannot_be_joined_is_refused(given, says):
  with pytest.raises(ValueError, match=says):
    processes.join(*given)


def test_who_is_alone_joins_nobody():
  assert processes.join("localhost:1", 0, 1) is processes.join(num_processes=1) is ALONE


# ── Real processes ──


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
  return byte_model(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def started(commands, home, devices=1, paths=None):
  """The processes of these commands, with so many CPU devices each; none is left at the end."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home), "XLA_FLAGS": flags}
  running = []
  try:
    for number, command in enumerate(commands):
      path = (paths or {}).get(number, ROOT)
      command = [sys.executable, *map(str, command)]
      pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
      variables = {**environment, "PYTHONPATH": str(path)}
      running.append(subprocess.Popen(command, **pipes, text=True, env=variables, cwd=path))
    yield running
  finally:
    for process in running:
      process.kill()
      process.communicate()


def ended(running, seconds=SECONDS):
  """(exit code, stdout, stderr) of each, all read at once so that none waits for a full pipe."""
  with ThreadPoolExecutor(len(running)) as pool:
    told = list(pool.map(lambda one: one.communicate(timeout=seconds), running))
  return [(process.returncode, *texts) for process, texts in zip(running, told)]


def await_decoding(running):
  """Until all have written something; Gloo writes lines of its own."""
  for process in running:
    assert any(line == "going\n" for line in process.stdout)


def several(task, tiny, mesh, count):
  """The commands of `several.py` in so many processes."""
  coordinator = f"127.0.0.1:{free_port()}" if count > 1 else "-"
  return [(ROOT / "tests" / "several.py", task, tiny, mesh, coordinator, n, count) for n in range(count)]


def generate(tiny, *more):
  """The commands of two processes of `scripts/generate.py`; more: flags of each."""
  flags = ["--model", tiny, "--prompt", "ab", "--max_new_tokens", "12", "--ignore_eos", "--mesh", "tensor=2"]
  flags += ["--coordinator", f"127.0.0.1:{free_port()}", "--num_processes", "2"]
  return [(ROOT / "scripts" / "generate.py", *flags, "--process_id", n, *more[n]) for n in range(len(more))]


@pytest.fixture(scope="session")
def of_one(tiny, home):
  """The texts of one process, with two devices."""
  return texts_of(several("texts", tiny, "tensor=2", 1), home, devices=2)[0]


def texts_of(commands, home, devices=1):
  with started(commands, home, devices) as running:
    told = ended(running)
  assert [code for code, _, _ in told] == [0] * len(commands), told
  return [json.loads(out.splitlines()[-1]) for _, out, _ in told]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), [("tensor=2", 2), ("data=2", 2), ("tensor=2,data=2", 4)])
def test_several_processes_write_what_one_does(tiny, home, of_one, mesh, count):
  first, *others = texts_of(several("texts", tiny, mesh, count), home)
  assert others == [first] * (count - 1)  # also what time, chance and threads said
  for same in ("greedy", "by seed", "fitting", "beams", "guessed"):
    assert first[same] == of_one[same], same
  assert first["by seed"] != first["by chance"]  # control: texts differ where seeds do


@pytest.mark.slow
def test_a_script_prints_in_process_0_alone(tiny, home):
  with started(generate(tiny, [], []), home) as running:
    (code, out, err), (code_1, out_1, err_1) = ended(running)
  assert (code, code_1) == (0, 0), (err, err_1)
  assert "12 new tokens" in err
  assert (len(out) > 0, out_1, "tokens" in err_1) == (True, "", False)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["forever", "idle"])
def test_a_killed_process_ends_the_others(tiny, home, task):
  """In the midst of collectives, or while they wait for process 0."""
  with started(several(task, tiny, "tensor=2", 2), home) as running:
    await_decoding(running)
    running[1].kill()
    start = time.monotonic()
    (code, _, err), _ = ended(running, 60)
  assert code == 1, err
  assert "died" in err
  assert time.monotonic() - start < 60


@pytest.mark.slow
def test_no_process_outlives_the_coordinator(tiny, home):
  with started(several("forever", tiny, "tensor=2", 2), home) as running:
    await_decoding(running)
    running[0].kill()
    _, (code, _, err) = ended(running, 60)
  assert code not in (0, None)
  assert "died" in err  # said by us, or by JAX, which aborts where its coordinator is gone


@pytest.mark.slow
def test_ctrl_c_in_one_ends_all(tiny, home):
  with started(several("forever", tiny, "tensor=2", 2), home) as running:
    await_decoding(running)
    running[1].send_signal(signal.SIGINT)
    (code, _, err), (code_1, _, _) = ended(running, 60)
  assert (code, code_1) == (130, 130), err
  assert "process 1 has ended: Ctrl-C" in err


@pytest.mark.slow
def test_other_flags_are_refused_at_the_start(tiny, home):
  with started(generate(tiny, ["--top_k", "3"], ["--top_k", "4"]), home) as running:
    told = ended(running)
  assert [(code, out) for code, out, _ in told] == [(2, ""), (2, "")], told
  assert all("--top_k is 4 in process 1, 3 in process 0" in err for _, _, err in told)
  assert "--model" not in told[0][2]


@pytest.mark.slow
def test_other_code_is_refused_at_the_start(tiny, home, tmp_path):
  shutil.copytree(ROOT / "decoder", tmp_path / "decoder", symlinks=False)
  with open(tmp_path / "decoder" / "types.py", "a", encoding="utf-8") as file:
    file.write("\n# newer\n")
  with started(several("texts", tiny, "tensor=2", 2), home, paths={1: tmp_path}) as running:
    told = ended(running)
  assert [(code, out) for code, out, _ in told] == [(2, ""), (2, "")], told
  assert all("the code of decoder is" in err for _, _, err in told)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "says"), [(0, "not all of 2 processes came to"), (1, "the coordinator at")])
def test_a_wait_for_others_that_do_not_come_is_bounded(number, says):
  at = f"127.0.0.1:{free_port()}"
  code = f"from decoder import processes; processes.join({at!r}, {number}, 2, patience=3)"
  with started([("-c", code)], ROOT) as (process,):
    _, err = process.communicate(timeout=60)
  assert process.returncode == 1
  assert f"ValueError: {says}" in err
  assert at in err
  assert "within 3 s; check that" in err
