"""Where copied parameters lie on CPU."""

import gc
import itertools
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from decoder.checkpoint import convert, load, memory
from decoder.ops.kernels import build

SMAPS = Path("/proc/self/smaps")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(pointers):
  """Of each address whether huge pages were asked for it."""
  span, flags = (0, 0), {}
  for line in SMAPS.read_text().splitlines():
    first, *rest = line.split()
    if first == "VmFlags:":
      flags[span] = "hg" in rest
    elif not first.endswith(":"):
      span = tuple(int(part, 16) for part in first.split("-"))
  return [any(asked and start <= pointer < end for (start, end), asked in flags.items()) for pointer in pointers]


def test_copies_are_equal_aligned_and_do_not_overlap():
  room, rng = memory.Room(), np.random.default_rng(0)
  arrays = [rng.normal(size=shape).astype(np.float16) for shape in ((3, 5), (0, 4), (1,), (700, 33), (5000, 5000))]
  copies = [room.copy(array, np.dtype(np.float32)) for array in arrays]
  for array, copy in zip(arrays, copies):
    assert copy.ctypes.data % 64 == 0
    assert copy.dtype == np.float32
    np.testing.assert_array_equal(copy, array)
  spans = sorted((copy.ctypes.data, copy.ctypes.data + copy.nbytes) for copy in copies if copy.size)
  assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_region_lives_as_long_as_any_of_its_arrays():
  room = memory.Room()
  first, second = (room.copy(np.full(8, value, np.float32), np.dtype(np.float32)) for value in (1, 2))
  region = weakref.ref(first.base)
  del room, first
  gc.collect()
  assert region() is not None
  assert second.sum() == 16
  del second
  gc.collect()
  assert region() is None


def test_jax_takes_the_arrays_over_as_they_are():
  copy = memory.Room().copy(np.arange(4096), np.dtype(np.float32))
  assert jax.device_put(copy, may_alias=True).unsafe_buffer_pointer() == copy.ctypes.data
  off = copy.view(np.uint8)[16:-48].view(np.float32)
  assert jax.device_put(off, may_alias=True).unsafe_buffer_pointer() != off.ctypes.data


@pytest.mark.skipif(not (SMAPS.exists() and SWITCH.exists()), reason="needs Linux with huge pages")
@pytest.mark.parametrize("weights", [None, "keep", "int8"])
def test_huge_pages_are_asked_for_what_is_copied(tiny, tmp_path, weights):
  if weights and not build.ready():
    pytest.skip("no C++ compiler built the CPU kernels here")
  config = tiny.config()
  file = tiny.gguf(tmp_path / "m.gguf", config, tiny.tensors(config), "Q8_0")
  copied = jax.tree.leaves(load(file, "float32", weights=weights).params)
  assert all(advised(leaf.unsafe_buffer_pointer() for leaf in copied))
  mapped = jax.tree.leaves(load(convert(file, tmp_path / "orbax", "float32"), "float32").params)
  assert not any(advised(leaf.unsafe_buffer_pointer() for leaf in mapped))
