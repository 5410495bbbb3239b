"""Memory for parameters that a CPU streams: huge pages, where the system has them.

A decode step reads every weight once, and with pages of 4 KB it waits for page tables as well. A `Room` hands out
arrays from anonymous memory for which huge pages are asked; where there are none it is plain memory.
"""

import contextlib
import mmap
import threading

import numpy as np

_PAGE = 2 << 20  # bytes of a huge page on x86, and on Arm with pages of 4 KB
_REGION = 64 << 20  # asked of the system at once; what stays untouched takes no memory
_ALIGNED = 64  # bytes; XLA's CPU backend takes over such arrays as they are and copies others


class Room:
  """Hands out arrays to several threads. What a region holds is freed with the last of its arrays."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._rest = np.empty(0, np.uint8)  # of the newest region

  def copy(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in another type, aligned as XLA wants it."""
    copy = self._take(array.size * dtype.itemsize).view(dtype).reshape(array.shape)
    np.copyto(copy, array, casting="unsafe")
    return copy

  def _take(self, size: int) -> np.ndarray:
    whole = -(-size // _ALIGNED) * _ALIGNED
    with self._lock:
      if whole > self._rest.size:
        self._rest = _region(max(whole, _REGION))
      taken, self._rest = self._rest[:size], self._rest[whole:]
    return taken


def _region(size: int) -> np.ndarray:
  """Bytes that begin with a page."""
  # Private: pages of shared memory have a switch of their own, mostly off.
  region = mmap.mmap(-1, -(-size // _PAGE) * _PAGE + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  if hasattr(mmap, "MADV_HUGEPAGE"):
    with contextlib.suppress(OSError):  # a kernel built without them
      region.madvise(mmap.MADV_HUGEPAGE)
  array = np.frombuffer(region, np.uint8)  # keeps the region
  start = -array.ctypes.data % _PAGE
  return array[start : start + size]
