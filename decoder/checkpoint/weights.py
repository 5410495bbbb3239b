"""In what form a weight is held: as floats, in the bits of its file, or rounded to a kind of few bits."""

from typing import Any

from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.source import Tensor

KEEP = "keep"
_TABLES = ("embed/weight", "head/weight")  # at 4 bits, which token it is and comes next suffers most: 8 bits there
_ROUTER = "/router/weight"  # a few rows, and rounding them would choose other experts: floats


def check_weights(weights: str | None) -> None:
  """Raises CheckpointError for what is neither None, 'keep' nor a kind."""
  from decoder.ops.quantised import KINDS

  if weights not in (None, KEEP, *KINDS):
    raise CheckpointError(
      f"unknown weights {weights!r}",
      wanted=f"None for floats, {KEEP}, {', '.join(KINDS)}",
      remedy="name one of them as weights",
    )


def kind_of(path: str, tensor: Tensor, weights: str | None) -> str | None:
  """The kind in which the tensor of this path is held, or None for floats."""
  if weights == KEEP or (weights is not None and tensor.kind == weights):
    return tensor.kind
  return None if weights is None else rounded_kind(path, tensor.shape, weights)


def rounded_kind(path: str, shape: tuple[int, ...], weights: str) -> str | None:
  """The kind to which floats of this path and shape are rounded where `weights` is asked for; None: they stay."""
  from decoder.ops.quantised import KINDS, fits

  if not fits(shape) or path.endswith(_ROUTER):
    return None
  return "q8_0" if path in _TABLES and KINDS[weights].bits == 4 else weights


def read_quantised(tensor: Tensor, kind: str, striped: bool) -> Any:
  """The tensor as a QTensor of numpy arrays: bit for bit if it is of this kind already, rounded if not."""
  from decoder.ops.quantised import quantise

  if tensor.kind == kind:
    return tensor.keep(striped)
  return quantise(tensor.read(), kind, striped=striped)
