"""Directories and files that appear whole or not at all.

Work happens in a hidden sibling, held by a lock for as long as its process lives, and is renamed at the end. A killed
process loses its lock, so the next run can tell its remains from another process's work and removes them.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from decoder.checkpoint.errors import CheckpointError


def write_file(path: Path, content: bytes) -> None:
  """Writes or replaces a file. OSError where its directory cannot be written; nothing is left behind then."""
  handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
  try:
    with os.fdopen(handle, "wb") as file:
      file.write(content)
    os.chmod(name, 0o644)  # mkstemp's 0600 would hide it from other users
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise


@contextlib.contextmanager
def workspace(target: Path) -> Iterator[Path]:
  """A fresh directory beside `target`, removed at the end unless published. Sweeps the remains of killed runs."""
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target)
    directory, lock = _locked(target)
  except OSError as error:
    raise CheckpointError(f"cannot write beside {target}", got=error, remedy="choose a directory you own") from error
  try:
    yield directory
  except BaseException as error:
    if _disk_is_full(error):
      raise CheckpointError(
        f"the disk filled up while {target} was being written",
        got=f"{shutil.disk_usage(target.parent).free / 1e6:.0f} MB free with the partial copy in place",
        remedy="free some space or choose another disk; nothing was left behind",
      ) from error
    raise
  finally:
    if directory.exists():
      shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def publish(directory: Path, target: Path, is_ours: Callable[[Path], bool]) -> None:
  """Makes a finished directory visible as `target`, durably. Replaces what is there if it is ours or empty."""
  _sync_tree(directory)
  refuse_foreign(target, is_ours)
  old = None
  if target.exists() and any(target.iterdir()):
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    os.rename(target, old)
  try:
    os.rename(directory, target)
  except OSError as error:
    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
      raise
    # Another process published the same target between the check and the rename; its copy is as good as ours.
  _sync(target.parent)
  if old is not None:
    shutil.rmtree(old, ignore_errors=True)


def refuse_foreign(target: Path, is_ours: Callable[[Path], bool]) -> None:
  """Raises CheckpointError if `target` holds something that this package did not write."""
  if target.is_dir() and (is_ours(target) or not any(target.iterdir())):
    return
  if target.exists() or target.is_symlink():
    raise CheckpointError(
      f"{target} exists and is not a checkpoint of this library",
      wanted="a new path, an empty directory or an earlier conversion",
      remedy="choose another --out or remove it yourself",
    )


def sweep(target: Path) -> None:
  """Removes the workspaces that killed processes left for this target."""
  for remains in target.parent.glob(f".{target.name}.*.partial"):
    try:
      lock = os.open(remains, os.O_RDONLY)
    except OSError:  # its owner has just published or removed it
      continue
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      shutil.rmtree(remains, ignore_errors=True)
    except BlockingIOError:
      pass  # its process lives
    finally:
      os.close(lock)


def _locked(target: Path) -> tuple[Path, int]:
  while True:
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    directory.chmod(0o755)  # mkdtemp's 0700 would hide the published directory from other users
    lock = os.open(directory, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if directory.exists():  # else a sweep found it between its creation and its lock
      return directory, lock
    os.close(lock)


def _disk_is_full(error: BaseException | None) -> bool:
  """True if this error or a cause of it says so; tensorstore reports it as text only."""
  while error is not None:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
      return True
    error = error.__cause__ or error.__context__
  return False


def _sync_tree(directory: Path) -> None:
  for parent, _, files in os.walk(directory, topdown=False):
    for name in files:
      _sync(Path(parent) / name)
    _sync(Path(parent))


def _sync(path: Path) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
