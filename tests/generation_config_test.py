"""What a checkpoint's generation_config.json asks for, as published files have it and as they contradict themselves."""

import json

import pytest
from fixtures import Letters, facade, script_lm

from decoder import Settings
from decoder.generation_config import read_generation_config

# As published with the models named.
PUBLISHED = {
  "SmolLM2": ({"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
               "transformers_version": "4.42.3"}, {}),
  "Llama 3.2": ({"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009],
                 "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.45.0"},
                {"temperature": 0.6, "top_p": 0.9}),
  "Llama 2, first version": ({"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "max_length": 4096,
                              "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6,
                              "transformers_version": "4.31.0.dev0"}, {"temperature": 0.9, "top_p": 0.6}),
  "Qwen2.5": ({"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True,
               "eos_token_id": [151645, 151643], "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8,
               "top_k": 20, "transformers_version": "4.37.0"},
              {"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20}),
  "Whisper": ({"begin_suppress_tokens": [220, 50257], "suppress_tokens": [], "max_length": 448},
              {"begin_suppress_tokens": [220, 50257], "suppress_tokens": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name):
  config, asked = PUBLISHED[name]
  assert read_generation_config(json.loads(json.dumps(config))) == asked
  assert Settings.from_generation_config(config) == Settings(**asked)


@pytest.mark.parametrize(
  ("config", "asked"),
  [
    ({}, {}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}, {"temperature": 0.0, "top_k": 50}),
    ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
    ({"temperature": None, "top_k": None, "num_beams": 1}, {}),
    ({"length_penalty": 2.0, "early_stopping": True, "num_beam_groups": 1}, {}),
    (
      {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "num_return_sequences": 2},
      {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "n": 2},
    ),
    (
      {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
      {"num_beam_groups": 2, "diversity_penalty": 0.5},
    ),
    ({"stop_strings": ["a"], "num_return_sequences": 2, "do_sample": True}, {"stop": ["a"], "n": 2}),
    ({"sequence_bias": [[[1, 2], -1.5]]}, {"sequence_bias": {(1, 2): -1.5}}),
    ({"bad_words_ids": [[1], [2, 3]]}, {"bad_words": [[1], [2, 3]]}),
    ({"forced_eos_token_id": [7], "forced_bos_token_id": 3}, {"forced_eos": 7, "forced_bos": 3}),
    ({"exponential_decay_length_penalty": [20, 1.1]}, {"length_decay": [20, 1.1]}),
    ({"max_new_tokens": 9, "min_new_tokens": 2, "max_time": 3.5}, {"max_new_tokens": 9, "min_new_tokens": 2}),
  ],
)
def test_fields_become_settings(config, asked):
  got = read_generation_config(config)
  assert {name: got[name] for name in asked} == asked
  settings = Settings.from_generation_config(config)
  expected = Settings(**got)
  assert settings == expected


@pytest.mark.parametrize(
  ("config", "says"),
  [
    ({"temprature": 0.7}, "unknown field 'temprature'; did you mean 'temperature'"),
    ({"chat_format": "chatml"}, "unknown field 'chat_format'"),
    ({"do_sample": False, "temperature": 0.6}, "do_sample false contradicts temperature 0.6"),
    ({"do_sample": False, "top_p": 0.9, "top_k": 20}, "do_sample false contradicts top_k 20, top_p 0.9"),
    ({"do_sample": True, "temperature": 0.0}, "do_sample true contradicts temperature 0"),
    ({"do_sample": "yes"}, "do_sample must be true or false"),
    ({"num_beam_groups": 2}, "num_beam_groups = 2 is not offered"),
    ({"num_beams": 0}, "num_beams must be"),
    ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping must be"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    ({"temperature": "warm"}, "temperature must be"),
    ({"top_p": 0}, "top_p must be"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens 9 > max_new_tokens 3"),
    ({"num_return_sequences": 3, "do_sample": False}, "n=3"),
  ],
)
def test_what_cannot_be_followed_is_an_error(config, says):
  with pytest.raises(ValueError, match=says):
    Settings.from_generation_config(config)


def test_a_models_own_settings_are_used_where_they_are_asked_for():
  config = {"do_sample": True, "temperature": 5.0, "top_k": 1, "eos_token_id": [7], "max_new_tokens": 2}
  lm = facade(*script_lm([5], 3, size=62), Letters.build(), config)
  assert lm.defaults == Settings(temperature=5.0, top_k=1, max_new_tokens=2)
  assert 7 in lm.ends
  plain, asked = lm.generate([1, 2, 3], max_new_tokens=3), lm.generate([1, 2, 3], lm.defaults)
  assert (plain.settings.temperature, len(plain.token_ids)) == (0, 3)
  assert (asked.settings.temperature, asked.settings.top_k, len(asked.token_ids)) == (5.0, 1, 2)
  assert lm.generate([1, 2, 3], lm.defaults, max_new_tokens=1).token_ids == (5,), "what is given goes first"
  wrong = facade(*script_lm([5], 3, size=62), Letters.build(), {"penalty_alpha": 0.6})
  wrong.encode("AB")  # a file that cannot be followed is no matter until it is asked for
  with pytest.raises(ValueError, match="penalty_alpha"):
    wrong.defaults  # noqa: B018
