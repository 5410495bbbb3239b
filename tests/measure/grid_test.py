"""A grid on RAND-LM: every figure is there, and what cannot be measured is refused with its flag."""

import jax.numpy as jnp
import numpy as np
import pytest

from decoder.measure import grid, results
from decoder.measure.grid import Axes, Point


@pytest.fixture(scope="module")
def measured(lm):
  axes = Axes(("float32", "bfloat16"), batches=(1, 2), prompts=(5,), positions=(5, 40), capacities=(64,))
  points = grid.points("float", axes, 6, lm.network)
  runs = []
  figures = grid.measure(lm, points, tokens=6, rounds=2, on_run=lambda: runs.append(1))
  assert len(points) == len(figures) == 8
  assert len(runs) == 8 * 3
  return grid.against(figures, 1e9)


def test_every_point_has_every_figure(measured):
  for point in measured:
    assert set(results.AXES) | set(results.FIGURES) <= set(point)
    assert all(point[name] is not None and point[name] >= 0 for name in results.FIGURES)
    assert point["tpot_p95_ms"] >= point["stream_tpot_ms"] > 0
    assert point["tokens_per_s"] == pytest.approx(1e3 * point["batch"] / point["tpot_ms"])
    assert point["prefill_tokens_per_s"] == pytest.approx(1e3 * 5 * point["batch"] / point["ttft_ms"])
    assert point["of_limit"] == pytest.approx(point["limit_ms"] / point["tpot_ms"])
    assert point["limit_ms"] == pytest.approx(point["bytes_per_step"] / 1e6)  # at 1 GB/s
    assert len(point["rounds_tpot_ms"]) == 2
    assert point["stored"] == "float32"


def test_bytes_follow_rows_positions_and_the_cache_format(measured):
  by = {(p["cache"], p["batch"], p["position"]): p["bytes_per_step"] for p in measured}
  token = 2 * 2 * 4 * 8 * 4  # bytes a token holds in float32
  assert by["float32", 1, 40] - by["float32", 1, 5] == 35 * token
  assert by["float32", 2, 40] - by["float32", 2, 5] == 2 * 35 * token
  assert by["bfloat16", 2, 40] - by["bfloat16", 2, 5] == 2 * 35 * token / 2


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_run_decodes_from_the_position_it_says_in_the_format_it_says(lm, name):
  point = Point("float", name, 2, 5, 40, 64)
  decoding = grid.begin(lm, point, 40, 6, held=39)
  decoding.advance(1)
  layout = decoding.state.cache.layouts["global"]
  assert (layout.positions_BS >= 0).sum(axis=1).tolist() == [40, 40]  # held when the first measured step begins
  assert decoding.state.cache.codec == grid.CODECS[name]
  k_BKSH = grid.CODECS[name].read(decoding.state.cache.layers[0]["k"], layout, 0)
  assert k_BKSH.dtype == jnp.dtype(name)
  assert np.ptp(np.asarray(k_BKSH[:, :, :40], np.float32), axis=(0, 2, 3)).min() > 1  # no zeros: real work


def test_a_compiled_program_is_not_taken_for_that_of_another_cache_format(lm):
  for name in ("float32", "bfloat16", "float32"):
    sample = grid.run(lm, Point("float", name, 1, 5, 5, 64), 4)
    assert (len(sample.fused), len(sample.single)) == (1, 2)
    assert sample.peak_bytes > 1e6


@pytest.mark.parametrize(
  ("axes", "says"),
  [
    (Axes((), (1,), (100,), (5,), (64,)), "--prompts 100 and a new token do not fit --capacities 64"),
    (Axes((), (1,), (5,), (60,), (64,)), "--positions 60 and --tokens 8 + 1 do not fit --capacities 64"),
    (Axes((), (1,), (5,), (250,)), "--positions 250 and --tokens 8 + 1 do not fit --capacities 256"),
    (Axes((), (1,), (5,), (300,), (512,)), "--positions 300 and --tokens 8 + 1 is beyond the model's context, 256"),
    (Axes((), (1,), (5,), (), (512,)), "--capacities 512 is beyond the model's context, 256"),
    (Axes((), (1,), (5,), (), (64,)), None),
  ],
)
def test_points_without_sense_are_named(lm, axes, says):
  (point,) = grid.points("float", axes, 8, lm.network)
  assert grid.objection(point, 8, lm.network) == says


def test_an_unknown_cache_format_is_refused():
  with pytest.raises(ValueError, match="--caches knows float32, bfloat16, float16, got 'int3'"):
    grid.points("float", Axes(("int3",), (1,), (5,)), 8)
