"""Caches: layout × codec × entry (floor 2)."""

from decoder.cache.branching import Branching
from decoder.cache.cache import Cache, Entry, LayerSpec, allocate
from decoder.cache.codecs import Codec, Raw
from decoder.cache.layouts import Contiguous, Layout

__all__ = ["Branching", "Cache", "Codec", "Contiguous", "Entry", "LayerSpec", "Layout", "Raw", "allocate"]
