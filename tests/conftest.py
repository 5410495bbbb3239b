"""What holds for all tests: strict JAX settings, no network, `--slow`, and tiny models shared by a session.

Nearly all that tests take is compiling. So they compile quickly, not well, unless asked to compile as users do, with
`--optimised`; tests marked slow may run long enough for that to pay.
"""

import gc
import itertools
import os
import shutil
import socket
from pathlib import Path

import jax
import pytest

# Shapes are said, never guessed; a random key is used once.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_num_cpu_devices", 8)  # for meshes; what is not put on one runs on the first

QUICKLY = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jax.__version_info__ < (0, 11):  # later ones know no other way, and an unknown flag ends the process
  QUICKLY.append("--xla_cpu_use_fusion_emitters=false")

_TESTS = itertools.count(1)


def pytest_addoption(parser):
  parser.addoption("--slow", action="store_true", help="also run tests that take minutes")
  parser.addoption("--optimised", action="store_true", help="compile as users do; takes twice as long")


def pytest_configure(config):
  if not config.getoption("--optimised"):  # read when the first program is compiled, also by the scripts' processes
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), *QUICKLY)))


def pytest_collection_modifyitems(config, items):
  if not config.getoption("--slow"):
    skip = pytest.mark.skip(reason="takes minutes; run with --slow")
    for item in items:
      if "slow" in item.keywords:
        item.add_marker(skip)


@pytest.fixture(autouse=True)
def _few_programs():
  """Forgets compiled programs before there are too many: each takes several maps of memory, of which Linux gives a
  process 65,530, and XLA dies without a word where it gets no more."""
  yield
  maps = Path("/proc/self/maps")
  if next(_TESTS) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
    _forget_programs()


def _forget_programs():
  """JAX's, and those of models that are kept for several tests, which compile again what they need."""
  from decoder.programs import Programs

  for kept in gc.get_objects():
    if issubclass(type(kept), Programs):
      kept._compiled.clear()
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope="session")
def lm():
  """RAND-LM behind the façade, compiled once for all tests."""
  from fixtures import Letters, facade, rand_lm

  return facade(*rand_lm(), Letters.build())


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
  """A cache for scripts and processes, with the kernels that this process has: to build them takes a minute."""
  from decoder.ops.kernels import build

  home = tmp_path_factory.mktemp("home")
  (home / "decoder").mkdir()
  if build.ready():
    for library in build.cache_directory().glob("kernels-*.so"):
      shutil.copy(library, home / "decoder")
  return home


@pytest.fixture(autouse=True, scope="session")
def _no_network():
  """Only this machine may be reached."""
  connect = socket.socket.connect

  def local(self, address):
    host = address[0] if isinstance(address, tuple) else "localhost"
    if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("localhost", "127.0.0.1", "::1"):
      raise OSError(f"tests use no network, but something wanted {address}; mock it")
    return connect(self, address)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(socket.socket, "connect", local)
    yield
