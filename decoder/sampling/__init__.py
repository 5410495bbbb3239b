"""Logit transforms and samplers, written for one row (floor 2)."""

from decoder.sampling.samplers import categorical, request_key
from decoder.sampling.transforms import Context, LogitTransform, chain, min_p, repetition, temperature, top_k, top_p

__all__ = [
  "Context",
  "LogitTransform",
  "categorical",
  "chain",
  "min_p",
  "repetition",
  "request_key",
  "temperature",
  "top_k",
  "top_p",
]
