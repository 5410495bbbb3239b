"""Checkpoints: found by name, read from GGUF, safetensors or Orbax, converted without holding them in memory."""

from decoder.checkpoint.conversion import convert, save
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.hub import DEFAULT, registered, resolve
from decoder.checkpoint.loading import Checkpoint, load, open_source
from decoder.checkpoint.orbax import verify
from decoder.checkpoint.weights import KEEP

__all__ = [
  "DEFAULT",
  "KEEP",
  "Checkpoint",
  "CheckpointError",
  "convert",
  "load",
  "open_source",
  "registered",
  "resolve",
  "save",
  "verify",
]
