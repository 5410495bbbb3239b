"""Ratios between two runs, tables, files that are whole or not there."""

import json

import pytest

from decoder.measure import results

AXES = {"weights": "float", "cache": "float32", "batch": 1, "prompt": 8, "position": 8, "capacity": 64}


def point(**changes):
  return {**AXES, "ttft_ms": 80.0, "tpot_ms": 20.0, "compile_s": 0.0, **changes}


@pytest.fixture
def files(tmp_path):
  old, new = tmp_path / "old.json", tmp_path / "new.json"
  old.write_text(json.dumps({"points": [point(), point(batch=8, tpot_ms=50.0), point(batch=32)]}))
  new.write_text(json.dumps({"points": [point(tpot_ms=10.0, of_limit=0.5), point(batch=8), point(batch=4)]}))
  return results.read(new), results.read(old)


def test_ratios_are_new_over_old_at_the_points_of_both(files):
  compared = results.compare(*files)
  (first, one), (second, eight) = compared.ratios
  assert first == AXES
  assert second == {**AXES, "batch": 8}
  assert (one["tpot_ms"], one["ttft_ms"], eight["tpot_ms"]) == (0.5, 1.0, 0.4)
  assert one["of_limit"] is None  # the earlier run has none
  assert one["compile_s"] is None  # nothing to divide by
  assert compared.added == [{**AXES, "batch": 4}]
  assert compared.missing == [{**AXES, "batch": 32}]


def test_a_comparison_reads_well(files):
  lines = results.comparison_table(results.compare(*files)).splitlines()
  assert lines[0].split()[:6] == list(AXES)
  assert lines[1].split()[:9] == ["float", "float32", "1", "8", "8", "64", "1.000", "–", "0.500"]
  assert lines[-2].startswith("only in this run: weights float, cache float32, batch 4")
  assert lines[-1].startswith("only in the earlier run: weights float, cache float32, batch 32")
  assert len({len(line) for line in lines[:3]}) == 1  # columns are aligned


def test_capacities_are_compared_round_by_round():
  rounds = {64: [10.0, 20.0, 40.0], 512: [11.0, 20.0, 48.0]}
  points = [point(capacity=size, rounds_tpot_ms=times) for size, times in rounds.items()]
  (line,) = results.capacity_ratios(points)
  assert "capacity 512: a step takes 1.100 × that at capacity 64" in line
  assert results.capacity_ratios([points[0], {**points[1], "batch": 2}]) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
  path = tmp_path / "r.json"
  results.write(path, {"points": [point()]})
  assert results.read(path) == {"points": [point()]}
  with pytest.raises(ValueError, match="JSON compliant"):
    results.write(path, {"points": [point(tpot_ms=float("nan"))]})
  assert results.read(path) == {"points": [point()]}
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"points": 3}', '{"points": [{"batch": 1}]}'])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, text):
  (tmp_path / "x.json").write_text(text)
  with pytest.raises(ValueError, match=r"x\.json"):
    results.read(tmp_path / "x.json")
