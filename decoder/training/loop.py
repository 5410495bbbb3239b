"""A training run: pure jitted steps, kept by Orbax so that one that is killed goes on where it was."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from decoder.checkpoint.atomic import write_file
from decoder.checkpoint.progress import progress_bar
from decoder.types import Array, Params

LOG, _PLAN = "log.jsonl", "plan.json"


@struct.dataclass
class TrainState:
  """params are trained, `average` follows them (Polyak & Juditsky 1992) and is what a run is for. step: steps done."""

  params: Params
  average: Params
  optimiser: Any
  step: Array


def keep_plan(plan: Any, out: Path) -> None:
  """Writes down what a run depends on, a dataclass, or finds that the run in `out` depends on the same: else a
  ValueError that says what differs."""
  file, now = Path(out) / _PLAN, dataclasses.asdict(plan)
  if file.exists():
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [f"{n} {before.get(n)!r}, now {value!r}" for n, value in now.items() if before.get(n) != value]
    if changed:
      raise ValueError(f"{out} holds a run with {', '.join(changed)}; give another directory, or remove it")
  file.parent.mkdir(parents=True, exist_ok=True)
  write_file(file, (json.dumps(now, indent=2) + "\n").encode())


def read_log(out: Path) -> list[dict[str, float]]:
  """The lines of a run's log."""
  return [json.loads(line) for line in (Path(out) / LOG).read_text(encoding="utf-8").splitlines()]


def optimiser(rate: float, steps: int, warm_up: int, matrices: Callable[[Any], Any]) -> optax.GradientTransformation:
  """Muon for the weights that `matrices` marks in a tree of parameters (Jordan et al. 2024; arXiv:2502.16982), Adam
  (arXiv:1412.6980) for others; gradients are clipped to norm 1. The rate rises for `warm_up` steps and falls to 0 as a
  cosine."""
  if not 0 < warm_up < steps:
    raise ValueError(f"warm_up must lie between 1 and the steps, {steps}, got {warm_up}")
  schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, steps)
  muon = optax.contrib.muon(schedule, adam_learning_rate=schedule, adam_b2=0.98, consistent_rms=0.2,
                            muon_weight_dimension_numbers=matrices)  # fmt: skip
  return optax.chain(optax.clip_by_global_norm(1.0), muon)


class Trainer:
  """loss: (params, batch, smoothing) -> (sum, number); the mean is minimised. directory: holds the run; what lies there
  is gone on with. decay: of the average. also: (params, batch) -> name to (sum, number), what else the log is to say of
  what is held out. ValueError for a directory of another run."""

  def __init__(
    self,
    loss: Callable,
    change: optax.GradientTransformation,
    params: Params,
    directory: Path,
    *,
    smoothing: float = 0.1,
    decay: float = 0.999,
    also: Callable | None = None,
  ):
    import orbax.checkpoint as ocp  # slow to import

    self.directory = Path(directory)
    self.directory.mkdir(parents=True, exist_ok=True)
    self._change = change
    self._kept = ocp.CheckpointManager(
      (self.directory / "state").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
    )
    self._args = ocp.args
    fresh = TrainState(params, jax.tree.map(jnp.copy, params), change.init(params), jnp.int32(0))
    self.state = self._restored(fresh)
    self.held_out = jax.jit(
      lambda params, batch: {"held_out": loss(params, batch), **(also(params, batch) if also else {})}
    )

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Array]:
      def mean(params: Params) -> Array:
        total, number = loss(params, batch, smoothing)
        return total / number

      value, slope = jax.value_and_grad(mean)(state.params)
      update, kept = change.update(slope, state.optimiser, state.params)
      params = optax.apply_updates(state.params, update)
      ease = jnp.minimum(decay, (1.0 + state.step) / (10.0 + state.step))
      average = jax.tree.map(lambda old, new: ease * old + (1 - ease) * new, state.average, params)
      return TrainState(params, average, kept, state.step + 1), value

    self._step = jax.jit(step, donate_argnums=0)

  @property
  def step(self) -> int:
    return int(self.state.step)

  def run(self, batch: Callable[[int], Any], steps: int, valid: Any, every: int, progress: bool = True) -> Params:
    """Trains up to `steps` steps in all and gives the average. Every so many steps, and at the end, the state is kept
    and a line of LOG says step, seconds, loss and held-out loss over the batches of `valid`, in nats a token."""
    start, seen, done = time.perf_counter(), [], self.step
    with progress_bar(steps - done, "training", progress, unit="step") as advance:
      for step in range(done, steps):
        self.state, value = self._step(self.state, batch(step))
        seen.append(value)
        advance(1)
        if (step + 1) % every == 0 or step + 1 == steps:
          self._note(step + 1, seen, valid, time.perf_counter() - start)
          seen = []
    self._kept.wait_until_finished()
    return self.state.average

  def _note(self, step: int, seen: list, valid: Any, seconds: float) -> None:
    self._kept.save(step, args=self._args.StandardSave(self.state))
    found = [jax.device_get(self.held_out(self.state.average, batch)) for batch in valid]
    sums = {name: np.sum([one[name] for one in found], axis=0) for name in found[0]}
    mean = float(np.mean(jax.device_get(seen)))
    line = {"step": step, "seconds": round(seconds, 1), "loss": round(mean, 4)}
    line |= {name: round(float(total / number), 4) for name, (total, number) in sums.items()}
    with open(self.directory / LOG, "a", encoding="utf-8") as log:
      log.write(json.dumps(line) + "\n")
      log.flush()
      os.fsync(log.fileno())

  def _restored(self, fresh: TrainState) -> TrainState:
    last = self._kept.latest_step()
    if last is None:
      return fresh
    try:
      return self._kept.restore(last, args=self._args.StandardRestore(fresh))
    except (ValueError, KeyError) as error:
      raise ValueError(
        f"{self.directory} holds a run of another model or optimiser; give another directory, or remove it"
      ) from error
