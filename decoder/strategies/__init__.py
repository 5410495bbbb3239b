"""Strategies: how tokens come out of a model (floor 3). They never import models."""

from decoder.strategies.asking import asking
from decoder.strategies.autoregressive import Finish, State, autoregressive, init, pending, release
from decoder.strategies.guidance import GuidedCache, guided, read_negative
from decoder.strategies.loop import run, stream
from decoder.strategies.telling import Told, forward_telling

__all__ = [
  "Finish",
  "GuidedCache",
  "State",
  "Told",
  "asking",
  "autoregressive",
  "forward_telling",
  "guided",
  "init",
  "pending",
  "read_negative",
  "release",
  "run",
  "stream",
]
