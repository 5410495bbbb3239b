"""Does a decode step's attention cost what it reads? Time against the tokens held, and against the capacity.

Usage:
  python scripts/benchmark_attention.py                                 # C++ kernel where there is one
  python scripts/benchmark_attention.py --plain --plot attention.png    # XLA's block loop

One layer of SmolLM2-135M's shape (9 query heads, 3 key/value heads of 64), one row, float32: append a token to a
donated cache, attend over it. First tokens held vary at one capacity, then the capacity at 4,096 tokens held; sizes
alternate within each round, medians count. Expect a straight line through the first and a level one through the second.
"""

import statistics

import entry
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("capacity", 65536, "Slots of the cache while the tokens held vary.")
flags.DEFINE_integer("held", 4096, "Tokens held while the capacity varies.")
flags.DEFINE_integer("rounds", 9, "Alternating rounds.")
flags.DEFINE_bool("plain", False, "XLA's block loop instead of the C++ kernel.")
flags.DEFINE_string("plot", None, "Where to draw both as a PNG; needs matplotlib.")

HEADS, KV_HEADS, SIZE = 9, 3, 64
STEPS = 50  # steps a call: enough to hide the call itself


def main() -> None:
  full = FLAGS.capacity
  by_held = measure([(held, full) for held in (2**n for n in range(8, full.bit_length()))])
  by_capacity = measure([(FLAGS.held, size) for size in (2**n for n in range(FLAGS.held.bit_length(), 17))])
  base, slope = fit([held for held, _ in by_held], list(by_held.values()))
  print(f"{'held':>6} {'capacity':>8} {'µs':>8} {'of the line':>11}")
  for (held, capacity), taken in by_held.items():
    print(f"{held:6} {capacity:8} {taken:8.1f} {taken / (base + slope * held):11.2f}")
  print(f"line: {base:.1f} µs + {slope * 1024:.2f} µs a 1,024 tokens, {2 * 4 * KV_HEADS * SIZE / slope / 1e3:.1f} GB/s")
  smallest = next(iter(by_capacity.values()))
  print(f"{'held':>6} {'capacity':>8} {'µs':>8} {'to the first':>12}")
  for (held, capacity), taken in by_capacity.items():
    print(f"{held:6} {capacity:8} {taken:8.1f} {taken / smallest:12.2f}")
  if FLAGS.plot:
    draw(by_held, by_capacity, base, slope)


def measure(cases: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
  """Microseconds of a step by (tokens held, capacity)."""
  from decoder.measure.latency import alternating

  times = alternating({case: prepare(*case) for case in cases}, FLAGS.rounds)
  return {case: statistics.median(taken) * 1e3 / STEPS for case, taken in times.items()}


def prepare(held: int, capacity: int):
  """A function () -> None: STEPS steps, each of which writes token `held` − 1 anew and attends over all of them."""
  import jax
  import jax.numpy as jnp

  from decoder.cache import LayerSpec, allocate
  from decoder.ops.attention import Query
  from decoder.ops.kernels import attention as kernel

  def fill():
    cache = allocate((LayerSpec("global", KV_HEADS, SIZE),), 1, capacity)
    layers = jax.tree.map(lambda x: x + 0.5, cache.layers)  # touched: memory never written is not memory read
    return cache.replace(layers=layers).claim(jnp.arange(held, dtype=jnp.int32)[None])

  def step(_, carry):
    cache, q_BTNH = carry
    positions_BT = jnp.full((1, 1), held - 1, jnp.int32)
    cache = cache.claim(positions_BT)
    entry_ = cache.layer(0).append(positions_BT, q_BTNH[:, :, :KV_HEADS], q_BTNH[:, :, KV_HEADS : 2 * KV_HEADS])
    query, layout = Query(q_BTNH, positions_BT, SIZE**-0.5), entry_.layout
    if FLAGS.plain:
      k, v = entry_.storage["k"], entry_.storage["v"]
      blocks = layout.blocks(positions_BT, None)
      seen_BTNH = kernel.reference(query, k, v, layout.positions_BS, blocks, layout.block)
    else:
      seen_BTNH, entry_ = entry_.attend(query)
    return cache.with_layer(0, entry_), seen_BTNH  # what was seen asks next, so that no step can be left out

  program = jax.jit(lambda *carry: jax.lax.fori_loop(0, STEPS, step, carry), donate_argnums=0)
  carry = [jax.jit(fill)(), jnp.ones((1, 1, HEADS, SIZE))]
  compiled = program.lower(*carry).compile()

  def run() -> None:
    carry[:] = compiled(*carry)
    carry[1].block_until_ready()

  return run


def fit(x: list[int], y: list[float]) -> tuple[float, float]:
  """Intercept and slope of a line, each point weighing by its relative error."""
  import numpy as np

  slope, base = np.polyfit(x, y, 1, w=1 / np.asarray(y))
  return float(base), float(slope)


def draw(by_held: dict, by_capacity: dict, base: float, slope: float) -> None:
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
  figure = Figure(figsize=(6, 4), dpi=90, layout="constrained")
  axes = figure.subplots()
  held = [held for held, _ in by_held]
  axes.loglog(held, by_held.values(), "o", label=f"tokens held, capacity {FLAGS.capacity:,}")
  axes.loglog(
    held, [base + slope * x for x in held], "-", color="C0", label=f"{base:.0f} µs + {slope * 1024:.1f} µs a 1,024"
  )
  axes.loglog(
    [c for _, c in by_capacity], by_capacity.values(), "s", color="C1", label=f"capacity, {FLAGS.held:,} held"
  )
  axes.set(xlabel="tokens (log)", ylabel="µs a step and layer (log)", title="Attention of one decode step")
  axes.grid(which="both", alpha=0.3)
  axes.legend(frameon=False)
  figure.savefig(FLAGS.plot)


if __name__ == "__main__":
  entry.run(main)
