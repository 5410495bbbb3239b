"""Weights in few bits: how a QTensor is laid out, how it comes from floats or from GGUF blocks, and what it means.

Kinds: `int8` has one scale an output; `q8_0`, `q4_0` and `q4_1` are GGUF's, in groups of 32 inputs with a float16 scale
(and minimum): 8.5, 4.5 and 5 bits a weight. Blocks of a GGUF file are rearranged, bit for bit, never requantised.

Two orders, the same bits. By rows: values [F, D] (int8, or uint4 as XLA packs it), scales [F, D/32] or [F]. Striped, 16
outputs (c) side by side, P stripes, F padded with zeros: 8-bit values [P, D/2, 16, 2]; 4-bit [P, D/8, 16, 4] bytes,
in which nibble n of the j-th 16-bit word is input 2n + j of its eight; scales [P, D/32, 16] or [P, 16].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.types import Array, QTensor

GROUP = 32
STRIPE = 16
_SEVERAL = 8
_AT_ONCE = 1 << 20  # weights rounded at a time: the temporaries are several times as large


class Kind(NamedTuple):
  """offset: what is subtracted from stored 4-bit values. block: bytes of a GGUF block, scale (and minimum) first."""

  bits: int
  grouped: bool
  offset: int = 0
  minimum: bool = False
  block: int = 0


KINDS = {
  "int8": Kind(8, False),
  "q8_0": Kind(8, True, block=34),
  "q4_0": Kind(4, True, offset=8, block=18),
  "q4_1": Kind(4, True, minimum=True, block=20),
}


def fits(shape: tuple[int, ...]) -> bool:
  """Whether a weight of this shape can be quantised: [out, in] with whole groups of inputs."""
  return len(shape) == 2 and shape[1] > 0 and shape[1] % GROUP == 0


def nbytes(shape: tuple[int, int], kind: str) -> int:
  """Bytes of a weight of this kind, without the padding of stripes."""
  of, (F, D) = _checked(kind, shape)
  floats = F * (D // GROUP) * (2 + 2 * of.minimum) if of.grouped else 4 * F
  return F * D * of.bits // 8 + floats


def quantise(weight_FD: np.ndarray, kind: str, *, striped: bool) -> QTensor:
  """Rounds a float weight on the host, to the same bits as llama.cpp's reference for its kinds. ValueError for a shape
  that does not fit or an unknown kind."""
  of, (F, D) = _checked(kind, weight_FD.shape)
  step = max(1, _AT_ONCE // D)
  rounded = [_round(of, np.asarray(weight_FD[row : row + step], np.float32)) for row in range(0, F, step)]
  parts = (None if part[0] is None else np.concatenate(part) for part in zip(*rounded))
  return _assemble(kind, *parts, striped)


def from_gguf_blocks(raw: np.ndarray, kind: str, shape: tuple[int, int], *, striped: bool) -> QTensor:
  """The bits of a GGUF tensor, rearranged. raw: its bytes (uint8), rows in order."""
  of, (F, D) = _checked(kind, shape)
  blocks = np.ascontiguousarray(raw).view(np.uint8).reshape(F, D // GROUP, of.block)
  heads = 2 if of.minimum else 1
  floats = np.ascontiguousarray(blocks[..., : 2 * heads]).view(np.float16)
  body = blocks[..., 2 * heads :]
  values = body.view(np.int8) if of.bits == 8 else np.concatenate([body & 15, body >> 4], axis=-1)
  minimums = floats[..., 1] if of.minimum else None
  return _assemble(kind, values.reshape(F, D), floats[..., 0], minimums, striped)


def dequantise(q: QTensor, dtype: jnp.dtype = jnp.float32) -> Array:
  """The weight [F, D] that the bits stand for, inside or outside of a trace."""
  values, scales, minimums = by_rows(q)
  return _meaning(KINDS[q.kind], values, scales, minimums).astype(dtype)


def unstriped(q: QTensor) -> QTensor:
  """The same bits in the order by rows, on the host."""
  values, *floats = (part if part is None else np.asarray(part) for part in by_rows(q))
  return _assemble(q.kind, values, *floats, False)


def take_rows(q: QTensor, rows: Array) -> Array:
  """Rows of the weight, float32: [..., D]. Indices are clipped."""
  rows = jnp.clip(rows, 0, q.shape[0] - 1)
  if not q.striped and rows.size == 1:  # a TPU rearranges all of a table of bytes to take a single row
    near = (rows.reshape(1) + jnp.arange(_SEVERAL, dtype=rows.dtype)) % q.shape[0]
    return lax.optimization_barrier(_taken(q, near))[:1].reshape(*rows.shape, q.shape[1])
  return _taken(q, rows)


def _taken(q: QTensor, rows: Array) -> Array:
  parts = (q.values, q.scales, q.minimums)
  if not q.striped:
    taken = [None if part is None else part[rows] for part in parts]
    return _meaning(KINDS[q.kind], *taken)
  stripes = jax.tree.map(lambda part: part[rows // STRIPE], QTensor(*parts, q.kind, q.shape, True))
  whole = _unstripe(stripes)
  lane = (rows % STRIPE)[..., None]
  taken = [None if part is None else _lane(part, lane) for part in whole]
  return _meaning(KINDS[q.kind], *taken)


def by_rows(q: QTensor) -> tuple[Array, Array, Array | None]:
  """values [F, D] (int8, or uint8 below 16), scales and minimums [F, D/32], or scales [F]."""
  if not q.striped:
    return q.values, q.scales, q.minimums
  F = q.shape[0]
  return tuple(None if part is None else part.reshape(-1, *part.shape[2:])[:F] for part in _unstripe(q))


def _round(of: Kind, weight_FD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Values, scales and minimums by rows."""
  F, D = weight_FD.shape
  groups = weight_FD.reshape(F, -1, GROUP if of.grouped else D)
  minimums = None
  with np.errstate(divide="ignore", invalid="ignore"):
    if of.minimum:
      minimums = groups.min(axis=-1)
      scales = (groups.max(axis=-1) - minimums) / np.float32(15)
    elif of.bits == 4:
      largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], axis=-1)[..., 0]
      scales = largest / np.float32(-8)
    else:
      scales = np.abs(groups).max(axis=-1) / np.float32(127)
    inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)[..., None]
  if of.bits == 8:
    scaled = groups * inverse
    values = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
  else:
    shifted = groups - minimums[..., None] if of.minimum else groups
    values = np.clip(np.trunc(shifted * inverse + np.float32(of.offset + 0.5)), 0, 15).astype(np.uint8)
  small = np.float16 if of.grouped else np.float32
  return values.reshape(F, D), scales.astype(small), None if minimums is None else minimums.astype(small)


def _unstripe(q: QTensor) -> tuple[Array, Array, Array | None]:
  """Parts with leading axes [..., 16] for stripes with leading axes [...]."""
  values, (_, D) = q.values, q.shape
  lead = values.shape[:-3]
  if KINDS[q.kind].bits == 4:
    words = values.reshape(*lead, D // 8, STRIPE, 2, 2)  # of a word: its two bytes, low first
    nibbles = jnp.stack([words & 15, words >> 4], axis=-1)  # [..., D/8, 16, j, byte, half]
    nibbles = nibbles.reshape(*lead, D // 8, STRIPE, 2, 4)
    values = jnp.moveaxis(nibbles, (-3, -4, -1, -2), (-4, -3, -2, -1))
  else:
    values = jnp.swapaxes(values, -3, -2)
  values = values.reshape(*lead, STRIPE, D)
  if not KINDS[q.kind].grouped:
    return values, q.scales, None
  return values, jnp.swapaxes(q.scales, -1, -2), None if q.minimums is None else jnp.swapaxes(q.minimums, -1, -2)


def _lane(part: Array, lane: Array) -> Array:
  """part [..., 16, X] or [..., 16] at `lane` [..., 1]."""
  if part.ndim == lane.ndim:
    return jnp.take_along_axis(part, lane, axis=-1)[..., 0]
  return jnp.take_along_axis(part, lane[..., None], axis=-2)[..., 0, :]


def _meaning(kind: Kind, values: Array, scales: Array, minimums: Array | None) -> Array:
  """Float32 weights [..., D] from values [..., D] and their scales [..., D/32] or [...]."""
  numbers = values.astype(jnp.float32) - np.float32(kind.offset)
  if not kind.grouped:
    return numbers * scales[..., None]
  grouped = numbers.reshape(*numbers.shape[:-1], -1, GROUP) * scales.astype(jnp.float32)[..., None]
  if minimums is not None:
    grouped = grouped + minimums.astype(jnp.float32)[..., None]
  return grouped.reshape(numbers.shape)


def _checked(kind: str, shape: tuple[int, ...]) -> tuple[Kind, tuple[int, int]]:
  if kind not in KINDS:
    raise ValueError(f"unknown kind of weights {kind!r}; known are {', '.join(KINDS)}")
  if not fits(shape):
    raise ValueError(f"wanted a weight [out, in] with in a multiple of {GROUP}, got {shape}; leave it in floats")
  return KINDS[kind], shape


def _assemble(kind: str, values: np.ndarray, scales: np.ndarray, minimums: np.ndarray | None, striped: bool) -> QTensor:
  """A QTensor from parts by rows."""
  F, D = values.shape
  bits, grouped = KINDS[kind].bits, KINDS[kind].grouped
  scales = scales.reshape(F, -1) if grouped else scales.reshape(F)
  if not striped:
    return QTensor(values if bits == 8 else values.astype(jnp.uint4), scales, minimums, kind, (F, D), False)

  def padded(part: np.ndarray) -> np.ndarray:
    spare = [(0, -F % STRIPE)] + [(0, 0)] * (part.ndim - 1)
    return np.pad(part, spare).reshape(-1, STRIPE, *part.shape[1:])

  stripes = padded(values)
  if bits == 8:
    packed = stripes.reshape(-1, STRIPE, D // 2, 2).swapaxes(1, 2)
  else:
    words = stripes.reshape(-1, STRIPE, D // 8, 2, 2, 2)  # of eight inputs: byte, half of it, word
    packed = (words[..., 0, :] | words[..., 1, :] << 4).swapaxes(-1, -2)  # [P, 16, D/8, word, byte]
    packed = packed.reshape(-1, STRIPE, D // 8, 4).swapaxes(1, 2)
  pair = [part if part is None else padded(part).swapaxes(1, -1 if grouped else 1) for part in (scales, minimums)]
  return QTensor(
    *(part if part is None else np.ascontiguousarray(part) for part in (packed, *pair)), kind, (F, D), True
  )
