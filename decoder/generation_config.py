"""What does a checkpoint's generation_config.json ask for, in our settings?

Its fields are those of transformers' GenerationConfig. Every field is one of three kinds: it has a counterpart here, it
cannot change the text, or it must be off. Anything else in the file is an error rather than a wish unheard.
"""

import difflib
from collections.abc import Mapping
from typing import Any

_FILE = "generation_config.json"

# Theirs to ours; the values mean the same.
_NAMES = {
  **{
    name: name
    for name in (
      "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
      "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "max_new_tokens", "min_new_tokens",
      "max_time", "guidance_scale",
    )
  },
  "bad_words_ids": "bad_words",
  "sequence_bias": "sequence_bias",
  "forced_bos_token_id": "forced_bos",
  "forced_eos_token_id": "forced_eos",
  "exponential_decay_length_penalty": "length_decay",
  "stop_strings": "stop",
  "num_return_sequences": "n",
}  # fmt: skip

# What only sampling reads, with the values at which a greedy config may carry them: off, or transformers' default.
_OF_SAMPLING = {
  "temperature": (0, 1),
  "top_k": (0, 50),
  "top_p": (1,),
  "min_p": (0,),
  "typical_p": (1,),
  "epsilon_cutoff": (0,),
  "eta_cutoff": (0,),
}

# What only a search with beams reads; without beams the last two must be off, the others are no matter.
_OF_BEAMS = {
  "num_beams": 1,
  "length_penalty": None,
  "early_stopping": None,
  "num_beam_groups": 1,
  "diversity_penalty": 0,
}

# Without a counterpart: refused unless they have the value that means off.
_MUST_BE_OFF = {
  "penalty_alpha": 0,
  "top_h": None,
  "min_length": 0,
  "encoder_repetition_penalty": 1,
  "encoder_no_repeat_ngram_size": 0,
  "constraints": None,
  "force_words_ids": None,
  "forced_decoder_ids": None,
  "watermarking_config": None,
  "token_healing": False,
  "dola_layers": None,
}

# Said elsewhere, or no matter of the text: end ids are `LM.ends`; max_length counts the prompt, and the context bounds
# it anyway; drafts leave the law of the text as it is.
_NO_MATTER = (
  "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length",
  "use_cache", "cache_implementation", "cache_config", "max_cache_len",
  "return_legacy_cache", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
  "return_dict_in_generate", "remove_invalid_values", "renormalize_logits", "low_memory", "prefill_chunk_size",
  "compile_config", "disable_compile", "continuous_batching_config", "is_assistant", "num_assistant_tokens",
  "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
  "target_lookbehind", "assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size", "use_mtp",
  "speculation_type", "transformers_version", "_from_model_config", "_commit_hash",
)  # fmt: skip


def read_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """The keywords of `Settings` that a generation config asks for.

  do_sample false is temperature 0; true, a temperature of 1 where none is given. Where it is not said, a file with
  numbers for sampling means to sample: transformers would ignore them. What the file leaves out stays as it is here,
  so top_k is off where transformers takes 50. ValueError for an unknown field, for one without a counterpart that is
  not off, and for a do_sample that the other fields contradict.
  """
  asked = {name: value for name, value in config.items() if value is not None}
  off = _MUST_BE_OFF | {name: _OF_BEAMS[name] for name in ("num_beam_groups", "diversity_penalty")}
  for name, value in asked.items():
    _check_known(name, value, off if asked.get("num_beams", 1) == 1 else _MUST_BE_OFF)
  ours = {_NAMES[name]: value for name, value in asked.items() if name in _NAMES} | _temperature(asked)
  if asked.get("num_beams", 1) != 1:
    ours |= {name: asked[name] for name in _OF_BEAMS if name in asked}
  if isinstance(ours.get("sequence_bias"), list):  # JSON has no keys of ids: [[ids, bias], …]
    ours["sequence_bias"] = {tuple(ids): bias for ids, bias in ours["sequence_bias"]}
  if isinstance(ours.get("forced_eos"), list) and len(ours["forced_eos"]) == 1:
    (ours["forced_eos"],) = ours["forced_eos"]
  return ours


def _check_known(name: str, value: Any, off: Mapping[str, Any]) -> None:
  if name in off and value != off[name]:
    raise ValueError(f"{_FILE}: {name} = {value!r} is not offered here; take it out, or give settings of your own")
  known = [*_NAMES, *_OF_BEAMS, *_MUST_BE_OFF, *_NO_MATTER]
  if name not in known:
    near = difflib.get_close_matches(name, sorted(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else "take it out, or give settings of your own"
    raise ValueError(f"{_FILE}: unknown field {name!r}; {hint}")


def _temperature(asked: Mapping[str, Any]) -> dict[str, Any]:
  """What do_sample makes of the temperature; {} where the file says nothing of either."""
  sampled, given = asked.get("do_sample"), [name for name in _OF_SAMPLING if name in asked]
  if sampled is None:
    return {"temperature": asked.get("temperature", 1.0)} if given else {}
  if not isinstance(sampled, bool):
    raise ValueError(f"{_FILE}: do_sample must be true or false, got {sampled!r}")
  if sampled:
    if asked.get("temperature") == 0:
      raise ValueError(f"{_FILE}: do_sample true contradicts temperature 0; make do_sample false, or raise it")
    return {"temperature": asked.get("temperature", 1.0)}
  against = [name for name in given if asked[name] not in _OF_SAMPLING[name]]
  if against:
    values = ", ".join(f"{name} {asked[name]!r}" for name in against)
    raise ValueError(f"{_FILE}: do_sample false contradicts {values}; make do_sample true, or take them out")
  return {"temperature": 0.0}
