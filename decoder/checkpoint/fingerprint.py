"""Which model is it, in whatever form its weights are held?

What is trained for one model, such as a head that drafts for it, names it by the digest of its norms: few numbers, all
different after any training, and the only ones that no rounding to few bits touches.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoder.checkpoint.mapping import flatten


def fingerprint(params: Any, fetch: Callable = jax.device_get) -> str:
  """SHA-256 of all weights of one axis, in the order of their paths, as bfloat16, on which all floats agree.

  fetch: of the `Placement` where they lie.
  """
  import ml_dtypes

  whole = hashlib.sha256()
  for path, weight in sorted(flatten(params).items()):
    if getattr(weight, "ndim", 0) == 1:
      whole.update(path.encode())
      whole.update(np.asarray(fetch(weight)).astype(ml_dtypes.bfloat16).tobytes())
  return whole.hexdigest()
