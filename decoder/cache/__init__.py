"""Caches: layout × codec × entry (floor 2)."""

from decoder.cache.branching import Branching
from decoder.cache.cache import CROSS, Cache, Entry, LayerSpec, allocate
from decoder.cache.codecs import Codec, Raw
from decoder.cache.encoded import Encoded
from decoder.cache.layouts import Contiguous, Layout
from decoder.cache.spread import Spread, Spreading
from decoder.cache.whole import Whole

__all__ = [
  "CROSS",
  "Branching",
  "Cache",
  "Codec",
  "Contiguous",
  "Encoded",
  "Entry",
  "LayerSpec",
  "Layout",
  "Raw",
  "Spread",
  "Spreading",
  "Whole",
  "allocate",
]
