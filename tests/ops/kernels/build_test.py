"""Building: what happens without a compiler, with a failing one, and with two processes at once."""

import concurrent.futures
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.ops import quantised
from decoder.ops.kernels import build
from decoder.ops.linear import linear

needs_compiler = pytest.mark.skipif(
  not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler is on the PATH here"
)


@pytest.fixture
def afresh(monkeypatch, tmp_path):
  """As in a new process, with an empty cache."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  build._registered.cache_clear()
  jax.clear_caches()
  yield tmp_path / "decoder"
  build._registered.cache_clear()
  jax.clear_caches()


def small(directory, text):
  directory.mkdir()
  (directory / "small.cc").write_text(text)
  return directory


def test_without_a_compiler_one_notice_and_the_same_results(afresh, monkeypatch, caplog):
  monkeypatch.setattr(build, "COMPILERS", ("a-compiler-that-is-not-there",))
  rng = np.random.default_rng(0)
  w, x = rng.normal(size=(33, 64)).astype(np.float32), rng.normal(size=(2, 64)).astype(np.float32)
  with caplog.at_level(logging.WARNING):
    out = jax.jit(linear)(x, w)
    for kind in quantised.KINDS:
      q = jax.tree.map(jnp.asarray, quantised.quantise(w, kind, striped=True))
      expected = x @ np.asarray(quantised.dequantise(q)).T
      np.testing.assert_allclose(jax.jit(linear)(x, q), expected, atol=1e-4)
  np.testing.assert_allclose(out, x @ w.T, atol=1e-5)
  assert not build.ready()
  assert len(caplog.records) == 1
  assert "a-compiler-that-is-not-there" in caplog.text


@needs_compiler
def test_a_failing_compiler_is_a_notice(afresh, monkeypatch, caplog, tmp_path):
  monkeypatch.setattr(build, "SOURCES", small(tmp_path / "source", "this is not C++\n"))
  with caplog.at_level(logging.WARNING):
    assert not build.ready()
  assert "could not be built" in caplog.text
  assert list(afresh.iterdir()) == []


@needs_compiler
def test_builders_at_once_leave_one_library(monkeypatch, tmp_path):
  monkeypatch.setattr(build, "SOURCES", small(tmp_path / "source", 'extern "C" int answer() { return 42; }\n'))
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    built = list(pool.map(build.library, [tmp_path / "cache"] * 4))
  assert list((tmp_path / "cache").iterdir()) == [built[0]]


@needs_compiler
def test_another_source_is_another_library(monkeypatch, tmp_path):
  one, other = (small(tmp_path / name, f'extern "C" int answer() {{ return {n}; }}\n') for n, name in enumerate("ab"))
  names = []
  for source in (one, other, one):
    monkeypatch.setattr(build, "SOURCES", source)
    names.append(build.library(tmp_path / "cache").name)
  assert names[0] == names[2] != names[1]


@needs_compiler
def test_programs_of_another_backend_build_nothing(afresh, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert not build.ready()
  assert not afresh.exists()


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or "x86" not in build.platform.machine(), reason="flags of x86 only")
@pytest.mark.parametrize("machine", ["x86-64", "haswell"])
def test_narrower_machines_pass_the_same_tests(machine, tmp_path, monkeypatch):
  """Vectors of 4 and of 8 floats, and the plain C++ in place of instructions that are missing."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  files = [str(Path(__file__).parent / f"{name}_test.py") for name in ("products", "attention")]
  code = f"""
import sys, pytest, tests.conftest  # first, since it counts devices, which building starts
from decoder.ops.kernels import build
build.ARCHITECTURE = "-march={machine}"
assert build.ready()
sys.exit(pytest.main({["-p", "no:cacheprovider", *files]!r}))
"""
  command, root = [sys.executable, "-c", code], Path(__file__).parents[3]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900, check=False)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
