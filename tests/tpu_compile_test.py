"""The decode loop compiled for a TPU, on any machine: weights are read where they lie, the cache is updated in place.

Needs libtpu (`pip install -e .[tpu,test]`). `python -m pytest tests/tpu_compile_test.py --slow -n0 -s` prints the
figures.
"""

import functools
import importlib.util

import hlo
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


@pytest.fixture(scope="module")
def compiled():
  """Program -> Compiled, each compiled once."""
  with tpu.compiler() as ask:
    yield functools.cache(ask)


def faults(program: Program, compiled: tpu.Compiled) -> set[str]:
  """What is wrong with a compiled decode loop."""
  plan, needed = compiled.plan, compiled.plan.needed
  wrong = {
    "memory": needed > MEMORY[program.topology.split(":")[0]],
    "cache not aliased": plan.aliased < compiled.cache,
    "temporaries": plan.temporaries > MOST,
    "written": hlo.written(plan.text, SMALLEST),
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
