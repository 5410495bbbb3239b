"""Sentence pairs as batches of few shapes, the same for the same seed, whichever step one starts from."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from decoder.training.loss import Pairs
from decoder.types import NONE

_STEP = 8  # lengths are rounded up to multiples


def read_pairs(file: Path) -> list[tuple[str, str]]:
  """Lines of source and target with a tab between. ValueError naming the line that is not so."""
  pairs = []
  for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
    parts = [part.strip() for part in line.split("\t")]
    if len(parts) != 2 or not all(parts):
      raise ValueError(f"{file}: line {number} must be a source and a target with a tab between, got {line[:80]!r}")
    pairs.append(tuple(parts))
  if not pairs:
    raise ValueError(f"{file}: no pairs in it; give a line for each, source and target with a tab between")
  return pairs


class Batches:
  """Batches of pairs by length: in each, every text is padded to one of `shapes` lengths, and as many rows as
  `tokens` allow are taken. `batch(step)` is a function of step and seed alone, so a run goes on where it stopped.

  ids: (source, target) token ids, ends included. noise: chance that a token shown to the decoder is `unknown` (Bowman
  et al. 2016, arXiv:1511.06349). ValueError where no pair is left.
  """

  def __init__(
    self,
    ids: Sequence[tuple[Sequence[int], Sequence[int]]],
    tokens: int,
    seed: int = 0,
    shapes: int = 6,
    noise: float = 0.0,
    unknown: int = 0,
  ):
    if not ids:
      raise ValueError("no pairs to make batches of")
    self._ids, self._seed, self._noise, self._unknown = ids, seed, noise, unknown
    longest = np.array([max(len(source), len(target)) for source, target in ids])
    self.lengths = _lengths(longest, shapes)
    self._bin_of = np.searchsorted(self.lengths, longest)
    self.rows = [max(1, tokens // length) for length in self.lengths]
    counts = np.bincount(self._bin_of, minlength=len(self.lengths))
    self.epoch_steps = int(sum(-(-count // rows) for count, rows in zip(counts, self.rows)))
    self._epoch, self._plan = -1, []

  def batch(self, step: int) -> Pairs:
    """The batch of a step, counted from 0. Rows that a last batch lacks are empty."""
    epoch, place = divmod(step, self.epoch_steps)
    if epoch != self._epoch:
      self._epoch, self._plan = epoch, self._planned(epoch)
    which, chosen = self._plan[place]
    shape = (self.rows[which], self.lengths[which])
    source_BS, target_BT = np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
    for row, index in enumerate(chosen):
      source, target = self._ids[index]
      source_BS[row, : len(source)], target_BT[row, : len(target)] = source, target
    hidden_BT = np.random.default_rng((self._seed, step)).random(shape) < self._noise
    return Pairs(source_BS, target_BT, np.where(hidden_BT & (target_BT != NONE), self._unknown, target_BT))

  def __iter__(self) -> Iterator[Pairs]:
    """One epoch."""
    return (self.batch(step) for step in range(self.epoch_steps))

  def _planned(self, epoch: int) -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng((self._seed, 1 << 20, epoch))
    order = rng.permutation(len(self._ids))
    plan = []
    for which, rows in enumerate(self.rows):
      mine = order[self._bin_of[order] == which]
      plan += [(which, mine[first : first + rows]) for first in range(0, len(mine), rows)]
    return [plan[place] for place in rng.permutation(len(plan))]


def _lengths(longest: np.ndarray, shapes: int) -> list[int]:
  """Lengths to pad to, so that each holds about as many tokens as the others."""
  ordered = np.sort(longest)
  mass = np.cumsum(ordered)
  ends = ordered[np.searchsorted(mass, mass[-1] * np.arange(1, shapes + 1) / shapes)]
  return sorted({int(-(-end // _STEP) * _STEP) for end in ends})
