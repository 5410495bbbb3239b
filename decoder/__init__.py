"""decoder: the decode phase of large language models, as pure functions in JAX.

    lm = decoder.load("smollm2-135m-instruct")
    print(lm.generate("The three laws of thermodynamics are").text)

The functional core is in `decoder.strategies`, `decoder.cache`, `decoder.sampling`, `decoder.models` and `decoder.ops`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from decoder.checkpoint.errors import CheckpointError
  from decoder.decoding import Stream
  from decoder.generate import LM, load
  from decoder.result import Result, Timings
  from decoder.score import Score
  from decoder.session import Session
  from decoder.settings import Settings
  from decoder.text.infill import Infill
  from decoder.view import show

# Found when first asked for, so that `decoder.text` alone costs no import of JAX.
_HOMES = {
  "CheckpointError": "decoder.checkpoint.errors",
  "Infill": "decoder.text.infill",
  "LM": "decoder.generate",
  "Result": "decoder.result",
  "Score": "decoder.score",
  "Session": "decoder.session",
  "Settings": "decoder.settings",
  "Stream": "decoder.decoding",
  "Timings": "decoder.result",
  "load": "decoder.generate",
  "show": "decoder.view",
}

__all__ = [
  "LM",
  "CheckpointError",
  "Infill",
  "Result",
  "Score",
  "Session",
  "Settings",
  "Stream",
  "Timings",
  "load",
  "show",
]


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f"module 'decoder' has no attribute {name!r}")
  return getattr(importlib.import_module(_HOMES[name]), name)
