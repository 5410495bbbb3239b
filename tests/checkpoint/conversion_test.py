"""Converted directories: the same weights, whole or absent."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from decoder.checkpoint import CheckpointError, convert, load, open_source, orbax, verify
from decoder.checkpoint.mapping import flatten, unflatten

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tiny, tmp_path) -> Path:
  return tiny.huggingface(tmp_path / "source", tiny.config())


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
  monkeypatch.setattr("decoder.checkpoint.conversion.SLICE_BYTES", 300_000)


def remains(directory: Path) -> list[str]:
  return sorted(entry.name for entry in directory.iterdir() if entry.name != "source")


def equal(left: dict, right: dict) -> bool:
  left, right = flatten(left), flatten(right)
  return left.keys() == right.keys() and all(np.array_equal(left[path], right[path]) for path in left)


@pytest.mark.parametrize("stored", [None, "float32", "bfloat16", "float16"])
def test_conversion_keeps_every_weight(tiny, source, tmp_path, stored):
  out = convert(source, tmp_path / "out", stored)
  ours, theirs = load(out, "float32"), load(source, stored or "float32")
  assert equal(ours.params, jax.tree.map(lambda leaf: leaf.astype("float32"), theirs.params))
  assert ours.config == theirs.config
  verify(out)
  manifest = json.loads((out / "manifest.json").read_text())
  assert manifest["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(ours.params))
  assert manifest["dtype"] == (stored or "float32")
  assert len(list((out / "weights").iterdir())) > 3
  assert len(manifest["source"]["files"]["model.safetensors"]) == 64
  assert remains(tmp_path) == ["out"]


def test_a_converted_directory_converts_again(source, tmp_path):
  first = convert(source, tmp_path / "first")
  second = convert(first, tmp_path / "second")
  assert equal(load(first, "float32").params, load(second, "float32").params)


def test_orbax_itself_restores_every_slice(source, tmp_path):
  out = convert(source, tmp_path / "out")
  leaves = {}
  for item in sorted((out / "weights").iterdir()):
    leaves |= flatten(ocp.PyTreeCheckpointer().restore(item))
  assert equal(unflatten(leaves), load(source, "float32").params)


def test_slices_of_another_layout_are_restored_by_orbax(source, tmp_path):
  """Compressed, and in OCDBT: what Orbax writes when left to its defaults."""
  out = convert(source, tmp_path / "out")
  wanted = load(source, "float32").params
  for name, options in (("0000", {"use_ocdbt": False}), ("0001", {"use_ocdbt": True})):
    item = out / "weights" / name
    tree = ocp.PyTreeCheckpointer().restore(item)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(item, args=ocp.args.PyTreeSave(tree), force=True)
  assert equal(load(out, "float32").params, wanted)
  verify(out)


def test_loading_maps_the_files_and_never_imports_orbax(source, tmp_path):
  out = convert(source, tmp_path / "out", "float32")
  code = """if True:
    import sys, jax
    from decoder.checkpoint import load
    leaves = jax.tree.leaves(load(sys.argv[1], "float32").params)
    assert not any(name.startswith(("orbax", "flax.nnx")) for name in sys.modules)
    lines = [line for line in open("/proc/self/maps") if "/weights/" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    inside = [any(a <= leaf.unsafe_buffer_pointer() < b for a, b in ranges) for leaf in leaves]
    assert all(inside), sum(inside)
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(leaves[0])
    assert donated.unsafe_buffer_pointer() not in range(*ranges[0])
  """
  if not Path("/proc/self/maps").exists():
    pytest.skip("needs /proc")
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  subprocess.run([sys.executable, "-c", code, str(out)], check=True, env=environment)


def test_one_flipped_bit_is_found_by_verify(source, tmp_path):
  out = convert(source, tmp_path / "out")
  file = next(file for file in (out / "weights").rglob("0.0") if "up" in file.parent.name)
  data = bytearray(file.read_bytes())
  data[1000] ^= 1
  file.write_bytes(data)
  load(out, "float32")  # cheap checks do not see it
  with pytest.raises(CheckpointError, match=r"mlp/up/weight is damaged.*sha256.*convert it again"):
    verify(out)


def test_an_edited_file_is_found_by_verify(source, tmp_path):
  out = convert(source, tmp_path / "out")
  file = out / "config.json"
  file.write_text(file.read_text().replace("1e-05", "1e-06"))
  load(out, "float32")
  with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
    verify(out)


def _drop(name):
  return lambda out: next(out.rglob(name)).unlink()


def _edit(change):
  def edit(out):
    manifest = json.loads((out / "manifest.json").read_text())
    change(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))

  return edit


def _shorten(out):
  file = next((out / "weights").rglob("0.0"))
  file.write_bytes(file.read_bytes()[:-4])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_shorten, "is damaged: wanted .* bytes, got .* bytes; convert it again"),
    (_drop("0.0"), "is missing"),
    (_drop(".zarray"), "Orbax cannot restore"),
    (_drop("config.json"), r"config\.json is missing"),
    (_edit(lambda m: m.update(version=99)), "wanted decoder-orbax 1, got decoder-orbax 99"),
    (_edit(lambda m: m.pop("tensors")), "lists no tensors"),
    (_edit(lambda m: m.update(tensors={"a": {"slice": "0000"}})), "lists no tensors"),
    (_edit(lambda m: m.update(files=3)), "lists no files"),
    (lambda out: (out / "manifest.json").write_text("{"), "as JSON"),
  ],
)
def test_damaged_directories(source, tmp_path, change, message):
  out = convert(source, tmp_path / "out")
  change(out)
  with pytest.raises(CheckpointError, match=message):
    load(out, "float32")


def test_an_edited_config_is_checked_against_the_weights(source, tmp_path):
  out = convert(source, tmp_path / "out")
  config = json.loads((out / "config.json").read_text()) | {"intermediate_size": 511}
  text = json.dumps(config, indent=2) + "\n"
  (out / "config.json").write_text(text)
  _edit(lambda m: m["files"]["config.json"].update(bytes=len(text)))(out)
  with pytest.raises(CheckpointError, match="does not fit the config"):
    load(out, "float32")


def test_only_our_own_directories_are_replaced(tiny, source, tmp_path):
  out = tmp_path / "out"
  out.mkdir()
  (out / "thesis.txt").write_text("years of work")
  with pytest.raises(CheckpointError, match="exists and is not a checkpoint of this library"):
    convert(source, out)
  assert (out / "thesis.txt").read_text() == "years of work"
  (out / "thesis.txt").unlink()
  convert(source, out)  # empty
  other = tiny.huggingface(tmp_path / "other", tiny.config(vocab_size=64))
  convert(other, out)  # an earlier conversion
  assert load(out, "float32").params["embed"]["weight"].shape == (64, 256)
  with pytest.raises(CheckpointError, match="exists"):
    convert(source, source / "config.json")
  assert remains(tmp_path) == ["other", "out"]


KILLED = """if True:
  import os, signal, sys
  from decoder.checkpoint import conversion, orbax
  moment, source, out = sys.argv[1:]
  conversion.SLICE_BYTES = 300_000
  die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
  save = orbax.save_slice
  if moment == "first":
    orbax.save_slice = die
  elif moment == "middle":
    orbax.save_slice = lambda d, name, arrays: die() if name == "0003" else save(d, name, arrays)
  elif moment == "verify":
    orbax.verify_tensors = die
  elif moment == "manifest":
    orbax.write_manifest = die
  elif moment == "publish":
    conversion.publish = die
  conversion.convert(source, out, "float32")
"""


@pytest.mark.parametrize("moment", ["first", "middle", "verify", "publish"])
def test_killed_at_any_moment_it_leaves_nothing_that_loads(source, tmp_path, moment):
  out = tmp_path / "out"
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  result = subprocess.run([sys.executable, "-c", KILLED, moment, source, out], env=environment, check=False)
  assert result.returncode == -signal.SIGKILL
  assert not out.exists()
  (left,) = remains(tmp_path)
  assert left.startswith(".out.")
  with pytest.raises(CheckpointError):
    load(out)
  if moment != "publish":
    with pytest.raises(CheckpointError):
      open_source(tmp_path / left)
  convert(source, out, "float32")
  assert remains(tmp_path) == ["out"]
  assert equal(load(out, "float32").params, load(source, "float32").params)


def test_a_kill_leaves_the_earlier_conversion(source, tmp_path):
  out = convert(source, tmp_path / "out")
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  subprocess.run([sys.executable, "-c", KILLED, "middle", source, out], env=environment, check=False)
  verify(out)


def test_the_workspace_of_a_living_process_is_left_alone(source, tmp_path, monkeypatch):
  seen = []
  save = orbax.save_slice

  def save_and_convert_again(directory, name, arrays):
    save(directory, name, arrays)
    if name == "0000" and not seen:
      seen.append(directory)
      convert(source, tmp_path / "out")
      assert directory.exists()

  monkeypatch.setattr(orbax, "save_slice", save_and_convert_again)
  convert(source, tmp_path / "out")
  verify(tmp_path / "out")
  assert remains(tmp_path) == ["out"]


def test_a_full_disk_is_one_error_and_leaves_nothing(source, tmp_path, monkeypatch):
  save = orbax.save_slice

  def full(directory, name, arrays):
    if name == "0002":
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save(directory, name, arrays)

  with monkeypatch.context() as patch:
    patch.setattr(orbax, "save_slice", full)
    with pytest.raises(CheckpointError, match=r"the disk filled up.*free some space"):
      convert(source, tmp_path / "out")
  assert remains(tmp_path) == []
  with monkeypatch.context() as patch:
    patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"not enough space.*wanted .* MB, got 0 MB free"):
      convert(source, tmp_path / "out")
  assert remains(tmp_path) == []


def test_a_disk_that_is_really_full(source, tmp_path, monkeypatch):
  """A file system of 2 MB, where the check of free space in advance is disabled."""
  disk = tmp_path / "disk"
  disk.mkdir()
  mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
  if mounted.returncode:
    pytest.skip("may not mount a file system here")
  try:
    monkeypatch.setattr("decoder.checkpoint.conversion._check_space", lambda out, total: None)
    with pytest.raises(CheckpointError, match="the disk filled up"):
      convert(source, disk / "out")
    assert remains(disk) == []
  finally:
    subprocess.run(["umount", disk], check=True)


def test_types_that_are_no_weights_are_refused(source, tmp_path):
  with pytest.raises(CheckpointError, match="cannot be stored as int8"):
    convert(source, tmp_path / "out", "int8")
  assert remains(tmp_path) == []


@pytest.mark.parametrize(
  ("arguments", "code", "text"),
  [
    (["--source", "{source}", "--out", "{tmp}/out"], 0, "21 tensors"),
    (["--source", "{tmp}/none", "--out", "{tmp}/out"], 2, "does not exist"),
    (["--source", "{source}", "--out", "{tmp}/out", "--dtype", "int3"], 2, "--dtype=int3"),
    (["--source", "{source}", "--outt", "{tmp}/out"], 2, "outt"),
    (["--source", "{source}", "--out", "{tmp}/source"], 2, "not a checkpoint of this library"),
    ([], 2, "--source"),
  ],
)
def test_the_script_ends_with_2_and_one_line(source, tmp_path, arguments, code, text):
  arguments = [argument.format(source=source, tmp=tmp_path) for argument in arguments]
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
    [sys.executable, ROOT / "scripts" / "convert.py", *arguments], capture_output=True, text=True, env=environment
  )
  assert result.returncode == code, result.stderr
  said = result.stdout if code == 0 else result.stderr
  assert text in said
  assert len(said.strip().splitlines()) == 1
