"""Pictures are PNG files with something on them; without matplotlib, one line says what to install."""

import builtins

import pytest

from decoder.measure import breakdown, plots

FACTS = {
  "machine": {"processor": "P", "cores": 2, "memory_gb": 1, "device": "cpu", "devices": 1, "kernels": True},
  "versions": {"jax": "1"}, "date": "2026-01-01 00:00", "commit": None, "model": "tiny", "read_gb_per_s": 10.0,
}  # fmt: skip


def point(batch, prompt, position, stored="float32"):
  took = 1.0 + batch + position / 100
  return {
    "weights": "float", "stored": stored, "cache": "float32", "batch": batch, "prompt": prompt, "position": position,
    "capacity": 512, "tpot_ms": took, "ttft_ms": took * prompt, "tokens_per_s": 1e3 * batch / took,
    "limit_ms": took / 2,
  }  # fmt: skip


def results(points, broken=()):
  return {**FACTS, "points": list(points), "breakdown": list(broken)}


def broken(**changes):
  parts = dict.fromkeys(breakdown.PARTS, 2.0)
  one = {"stored": "float32", "cache": "float32", "batch": 1, "position": 8, "parts_ms": parts, "whole_ms": 12.0}
  return {**one, "untraced_ms": 11.0, **changes}


def test_a_full_grid_gives_four_pictures(tmp_path):
  from matplotlib.image import imread

  points = [point(b, p, p, s) for s in ("float32", "q8_0") for b in (1, 8) for p in (32, 128)]
  drawn, left_out = plots.draw(results(points, [broken(), broken(stored="q8_0")]), tmp_path / "new")
  assert [path.stem for path in drawn] == ["tokens_by_batch", "tpot_by_position", "ttft_by_prompt", "step_parts"]
  assert left_out == []
  for path in drawn:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 200
    coloured = (pixels[..., :3].max(axis=-1) - pixels[..., :3].min(axis=-1)) > 0.3
    assert coloured.sum() > 200  # lines or bars, not only text in grey


def test_lines_show_what_was_measured_and_the_limit(tmp_path):
  figure = plots.by_batch(results([point(1, 32, 32), point(8, 32, 32)]))
  measured, limit = figure.axes[0].lines
  assert measured.get_xdata().tolist() == [1, 8]
  assert measured.get_ydata().tolist() == pytest.approx([1e3 / 2.32, 8e3 / 9.32])
  assert limit.get_ydata().tolist() == pytest.approx([1e3 / 1.16, 8e3 / 4.66])


def test_what_one_place_cannot_show_is_left_out_with_a_word(tmp_path):
  drawn, left_out = plots.draw(results([point(1, 32, 32)]), tmp_path)
  assert drawn == []
  assert len(left_out) == 4
  assert "tokens_by_batch: wants two batches" in left_out


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
  real = builtins.__import__

  def missing(name, *rest):
    if name.split(".")[0] == "matplotlib":
      raise ImportError(name)
    return real(name, *rest)

  monkeypatch.setattr(builtins, "__import__", missing)
  with pytest.raises(ValueError, match=r"pip install 'decoder\[bench\]'"):
    plots.check()
