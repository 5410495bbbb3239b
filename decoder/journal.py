"""What a long run has done so far, kept beside the file that it writes, so that a killed one goes on where it stopped.

FILE.progress has a line that says what FILE is made of, then a line for each batch, written and synced before anything
of it is given out; a half-written last line is dropped. FILE itself is written anew by each run. Once it is whole, the
first line alone is kept: it tells a later run that there is nothing to do, or that FILE is of something else.
"""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.checkpoint.atomic import write_file

_COMPLETE = "complete"


class Journal:
  """Opens or begins the journal of a file; `with` closes it.

  identity: what the file depends on, plain data by name; a mapping in it counts field by field. records: what earlier
  runs added, in order. complete: the file is whole. ValueError where the file is of another identity or not of such a
  run at all, or where another process is writing it.
  """

  def __init__(self, target: Path, identity: Mapping[str, Any]):
    self.target, self.path = target, target.with_name(f"{target.name}.progress")
    self._identity = json.loads(json.dumps(identity))
    if not target.absolute().parent.is_dir():
      raise ValueError(f"{target}: there is no such directory; make it first")
    if not self.path.exists():
      self._refuse_foreign()
    self._file = self.path.open("a+b")
    try:
      self._lock()
      self.complete, self.records = self._read()
    except BaseException:
      self._file.close()
      raise

  def add(self, record: Any) -> None:
    """Keeps plain data, durably."""
    self._write(record)

  def finish(self) -> None:
    """To be called once the file is whole and closed."""
    with self.target.open("rb") as file:
      os.fsync(file.fileno())
    write_file(self.path, _line({**self._identity, _COMPLETE: True}))
    self.complete = True

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, *error: Any) -> None:
    self._file.close()

  def _lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        raise
      raise ValueError(f"another process is writing {self.target}; wait for it, or name another file") from error

  def _refuse_foreign(self) -> None:
    if self.target.exists() and self.target.stat().st_size:
      raise ValueError(f"{self.target} exists, and no run is known to have written it; name another file or remove it")

  def _read(self) -> tuple[bool, list[Any]]:
    self._file.seek(0)
    data = self._file.read()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    self._file.truncate(sum(len(line) + 1 for line in lines))
    if not lines:
      self._refuse_foreign()
      self._write(self._identity)
      return False, []
    try:
      before, *records = map(json.loads, lines)
      complete = before.pop(_COMPLETE, False)
    except (ValueError, AttributeError) as error:
      raise ValueError(f"{self.path} is damaged ({error}); remove it and {self.target} to begin anew") from error
    self._compare(before)
    return complete, records

  def _compare(self, before: Mapping[str, Any]) -> None:
    was, now = _flat(before), _flat(self._identity)
    unlike = [name for name in {**now, **was} if was.get(name) != now.get(name)]
    if unlike:
      told = ", ".join(f"{name} {was.get(name)!r}, now {now.get(name)!r}" for name in unlike[:3])
      raise ValueError(
        f"{self.target} was begun with {told}; use the same again, name another file, or remove this one and "
        f"{self.path.name} to begin anew"
      )

  def _write(self, value: Any) -> None:
    self._file.write(_line(value))
    self._file.flush()
    os.fsync(self._file.fileno())


def _line(value: Any) -> bytes:
  return json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n"


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
  fields = {}
  for name, value in identity.items():
    fields |= value if isinstance(value, Mapping) else {name: value}
  return fields
