"""What to change where a model does not fit, and what room is left where it does."""

from collections.abc import Callable
from typing import NamedTuple

from decoder.measure import topologies
from decoder.measure.plan import Plan, Planner
from decoder.measure.shapes import CACHES, FORMATS

_STEP = 256  # tokens, in which contexts are suggested
_MOST = 1 << 16  # rows looked at


class Wish(NamedTuple):
  """What was asked for, but for the mesh: formats of weights and cache, rows, and tokens of each."""

  weights: str
  cache: str
  batch: int
  context: int


def advise(planner: Planner, wish: Wish) -> list[str]:
  """Single changes after which it fits, in words; of each kind the smallest. Two together where no single one helps."""
  found = [*_smaller(planner, wish), *_formats(planner, wish)]
  for larger in topologies.larger(planner.topology):
    if _fits(Planner(planner.config, larger), wish):
      found.append(f"use {larger.name}")
      break
  if found:
    return found
  for weights in _formats_of(planner, wish):
    both = _smaller(planner, wish._replace(weights=weights))
    if both:
      return [f"hold weights as {weights} and {one}" for one in both]
  return ["nothing that is known here helps: choose a smaller model or larger devices"]


def room(planner: Planner, wish: Wish) -> list[str]:
  """How far a case that fits could go."""
  told, longest = [], planner.network.context
  rows = _largest(lambda n: _fits(planner, wish._replace(batch=wish.batch << n)), 0, _MOST.bit_length())
  if rows:
    told.append(f"up to {wish.batch << rows:,} rows of {wish.context:,} tokens fit (batches doubled)")
  steps = _largest(lambda n: _fits(planner, wish._replace(context=n * _STEP)), wish.context // _STEP, longest // _STEP)
  if steps * _STEP > wish.context:
    made = ", all that the model was made for," if steps * _STEP + _STEP > longest else ""
    told.append(f"up to {steps * _STEP:,} tokens{made} fit in {wish.batch:,} row{'s' * (wish.batch > 1)}")
  return told


def _smaller(planner: Planner, wish: Wish) -> list[str]:
  halves = [wish.batch >> n for n in range(1, wish.batch.bit_length())]
  batch = next((rows for rows in halves if _fits(planner, wish._replace(batch=rows))), None)
  found = [f"use a batch of {batch}"] if batch else []
  steps = _largest(lambda n: _fits(planner, wish._replace(context=n * _STEP)), 0, -(-wish.context // _STEP) - 1)
  return [*found, f"use a context of {steps * _STEP:,}"] if steps else found


def _formats(planner: Planner, wish: Wish) -> list[str]:
  fitting = (name for name in _formats_of(planner, wish) if _fits(planner, wish._replace(weights=name)))
  weights = next(fitting, None)
  found = [f"hold weights as {weights}"] if weights else []
  current = CACHES[wish.cache].dtype.dtype.itemsize
  smaller = [name for name, codec in CACHES.items() if codec.dtype.dtype.itemsize < current]
  cache = next((name for name in smaller if _fits(planner, wish._replace(cache=name))), None)
  return [*found, f"hold the cache as {cache}"] if cache else found


def _formats_of(planner: Planner, wish: Wish) -> list[str]:
  """Formats that the devices suit and that take less than the one asked for, those with the most bits first."""
  sizes = {}
  for name in dict.fromkeys([*filter(planner.suits, FORMATS), wish.weights]):
    plan = planner.best(name, wish.cache, 1, _STEP)
    sizes[name] = plan.need.weights if plan else 0
  return sorted((name for name in sizes if sizes[name] < sizes[wish.weights]), key=sizes.get, reverse=True)


def _fits(planner: Planner, wish: Wish) -> bool:
  plan: Plan | None = planner.best(*wish)
  return plan is not None and plan.fits


def _largest(holds: Callable[[int], bool], low: int, high: int) -> int:
  """The largest number in low … high for which it holds, which it does up to some number; `low` if for none."""
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if holds(middle) else (low, middle - 1)
  return low
