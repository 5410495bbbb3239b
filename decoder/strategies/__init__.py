"""Strategies: how tokens come out of a model (floor 3). They never import models."""

from decoder.strategies.asking import announced, answered, asking, told_width
from decoder.strategies.autoregressive import Finish, State, autoregressive, init, pending, release
from decoder.strategies.beam import Plan, Search, beam, hypotheses, spread
from decoder.strategies.beam_rules import Early, Rules
from decoder.strategies.guidance import GuidedCache, guided, read_negative
from decoder.strategies.hypotheses import Hypotheses
from decoder.strategies.lookup import lookup
from decoder.strategies.loop import run, stream
from decoder.strategies.speculative import Drafting, Drafts, Proposer, drafting, speculative
from decoder.strategies.telling import Told, forward_telling
from decoder.strategies.trie import Forest, forest

__all__ = [
  "Drafting",
  "Drafts",
  "Early",
  "Finish",
  "Forest",
  "GuidedCache",
  "Hypotheses",
  "Plan",
  "Proposer",
  "Rules",
  "Search",
  "State",
  "Told",
  "announced",
  "answered",
  "asking",
  "autoregressive",
  "beam",
  "drafting",
  "forest",
  "forward_telling",
  "guided",
  "hypotheses",
  "init",
  "lookup",
  "pending",
  "read_negative",
  "release",
  "run",
  "speculative",
  "spread",
  "stream",
  "told_width",
]
