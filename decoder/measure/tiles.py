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


def temporaries(rows: int, vocabulary: int) -> int:
  """Bytes beside arguments and results that a decode loop needs on a TPU, for so many rows and, of their float32
  logits, so many tokens on one device."""
  return rows * vocabulary * 4


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
