"""The scripts as a user types them, on a tiny model: two processes serve, and measured times are simulated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import byte_model

ROOT = Path(__file__).parents[2]


def run(script, *flags):
  command = [sys.executable, str(ROOT / "scripts" / script), *flags]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes want a core each")
def test_two_processes_write_through_a_burst(tmp_path):
  sizes = {"rows": 2, "prompt": 8, "tokens": 40, "after": 4, "long": 40, "burst": 2, "answer": 2, "capacity": 64}
  flags = [f"--{name}={size}" for name, size in sizes.items()]
  file = tmp_path / "burst.json"
  model = byte_model(tmp_path)
  done = run("serve_apart.py", "--model", str(model), *flags, "--rounds=1", "--chunk=16", "--json", str(file))
  assert done.returncode == 0, done.stderr
  told = json.loads(file.read_text())
  assert set(told) == {"work", "apart", "together, chunks of 16"}
  assert all(each["ratio_p99"] > 0 and each["gaps"] > 0 for name, each in told.items() if name != "work")
  assert done.stdout.count("TPOT p50") == 2


@pytest.mark.slow
def test_times_are_measured_and_simulated(tmp_path):
  times, picture = tmp_path / "times.json", tmp_path / "goodput.png"
  flags = ["--length=16", "--length=40", "--batch=1", "--batch=4", "--held=16", "--chunk=16"]
  done = run("goodput.py", "--model", str(byte_model(tmp_path)), "--measure", str(times), *flags)
  assert done.returncode == 0, done.stderr
  done = run("goodput.py", "--times", str(times), "--out", str(picture), "--requests=60", "--devices=2")
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("requests a second and device") == 2
  assert picture.read_bytes().startswith(b"\x89PNG")
