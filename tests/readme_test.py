"""What the README shows, it does: its Python runs, in order, on a tiny model; its paths and flags exist."""

import re
from pathlib import Path

import fixtures
import pytest

import decoder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
  """Fenced blocks whose fence says `language`."""
  fenced = (block.partition("\n") for block in README.split("```")[1::2])
  return [text for name, _, text in fenced if name == language]


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if "scripts/" in line]


@pytest.mark.slow
def test_python_runs_as_printed(monkeypatch, capsys, tmp_path):
  lm = decoder.load(fixtures.byte_model(tmp_path))
  monkeypatch.setattr(decoder, "load", lambda name: lm)
  names: dict = {}
  for block in blocks("python"):
    exec(compile(block, "README.md", "exec"), names)
  printed = capsys.readouterr().out
  assert names["result"].finish_reason in printed
  assert str(names["stream"].result.seed) in printed
  assert callable(names["step"])


@pytest.mark.parametrize(
  "line", [line for block in blocks("bash") for line in block.splitlines() if "scripts/" in line]
)
def test_commands_name_scripts_and_flags_that_exist(line):
  script = re.search(r"scripts/(\w+\.py)", line).group(1)
  source = (ROOT / "scripts" / script).read_text()
  shared = (ROOT / "scripts" / f"{name}.py" for name in re.findall(r"(?m)^import (\w+)$", source))
  source += "".join(file.read_text() for file in shared if file.exists())
  for flag in re.findall(r"--(\w+)", line):
    assert f'"{flag}"' in source, f"{script} has no --{flag}"


def test_every_path_of_the_tree_exists():
  (tree,) = blocks("")
  parent, seen = ROOT, 0
  for name in re.findall(r"(?m)^(?: {2})?[\w./]+", tree):
    path = (parent if name.startswith(" ") else ROOT) / name.strip()
    assert path.exists(), path
    parent, seen = (path if name == "decoder/" else parent), seen + 1
  assert seen > 10
