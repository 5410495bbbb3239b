"""The floors of `architecture.md`: imports go down only. Read from the sources with ast, nothing is executed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "decoder").rglob("*.py"))
FLOORS = {
  "types": 0,
  "ops": 1,
  "cache": 2,
  "sampling": 2,
  "text": 2,
  "models": 3,
  "strategies": 3,
  "sharding": 3,
  "checkpoint": 4,
  "training": 4,
  "serving": 5,
  "measure": 5,
  **dict.fromkeys(("settings", "result", "report", "programs", "prompts", "reader", "constrained", "guided"), 5),
  **dict.fromkeys(("generation_config", "decoding", "session", "score", "view", "generate"), 5),
  **dict.fromkeys(
    ("beam_settings", "beam_programs", "searching", "encoded", "translator", "speculating", "drafters"), 5
  ),
  **dict.fromkeys(("translating", "journal", "processes"), 5),
}
BANS = {"strategies": {"models"}, "models": {"strategies", "sharding"}}


def imports(source: str) -> set[str]:
  """Dotted names that a source imports, anywhere in it; not those for type checkers alone."""
  names = set()
  tree = ast.parse(source)
  for node in ast.walk(tree):
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
      node.body = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def part(module: str) -> str:
  return module.split(".")[1]


def faults(home: str, source: str) -> list[str]:
  """What a file of `home` (the name below `decoder`) imports against the rules."""
  wrong = []
  for name in sorted(imports(source)):
    if name.startswith("decoder."):
      other = part(name)
      if other not in FLOORS:
        wrong.append(f"{name}: give {other} a floor in this test")
      elif FLOORS[other] > FLOORS[home]:
        wrong.append(f"{home} imports {name} from a higher floor")
      elif other in BANS.get(home, ()):
        wrong.append(f"{home} may never import {other}")
      elif home == "text" and other != "text":
        wrong.append(f"text imports nothing of ours, but {name}")
      elif home != other and FLOORS[home] == FLOORS[other] == 2:
        wrong.append(f"{home} imports its neighbour {other}")
    if name.startswith("flax.linen") and home != "models":
      wrong.append(f"{home} imports flax.linen")
    if name.startswith("flax.nnx"):
      wrong.append("flax.nnx is imported")
    if home == "text" and name.split(".")[0] in ("jax", "flax"):
      wrong.append("text imports jax")
  return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down_only(file):
  home = file.relative_to(ROOT / "decoder").parts[0].removesuffix(".py")
  if home == "__init__":
    return  # the public names may come from anywhere
  assert home in FLOORS, f"give {home} a floor in this test"
  assert faults(home, file.read_text()) == []


@pytest.mark.parametrize(
  ("home", "line"),
  [
    ("ops", "from decoder.cache import Cache"),
    ("cache", "import decoder.sampling"),
    ("strategies", "from decoder.models import blocks"),
    ("models", "from decoder.strategies import run"),
    ("checkpoint", "def f():\n  from decoder import generate"),
    ("strategies", "import flax.linen as nn"),
    ("models", "from flax import nnx"),
    ("text", "from decoder.types import NONE"),
    ("text", "import jax.numpy"),
    ("ops", "from decoder.novelty import thing"),
  ],
)
def test_a_forbidden_import_is_found(home, line):
  """Negative control."""
  assert len(faults(home, line)) == 1


@pytest.mark.parametrize("file", [*FILES, *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda f: f.name)
def test_files_stay_short(file):
  assert len(file.read_text().splitlines()) <= 450


def test_text_is_importable_without_jax():
  code = "import decoder.text, sys; sys.exit(any(m.split('.')[0] in ('jax', 'flax') for m in sys.modules))"
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
