"""Logit transforms and samplers, written for one row (floor 2)."""

from decoder.sampling.inspection import (
  Drawn,
  Explained,
  Logprobs,
  Together,
  explain,
  logprobs,
  nothing,
  processed_logprobs,
  raw_logprobs,
)
from decoder.sampling.masks import (
  allowed_tokens,
  bad_words,
  begin_suppress,
  forced_bos,
  forced_eos,
  length_decay,
  logit_bias,
  min_new_tokens,
  sequence_bias,
  suppress,
)
from decoder.sampling.mirostat import mirostat
from decoder.sampling.penalties import frequency, presence, repetition
from decoder.sampling.repeats import dry, no_repeat_ngram
from decoder.sampling.samplers import categorical, noise, request_key
from decoder.sampling.settings import SamplingSettings, plain
from decoder.sampling.temperature import dynamic_temperature, temperature
from decoder.sampling.transforms import Context, LogitTransform, chain
from decoder.sampling.truncation import epsilon, eta, min_p, top_k, top_n_sigma, top_p, typical, xtc

__all__ = [
  "Context",
  "Drawn",
  "Explained",
  "LogitTransform",
  "Logprobs",
  "SamplingSettings",
  "Together",
  "allowed_tokens",
  "bad_words",
  "begin_suppress",
  "categorical",
  "chain",
  "dry",
  "dynamic_temperature",
  "epsilon",
  "eta",
  "explain",
  "forced_bos",
  "forced_eos",
  "frequency",
  "length_decay",
  "logit_bias",
  "logprobs",
  "min_new_tokens",
  "min_p",
  "mirostat",
  "no_repeat_ngram",
  "noise",
  "nothing",
  "plain",
  "presence",
  "processed_logprobs",
  "raw_logprobs",
  "repetition",
  "request_key",
  "sequence_bias",
  "suppress",
  "temperature",
  "top_k",
  "top_n_sigma",
  "top_p",
  "typical",
  "xtc",
]
