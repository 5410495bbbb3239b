"""A channel between a program that runs on the CPU and the host that gave it out, for what only the host knows.

Inside of the program, `tell` says what was drawn and `ask` waits for what may be drawn next; between them lies the
forward pass, and the host thinks meanwhile. One call then makes many steps, instead of two calls a step.
"""

import ctypes
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder.ops.kernels import build
from decoder.types import NONE, Array

_numbers = itertools.count(1)
_MOMENT = 200  # milliseconds after which a listener looks whether the program has failed


class Heard(NamedTuple):
  """tokens_BT, positions_BT: those drawn last, then guesses of what follows; position NONE where there is none, as in a
  row that has ended. length_B: tokens of each row with its prompt; what stands there or after is a guess."""

  tokens_BT: np.ndarray
  positions_BT: np.ndarray
  length_B: np.ndarray


class Channel:
  """One end, for the host; `number` is what the program knows it by. Leave its `with` when the program has ended."""

  def __init__(self) -> None:
    self._library, self.number = build.loaded(), next(_numbers)
    self._library.decoder_channel_open(ctypes.c_int32(self.number))

  def __enter__(self) -> "Channel":
    return self

  def __exit__(self, *error: object) -> None:
    self._library.decoder_channel_forget(ctypes.c_int32(self.number))

  def close(self) -> None:
    """Whoever asks from now on hears that every row has ended."""
    self._library.decoder_channel_close(ctypes.c_int32(self.number))

  def hear(self, rows: int, width: int, failed: Callable[[], bool]) -> "Heard | None":
    """What the program tells next, of `width` tokens a row; None once it is over, or has `failed`."""
    shape = (rows, width)
    told = Heard(np.zeros(shape, np.int32), np.full(shape, NONE, np.int32), np.zeros(rows, np.int32))
    sizes = map(ctypes.c_int64, (rows * width, rows, _MOMENT))
    arguments = (ctypes.c_int32(self.number), *map(_pointer, told), *sizes)
    while True:
      heard = self._library.decoder_channel_hear(*arguments)
      if heard == 1:
        return told
      if heard < 0 or failed():
        return None

  def answer(self, masks: np.ndarray, ended_B: np.ndarray) -> None:
    """masks: [B, W] or [B, J, W], uint32, a bit an id. ended_B: int8, rows that the host has ended."""
    masks, ended_B = np.ascontiguousarray(masks, np.uint32), np.ascontiguousarray(ended_B, np.int8)
    self._library.decoder_channel_answer(
      ctypes.c_int32(self.number), _pointer(masks), ctypes.c_int64(masks.size),
      _pointer(ended_B), ctypes.c_int64(ended_B.size),
    )  # fmt: skip


def tell(number: Array, tokens_BT: Array, positions_BT: Array, length_B: Array) -> Array:
  """Tells the host what it hears as `Heard`; the same tokens, to go on with."""
  return jax.ffi.ffi_call("decoder_tell", _like(tokens_BT))(number, tokens_BT, positions_BT, length_B)


def ask(number: Array, logits: Array) -> tuple[Array, Array]:
  """Waits for the answer, not before the logits, [B, V] or [B, J, V], are there: masks, with 32 ids a word (uint32) in
  place of V; rows that have ended (bool)."""
  *rows, ids = logits.shape
  shapes = (jax.ShapeDtypeStruct((*rows, -(-ids // 32)), jnp.uint32), jax.ShapeDtypeStruct(rows[:1], jnp.int8))
  masks, ended_B = jax.ffi.ffi_call("decoder_ask", shapes)(number, logits)
  return masks, ended_B != 0


def over(number: Array, count_B: Array) -> Array:
  """Tells the host that nothing more will be told; the same counts."""
  return jax.ffi.ffi_call("decoder_over", _like(count_B))(number, count_B)


def _like(x: Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _pointer(x: np.ndarray) -> ctypes.c_void_p:
  return x.ctypes.data_as(ctypes.c_void_p)
