"""The decode loop compiled for a TPU, on any machine: weights are read where they lie, the cache is updated in place.

Needs libtpu (`pip install -e .[tpu,test]`). `python -m pytest tests/tpu_compile_test.py --slow -n0 -s` prints the
figures.
"""

import functools
import importlib.util
import math
import re

import pytest
import tpu
from tpu import Program

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e .[tpu,test]"),
]

MEMORY = {"v5e": 16e9, "v6e": 32e9, "v5p": 95e9}  # bytes of a chip
MOST = 64 << 20  # bytes of temporaries
SMALLEST = 1024 * 4096  # bytes of the smallest weight, the keys' projection in int8; a cache buffer is 8 times that
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}  # others: 4
# What writes nothing of its own: names for buffers that are there, and the starting of prefetches into fast memory.
NAMING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "copy-start", "slice-start"}


@pytest.fixture(scope="module")
def compiled():
  """Program -> Compiled, each compiled once."""
  with tpu.compiler() as ask:
    yield functools.cache(ask)


def written(text: str, least: int = SMALLEST) -> list[str]:
  """Instructions of an optimised HLO that write an array of `least` bytes or more to main memory, but for the scatters
  that update a buffer in place (the compiler copies beforehand what it may not overwrite, which is then listed).

  Fast memory is S(1) in a layout. What happens within a fusion is never written down.
  """
  lines = text.splitlines()
  fused = {name for line in lines if " fusion(" in line for name in re.findall(r"calls=%?([\w.\-]+)", line)}
  scatters = {name for name, body in bodies(lines).items() if any(re.search(r"ROOT .* scatter\(", x) for x in body)}
  found = []
  for name, body in bodies(lines).items():
    for line in [] if name in fused else body:
      shape, operation = re.match(r"\s+(?:ROOT )?%?\S+ = (.*?) ([\w\-]+)\(", line).groups()
      in_place = operation == "scatter" or scatters & set(re.findall(r"calls=%?([\w.\-]+)", line))
      if operation not in NAMING and not in_place and largest(shape) >= least:
        found.append(line.strip())
  return found


def bodies(lines: list[str]) -> dict[str, list[str]]:
  """The instructions of each computation, by its name."""
  found, current = {}, []
  for line in lines:
    if opening := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      current = found.setdefault(opening[1], [])
    elif re.match(r"\s+(?:ROOT )?%?\S+ = ", line):
      current.append(line)
  return found


def largest(shape: str) -> float:
  """Bytes of the largest array of a shape that lies in main memory."""
  arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape)
  sizes = [BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims, layout in arrays
           if "S(1)" not in layout]  # fmt: skip
  return max(sizes, default=0)


def faults(program: Program, compiled: tpu.Compiled) -> set[str]:
  """What is wrong with a compiled decode loop."""
  plan, needed = compiled.plan, compiled.plan.needed
  wrong = {
    "memory": needed > MEMORY[program.topology.split(":")[0]],
    "cache not aliased": plan.aliased < compiled.cache,
    "temporaries": plan.temporaries > MOST,
    "written": written(plan.text),
  }
  print(f"\n{program}: {needed / 1e9:.2f} GB in all, {plan.aliased / 1e9:.2f} aliased", end=", ")
  print(f"{plan.temporaries / 1e6:.1f} MB of temporaries, {len(wrong['written'])} weights or caches written")
  return {name for name, bad in wrong.items() if bad}


OURS = [Program(), Program("bfloat16", 2), Program("int8", 2, "beams"), Program("bfloat16", 2, "experts")]
OURS.append(Program("int8", 2, rows=1))  # which takes a single row of the table of embeddings


@pytest.mark.parametrize("program", OURS, ids=lambda p: f"{p.kind}-{p.layers}-{p.variant}{p.topology}-{p.rows}")
def test_the_decode_loop_writes_nothing_but_the_new_tokens(compiled, program):
  assert faults(program, compiled(program)) == set()


@pytest.mark.parametrize(
  ("variant", "expected"),
  [
    ("undonated", {"cache not aliased", "written"}),
    ("written out", {"temporaries", "written"}),
    ("two-axis scatter", {"written"}),
    ("reordered", {"written"}),
    ("alone", {"temporaries", "written"}),
  ],
)
def test_broken_variants_are_refused(compiled, variant, expected):
  """Negative controls, on two layers."""
  program = Program("int8", 2, variant, rows=1 if variant == "alone" else 8)
  assert faults(program, compiled(program)) >= expected
