"""Checkpoints: found by name, read from GGUF, safetensors or Orbax, converted without holding them in memory."""

from decoder.checkpoint.conversion import convert, save
from decoder.checkpoint.errors import CheckpointError
from decoder.checkpoint.hub import DEFAULT, registered, resolve
from decoder.checkpoint.loading import Checkpoint, load, open_source
from decoder.checkpoint.orbax import verify

__all__ = [
  "DEFAULT",
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
