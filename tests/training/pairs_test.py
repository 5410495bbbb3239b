"""Batches hold every pair once an epoch, in few shapes, and are the same whichever step a run starts from."""

import numpy as np
import pytest

from decoder.training.pairs import Batches, read_pairs

RNG = np.random.default_rng(0)
IDS = [(RNG.integers(3, 90, RNG.integers(1, 70)).tolist(), RNG.integers(3, 90, RNG.integers(1, 70)).tolist())
       for _ in range(300)]  # fmt: skip


def held(pairs):
  """The pairs in a batch."""
  rows = zip(pairs.source_BS, pairs.target_BT)
  return [tuple(tuple(ids[ids >= 0].tolist()) for ids in row) for row in rows if row[1][0] >= 0]


def test_each_epoch_holds_every_pair_once_in_another_order():
  batches = Batches(IDS, 512)
  epochs = [[pair for step in range(batches.epoch_steps) for pair in held(batches.batch(first + step))]
            for first in (0, batches.epoch_steps)]  # fmt: skip
  want = sorted((tuple(source), tuple(target)) for source, target in IDS)
  assert sorted(epochs[0]) == sorted(epochs[1]) == want
  assert epochs[0] != epochs[1]


def test_shapes_are_few_and_within_the_budget():
  batches = Batches(IDS, 512, shapes=4)
  shapes = {pairs.source_BS.shape for pairs in batches}
  assert 2 <= len(shapes) <= 4
  assert all(rows * length <= 512 for rows, length in shapes)


def test_a_step_depends_on_the_seed_alone():
  here, there, other = Batches(IDS, 512, noise=0.5), Batches(IDS, 512, noise=0.5), Batches(IDS, 512, 1, noise=0.5)
  for step in (9, 3, 40):
    for mine, same in zip(here.batch(step), there.batch(step)):
      np.testing.assert_array_equal(mine, same)
  assert any(held(here.batch(step)) != held(other.batch(step)) for step in range(3))


def test_noise_hides_what_is_shown_and_never_what_is_asked():
  pairs = Batches(IDS, 512, noise=0.25, unknown=1).batch(0)
  there = pairs.target_BT >= 0
  hidden = pairs.shown_BT != pairs.target_BT
  assert not hidden[~there].any()
  assert (pairs.shown_BT[hidden] == 1).all()
  assert 0.15 < hidden[there].mean() < 0.35


@pytest.mark.parametrize("text", ["a\tb\nno tab here\n", "a\tb\n\tb\n", "a\tb\tc\n"])
def test_a_wrong_line_is_named(tmp_path, text):
  (tmp_path / "x.tsv").write_text(text)
  with pytest.raises(ValueError, match=r"x\.tsv: line [12] must be a source and a target"):
    read_pairs(tmp_path / "x.tsv")


def test_an_empty_file_and_no_pairs_are_refused(tmp_path):
  (tmp_path / "x.tsv").write_text("")
  with pytest.raises(ValueError, match="no pairs"):
    read_pairs(tmp_path / "x.tsv")
  with pytest.raises(ValueError, match="no pairs"):
    Batches([], 512)
