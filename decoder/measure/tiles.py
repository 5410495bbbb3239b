"""How many bytes an array takes in a device's memory, and a program beside its arrays: what compilers were seen to do.

A TPU's memory is addressed in tiles of 8 × 128 words (`{1,0:T(8,128)}` in the layouts of optimised HLO; for types of
fewer bits, rows are packed into words), so the last two axes are padded. All figures here were read off programs that
libtpu 0.0.52 compiled; `tests/measure/plan_compile_test.py` compares them anew.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

_LANES, _SUBLANES = 128, 8
_SMALLEST = 512  # bytes of any array
_ROW = 4096  # bytes up to which a list is padded to a power of two
_LIST = 1024  # elements that longer lists are a multiple of


def plain(shape: tuple[int, ...], dtype: Any) -> int:
  """Bytes without any padding."""
  return -(-math.prod(shape) * _bits(dtype) // 8)


def padded(shape: tuple[int, ...], dtype: Any) -> int:
  """Bytes in a TPU's memory. Of the last two axes the compiler puts that last which leaves less padding."""
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    return padded((*shape, 2), jnp.uint32)
  bits = _bits(dtype)
  if len(shape) < 2:
    return _list(math.prod(shape), bits)
  lead, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
  least = min(_rows(rows, bits) * _up(columns, _LANES), _rows(columns, bits) * _up(rows, _LANES))
  return max(_SMALLEST, lead * least * bits // 8)


def turned(shape: tuple[int, ...], dtype: Any) -> int:
  """Bytes of a copy by rows, for an array that lies by columns since that leaves less padding; 0 for one that lies by
  rows. A decode loop makes such copies of what it reads or writes a row at a time: the cache, where heads are no
  multiple of 128, and the table of embeddings."""
  if len(shape) < 2:
    return 0
  rows = max(
    _SMALLEST, math.prod(shape[:-2]) * _rows(shape[-2], _bits(dtype)) * _up(shape[-1], _LANES) * _bits(dtype) // 8
  )
  return rows if rows > padded(shape, dtype) else 0


def drawing(logits: int, fast: int) -> int:
  """Bytes that the draw needs beside its logits, which are so many bytes on a device: some nine arrays as large, of
  which what goes into the fast memory beside the device's own is not counted."""
  return max(round(1.3 * logits), round(8.9 * logits - 0.9 * fast))


def small(layers: int) -> int:
  """Bytes of the many small arrays of a loop, each in a place of its own: about 1 MB a layer."""
  return layers << 20


def code(layers: int) -> int:
  """Bytes of the loop's own instructions, which a TPU keeps in its memory too."""
  return (16 << 20) + layers * (1 << 20)


def _list(number: int, bits: int) -> int:
  size = max(_SMALLEST, number * bits // 8)
  return 1 << (size - 1).bit_length() if size <= _ROW and number <= _LIST else _up(number, _LIST) * bits // 8


def _rows(number: int, bits: int) -> int:
  """Rows of a tile: few stay few, down to those that share a word."""
  few = 1 << max(number - 1, 0).bit_length()
  return max(few, 32 // bits) if number < _SUBLANES else _up(number, _SUBLANES)


def _up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple


def _bits(dtype: Any) -> int:
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    return 64
  return 4 if dtype in (jnp.uint4, jnp.int4) else jnp.dtype(dtype).itemsize * 8
