"""How fast do products read weights? A table of GB/s by format and rows, against the memory's measured speed.

Usage:
  python scripts/benchmark_kernels.py                       # matrices of SmolLM2-135M, 1 to 16 rows
  python scripts/benchmark_kernels.py --formats q8_0 --rows 1,8 --shapes 4096x14336

A round multiplies by as many matrices as make --mib, so that none is found in a processor's cache; formats and XLA's
own dot on float32 alternate, and the best round of each counts. Expect one row near 100 % in every format.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from decoder.measure.roofline import read_speed
from decoder.ops import quantised
from decoder.ops.kernels import build, products
from decoder.ops.linear import linear

FLAGS = flags.FLAGS
flags.DEFINE_list("formats", ["float32", "bfloat16", *quantised.KINDS], "float32, bfloat16 or kinds of QTensor.")
flags.DEFINE_list("rows", ["1", "2", "4", "8", "16"], "Rows of the left operand.")
flags.DEFINE_list("shapes", ["576x576", "1536x576", "576x1536"], "Weights, out x in; a round takes them in turn.")
flags.DEFINE_integer("mib", 192, "Weights read in a round.")
flags.DEFINE_integer("rounds", 15, "Alternating rounds; the best counts.")


def encode(weight: np.ndarray, kind: str) -> object:
  if kind in quantised.KINDS:
    return jax.tree.map(jnp.asarray, quantised.quantise(weight, kind, striped=True))
  return jnp.asarray(weight, kind)


def weights(kind: str, shapes: list[tuple[int, int]]) -> list:
  """Copies of one random matrix a shape, as many as make --mib."""
  rng = np.random.default_rng(0)
  one = [encode(rng.normal(size=shape).astype(np.float32), kind) for shape in shapes]
  copies = max(1, (FLAGS.mib << 20) // size(one))
  return [jax.tree.map(jnp.copy, weight) for _ in range(copies) for weight in one]


def size(tree: object) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def product(multiply, weights: list, rows: int):
  """A function () -> None that multiplies by all weights, one after the other."""
  widths = {weight.shape[1] for weight in weights}
  inputs = {width: jnp.ones((rows, width)) for width in widths}

  def chain(inputs: dict, weights: list):
    total = jnp.float32(0)
    for weight in weights:  # each waits for the one before it, as layers do
      total = total + multiply(inputs[weight.shape[1]] + total * 1e-30, weight)[0, 0]
    return total

  compiled = jax.jit(chain).lower(inputs, weights).compile()
  return lambda: compiled(inputs, weights).block_until_ready()


def seconds(work) -> float:
  start = time.perf_counter()
  work()
  return time.perf_counter() - start


def main(argv: list[str]) -> None:
  if not build.ready():
    raise app.UsageError("no CPU kernels here: put a C++ compiler on the PATH")
  shapes = [tuple(map(int, shape.split("x"))) for shape in FLAGS.shapes]
  limit = read_speed(max(FLAGS.mib, 256), FLAGS.rounds) / 1e9
  print(f"memory reads: {limit:.1f} GB/s\n{'format':>10} {'rows':>4} {'ms/GiB-f32':>10} {'GB/s':>6} {'of limit':>8}")
  made = {kind: weights(kind, shapes) for kind in FLAGS.formats}
  for rows in map(int, FLAGS.rows):
    runs = {kind: (product(linear, held, rows), held) for kind, held in made.items()}
    if "float32" in made:
      runs["xla f32"] = (product(products.dot, made["float32"], rows), made["float32"])
    best = dict.fromkeys(runs, np.inf)
    for _ in range(FLAGS.rounds):
      for kind, (run, _) in runs.items():
        best[kind] = min(best[kind], seconds(run))
    for kind, (_, held) in runs.items():
      speed, plain = size(held) / best[kind] / 1e9, sum(4 * np.prod(w.shape) for w in held) / 2**30
      print(f"{kind:>10} {rows:4} {best[kind] * 1e3 / plain:10.1f} {speed:6.1f} {speed / limit:8.0%}", flush=True)


if __name__ == "__main__":
  app.run(main)
