"""Strategies: how tokens come out of a model (floor 3). They never import models."""

from decoder.strategies.accompanied import (
  Accompanied,
  Both,
  Companion,
  Followed,
  Head,
  accompanied,
  feature_head,
  second_model,
)
from decoder.strategies.asking import announced, answered, asking, told_width
from decoder.strategies.autoregressive import (
  Finish,
  State,
  autoregressive,
  cut,
  init,
  insert,
  pending,
  release,
  vacate,
)
from decoder.strategies.beam import Plan, Search, beam, hypotheses, spread
from decoder.strategies.beam_rules import Early, Rules
from decoder.strategies.drafted import drafted
from decoder.strategies.guidance import GuidedCache, guided, read_negative
from decoder.strategies.hypotheses import Hypotheses
from decoder.strategies.judging import Drafting, drafting
from decoder.strategies.lookup import lookup
from decoder.strategies.loop import run, stream
from decoder.strategies.speculative import Drafts, Proposer, speculative
from decoder.strategies.telling import Told, forward_telling
from decoder.strategies.trees import branching, unread
from decoder.strategies.trie import Forest, forest

__all__ = [
  "Accompanied",
  "Both",
  "Companion",
  "Drafting",
  "Drafts",
  "Early",
  "Finish",
  "Followed",
  "Forest",
  "GuidedCache",
  "Head",
  "Hypotheses",
  "Plan",
  "Proposer",
  "Rules",
  "Search",
  "State",
  "Told",
  "accompanied",
  "announced",
  "answered",
  "asking",
  "autoregressive",
  "beam",
  "branching",
  "cut",
  "drafted",
  "drafting",
  "feature_head",
  "forest",
  "forward_telling",
  "guided",
  "hypotheses",
  "init",
  "insert",
  "lookup",
  "pending",
  "read_negative",
  "release",
  "run",
  "second_model",
  "speculative",
  "spread",
  "stream",
  "told_width",
  "unread",
  "vacate",
]
