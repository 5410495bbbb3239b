"""Several weights of one shape in one, [E·F, D], one after the other: two dimensions, so that formats in few bits and
sharding along the first axis need to know nothing of it. How to take them all apart, or one out."""

import jax
from flax import struct
from jax import lax

from decoder.ops import quantised
from decoder.types import Array, QTensor


@struct.dataclass
class Part:
  """One of `parts` stacked weights, left to whoever reads it: a kernel reads it where it lies.

  number: which one, int32, from 0.
  """

  stacked: Array | QTensor
  number: Array
  parts: int = struct.field(pytree_node=False)

  @property
  def shape(self) -> tuple[int, int]:
    F, D = self.stacked.shape
    return F // self.parts, D

  def weight(self) -> Array | QTensor:
    """The weight [F, D] itself."""
    return jax.tree.map(
      lambda leaf: lax.dynamic_index_in_dim(leaf, self.number, keepdims=False), split(self.stacked, self.parts)
    )


def whole_stripes(part: Part) -> bool:
  """Whether a striped part begins and ends with a stripe."""
  return part.shape[0] % quantised.STRIPE == 0


def split(stacked_FD: Array | QTensor, parts: int) -> Array | QTensor:
  """All of the weights, [E, F, D]; of a QTensor each leaf has E before its axes, to be mapped over."""
  F, D = stacked_FD.shape[0] // parts, stacked_FD.shape[1]
  if not isinstance(stacked_FD, QTensor):
    return stacked_FD.reshape(parts, F, D)
  leaves, striped = (stacked_FD.values, stacked_FD.scales, stacked_FD.minimums), stacked_FD.striped
  if striped and F % quantised.STRIPE:  # a stripe belongs to two of them
    leaves, striped = quantised.by_rows(stacked_FD), False
  apart = (leaf if leaf is None else leaf.reshape(parts, -1, *leaf.shape[1:]) for leaf in leaves)
  return QTensor(*apart, stacked_FD.kind, (F, D), striped)
