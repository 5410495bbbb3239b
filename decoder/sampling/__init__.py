"""Logit transforms and samplers, written for one row (floor 2)."""

from decoder.sampling.inspection import Drawn, Logprobs, Together, logprobs, nothing, processed_logprobs, raw_logprobs
from decoder.sampling.samplers import categorical, request_key
from decoder.sampling.transforms import Context, LogitTransform, chain, min_p, repetition, temperature, top_k, top_p

__all__ = [
  "Context",
  "Drawn",
  "LogitTransform",
  "Logprobs",
  "Together",
  "categorical",
  "chain",
  "logprobs",
  "min_p",
  "nothing",
  "processed_logprobs",
  "raw_logprobs",
  "repetition",
  "request_key",
  "temperature",
  "top_k",
  "top_p",
]
