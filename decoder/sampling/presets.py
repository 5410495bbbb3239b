"""Other libraries' orders and rules, so that moving here changes no text's law.

A preset is an order of `orders.LINKS` and the scopes that its penalties have where the request names none; the numbers
are the request's own. Measured on, or read in, the releases of autumn 2026: transformers 5.24, vLLM's V1 engine,
llama.cpp's default sampler chain, mlx-lm's make_sampler and make_logits_processors.
"""

from typing import Any, NamedTuple

from decoder.sampling.orders import ORDER


class Preset(NamedTuple):
  order: tuple[str, ...]
  repetition_scope: Any = "all"
  penalty_scope: Any = "output"


PRESETS = {
  None: Preset(ORDER),
  "hf": Preset((
    "sequence_bias", "repetition", "no_repeat_ngram", "bad_words", "min_new_tokens", "forced_bos", "forced_eos",
    "length_decay", "suppress", "begin_suppress", "temperature", "top_k_with_ties", "top_p_from_below", "min_p",
    "typical_with_ties", "epsilon", "eta",
  )),
  "vllm": Preset((
    "allowed_tokens", "bad_words_in_output", "min_new_tokens", "logit_bias", "repetition", "frequency", "presence",
    "temperature_clamped", "min_p", "top_k_with_ties", "top_p_from_below",
  )),
  # Mirostat comes after the temperature there too, in place of all filters.
  "llamacpp": Preset((
    "logit_bias", "repetition", "frequency", "presence", "dry", "top_n_sigma", "top_k", "typical_beyond",
    "top_p_or_one", "min_p", "xtc", "dynamic_temperature", "temperature", "mirostat",
  ), 64, 64),
  "mlx": Preset((
    "logit_bias", "repetition", "presence", "frequency", "top_p_with_ties", "min_p", "xtc_above", "top_k",
    "temperature",
  ), 20, 20),
}  # fmt: skip
