"""Strategies: how tokens come out of a model (floor 3). They never import models."""

from decoder.strategies.autoregressive import Finish, State, autoregressive, init, pending, release
from decoder.strategies.loop import run, stream

__all__ = ["Finish", "State", "autoregressive", "init", "pending", "release", "run", "stream"]
