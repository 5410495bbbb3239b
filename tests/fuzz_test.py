"""Any combination of settings runs, or is refused with a message that names one of them: no crash, NaN or hang."""

import dataclasses
import math
import random
import re
import signal

import pytest
from fixtures import Letters, facade, rand_lm

from decoder import Infill, Settings

SECONDS = 600  # of one case, with what it may have to compile on a machine that others use; only a hang takes so long

# Values by setting: the first few make sense, the rest mostly do not.
GOOD = {
  "temperature": (0.0, 0.7, 1.0, 1e-3, 50.0),
  "top_k": (None, 0, -1, 1, 5, 10**6),
  "top_p": (None, 1.0, 0.5, 1e-6),
  "min_p": (None, 0.0, 0.1, 1.0),
  "typical_p": (None, 0.5),
  "epsilon_cutoff": (None, 0.01),
  "eta_cutoff": (None, 0.01),
  "top_n_sigma": (None, 1.0),
  "xtc_probability": (0.0, 0.5, 1.0),
  "xtc_threshold": (0.1, 0.5),
  "mirostat_tau": (None, 3.0),
  "mirostat_eta": (0.1, 1.0),
  "dynatemp_range": (0.0, 0.3),
  "dynatemp_exponent": (1.0, 2.0),
  "repetition_penalty": (1.0, 1.3, 0.5),
  "repetition_scope": (None, "all", "output", 4),
  "presence_penalty": (0.0, 0.5, -0.5),
  "frequency_penalty": (0.0, 0.5),
  "penalty_scope": (None, "all", 3),
  "dry_multiplier": (0.0, 0.8),
  "dry_base": (1.75, 1.1),
  "dry_allowed_length": (2, 1),
  "dry_scope": ("all", 8),
  "dry_breakers": ((), (1, 2), ("A", 7), ["AB"]),
  "no_repeat_ngram_size": (None, 0, 2),
  "logit_bias": ({}, {3: 5.0}, {3: -100.0, 4: 1}),
  "sequence_bias": ({}, {(1, 2): -3.0}),
  "bad_words": ((), [[1], [2, 3]], ["AB", [9], "~"], ["é"]),
  "allowed_tokens": (None, [1, 2, 3, 60, 61]),
  "suppress_tokens": ((), [4, 5]),
  "begin_suppress_tokens": ((), [61, 7]),
  "min_new_tokens": (0, 2, 5),
  "forced_bos": (None, 9),
  "forced_eos": (None, 61),
  "length_decay": (None, (1, 1.5)),
  "preset": (None,),
  "guidance_scale": (1.0,),
  "negative_prompt": (None,),
  "max_new_tokens": (0, 1, 6, 9),
  "seed": (None, 0, 7, 2**32 - 1),
  "n": (1,),
  "stop": ((), "A", ("AB", "c"), ["~"]),
  "stop_token_ids": ((), [5], (60, 61)),
  "include_stop": (False, True),
  "stop_at_dedent": (False, True),
  "ignore_eos": (False, True),
  "max_time": (None, 30.0, 1e-6),
  "detokenize": (True, False),
  "add_bos": (None, True, False),
  "truncate": (None, "left", "middle"),
  "capacity": (16,),
  "speculate": ("off",),
  "draft_tokens": (7,),
  "src": (None,),
  "tgt": (None,),
  "logprobs": (None,),
  "logprobs_mode": ("raw", "processed"),
  "prompt_logprobs": (False,),
  "best_of": (None,),
  "num_beams": (1,),
  "num_beam_groups": (1,),
  "diversity_penalty": (0.0,),
  "length_penalty": (1.0,),
  "length_norm": ("length",),
  "early_stopping": (False,),
  "patience": (1.0,),
  "forced_tokens": ((),),
  "continuations": (None,),
  "explain": (False,),
}
# What costs programs of their own is the same in all cases of a kind: (cases, rows, what is always set, other values).
# `no_repeat_ngram_size` takes the full chain, so that a kind does not compile both.
ALWAYS_FULL = {"no_repeat_ngram_size": (9, 2)}
KINDS = {
  "one row": (450, 1, {}),
  "three rows": (650, 3, {}),
  "guided": (120, 3, {**ALWAYS_FULL, "guidance_scale": (1.5, 0.0, 20.0), "negative_prompt": (None, "B", [4, 5])}),
  "samples": (100, 1, {**ALWAYS_FULL, "n": (2,)}),
  "best of": (80, 1, {**ALWAYS_FULL, "n": (1, 2), "best_of": (2,)}),
  "told": (120, 1, {**ALWAYS_FULL, "logprobs": (2, 4, 5), "prompt_logprobs": (True,), "explain": (True,)}),
  "constrained": (120, 3, {**ALWAYS_FULL, "regex": ("[A-C]{1,4}", "(AB|C~)*"), "max_new_tokens": (6, 9)}),
  "hf": (40, 3, {"preset": ("hf",), "bad_words": ([[1], [2, 3]],)}),
  "vllm": (40, 3, {"preset": ("vllm",), "bad_words": ([[1], [2, 3]],)}),
  "llamacpp": (40, 3, {"preset": ("llamacpp",), "presence_penalty": (0.5,)}),
  "mlx": (40, 3, {"preset": ("mlx",), "presence_penalty": (0.5,)}),
  "guessed": (80, 3, {
    **ALWAYS_FULL, "speculate": ("lookup",), "draft_tokens": (3,), "max_new_tokens": (6, 9),
    "regex": (None, None, "[A-C]{1,4}", "(AB|C~)*"),
  }),
  "beams": (120, 2, {
    **ALWAYS_FULL, "num_beams": (4,), "num_beam_groups": (2,), "diversity_penalty": (0.0, 0.5), "n": (1, 4),
    "length_penalty": (1.0, 0.0, -1.0, 3.0), "length_norm": ("length", "gnmt"), "patience": (1.0, 1.0, 2.0),
    "early_stopping": (True, False, "never"), "forced_tokens": ((), (), [9], [9, 61]),
    "continuations": (None, None, ["AB", "C"], [[4], [4, 5], [6]]),
  }),
}  # fmt: skip
STRUCTURE = (
  "n", "best_of", "logprobs", "logprobs_mode", "prompt_logprobs", "explain", "guidance_scale", "negative_prompt",
  "preset", "capacity", "regex", "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "length_norm",
  "early_stopping", "patience", "forced_tokens", "continuations", "speculate", "draft_tokens",
)  # fmt: skip
BAD = (
  None, -1, -3, 0, 2, 1.5, math.nan, math.inf, -math.inf, 1e300, 2**40, True, False, "", "warm", b"x", (), [], [[]], {},
  [1.5], ["a", 3], {"a": 1}, {1: math.nan}, {1: "x"}, {99: 1.0}, [99], [[99]], [-1], (1, 2, 3), object(),
)  # fmt: skip
PROMPTS = ("ABC", "", [1, 2, 3], "x" * 20, [64], Infill("A", "B"), "a\n  b")


def draw_settings(rng, bad, always):
  """A few settings that make sense alone, `bad` more with any value, and what is always set. Of structure, only values
  that are refused: others would be programs of their own."""
  names = list(GOOD)
  chosen = {name: rng.choice(GOOD[name]) for name in rng.sample(names, rng.randint(0, 8)) if name not in STRUCTURE}
  chosen = {"capacity": 16, "max_new_tokens": 6, "temperature": 0.8, **chosen}
  chosen.update((name, rng.choice(values)) for name, values in always.items())
  for name in rng.sample(names, bad):
    value = rng.choice(BAD)
    if name not in STRUCTURE or refusal(**{name: value}) is not None:
      chosen[name] = value
  return chosen


def check(result):
  """What holds of every result."""
  settings = result.settings
  assert result.finish_reason in ("stop", "length", "time", "error", "cancelled")
  assert len(result.token_ids) <= settings.max_new_tokens if settings.max_new_tokens is not None else True
  assert all(0 <= token < 62 for token in result.token_ids)
  assert "\ufffd" not in result.text
  if result.finish_reason == "error":  # everything masked, never a number that is none
    masks = ("allowed_tokens", "suppress_tokens", "bad_words", "begin_suppress_tokens", "no_repeat_ngram_size",
             "min_new_tokens", "logit_bias", "sequence_bias", "forced_bos", "forced_eos", "continuations")  # fmt: skip
    assert any(getattr(settings, name) for name in masks), settings


def one_case(lm, rng, rows, always):
  """Runs a case; the message if it was refused, else None."""
  wrong = rng.choice((0, 0, 0, 1, 2))
  asked = [draw_settings(rng, wrong if row == 0 else 0, always) for row in range(rows)]
  prompts = [rng.choice(PROMPTS) if rng.random() < 0.1 else "ABC" for _ in range(rows)]
  try:
    if rows == 1 and rng.random() < 0.5:
      stream = lm.stream(prompts[0], **asked[0])
      assert "".join(stream) == stream.result.text
      check(stream.result)
      return None
    for got in lm.generate(prompts, [Settings(**one) for one in asked]):
      for result in got if isinstance(got, list) else [got]:
        check(result)
  except ValueError as error:
    return str(error)
  return None


SAID = (*(f.name for f in dataclasses.fields(Settings)), "prompt", "context", "stop strings", "filling in the middle")


def names_a_setting(message):
  return re.search(rf"\b({'|'.join(SAID)})\b", message) is not None


@pytest.fixture(scope="module")
def model():
  return facade(*rand_lm(), Letters.build())


def hang(number, frame):
  raise TimeoutError(f"a case took more than {SECONDS} s")


def run_cases(lm, numbers, rows, always):
  """Cases of this many rows, 1 streamed; the numbers of those that were refused."""
  refused, before = [], signal.signal(signal.SIGALRM, hang)
  try:
    for number in numbers:
      signal.alarm(SECONDS)
      told = one_case(lm, random.Random(number), rows, always)
      if told is not None:
        assert names_a_setting(told), (number, told)
        refused.append(number)
      signal.alarm(0)
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
  return refused


def refusal(**changes):
  """What settings that are built, checked and described are refused with; None if they are taken."""
  try:
    settings = Settings(**{"temperature": 0.8, **changes})
    settings.check_vocabulary(62)
    settings.chain().init()
    settings.describe()
  except ValueError as error:
    return str(error)
  return None


def test_any_value_of_any_setting_is_taken_or_refused_by_name():
  """Any other exception than a ValueError fails here, with the setting in its traceback."""
  names = [field.name for field in dataclasses.fields(Settings)]
  told = {(name, number): refusal(**{name: value}) for name in names for number, value in enumerate(BAD)}
  assert [case for case, message in told.items() if message is not None and not names_a_setting(message)] == []
  assert 100 < sum(message is None for message in told.values()) < len(told) / 2


def test_combinations_run_or_are_refused_by_name(model):
  refused = run_cases(model, range(60), 3, {})
  assert 8 < len(refused) < 56


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_combinations_run_or_are_refused_by_name(model, kind):
  count, rows, always = KINDS[kind]
  start = 1000 * (1 + list(KINDS).index(kind))
  refused = run_cases(model, range(start, start + count), rows, always)
  assert count / 20 < len(refused) < 0.95 * count


def test_the_kinds_are_two_thousand():
  assert sum(count for count, *_ in KINDS.values()) == 2000


def test_the_message_check_tells_names_from_none():
  """Negative control."""
  assert not names_a_setting("could not broadcast shapes")
  assert not names_a_setting("stopping at the top")
  assert names_a_setting("top_k must be an integer")


def test_every_setting_is_drawn():
  """A new setting belongs into the table, or is one of those that the table leaves out on purpose."""
  left_out = {"transforms", "order", "json_schema", "regex", "grammar", "choice", "draft_tree"}
  missing = {f.name for f in dataclasses.fields(Settings)} - set(GOOD) - left_out
  assert not missing
