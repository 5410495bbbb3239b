"""The façade: whatever the batch, the steps a call or the way of reading, a request's text is one and the same."""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import Letters, facade, rand_lm, rescript, script_lm, table_lm

import decoder
from decoder.programs import LOOP
from decoder.sampling import LogitTransform

WARM = dict(temperature=1.0, ignore_eos=True, max_new_tokens=30)
TEXTS = ["ABC", "HELLO[THERE", "Q", "the_quick_brown_fox"]


@pytest.fixture(scope="module")
def alone(lm):
  return [lm.generate(text, seed=i, **WARM) for i, text in enumerate(TEXTS)]


@functools.cache
def uniform(size=8, **more):
  """TABLE-LM without preferences, compiled once."""
  return facade(*table_lm(np.full((size, size), 1 / size)), **more)


@functools.cache
def five():
  """SCRIPT-LM that says 5 for ever."""
  return script([5])


def script(ids, prompt=3, **more):
  return facade(*script_lm(ids, prompt, **more.pop("model", {})), **more)


def test_a_rows_text_is_the_same_in_any_batch_and_place(lm, alone):
  """C36: greedy and sampled rows mixed, other lengths beside it."""
  each = [decoder.Settings(seed=i, **WARM) for i in range(4)]
  for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
    got = lm.generate([TEXTS[i] for i in order], [each[i] for i in order])
    assert [r.token_ids for r in got] == [alone[i].token_ids for i in order]
  cold = decoder.Settings(max_new_tokens=5)
  mixed = lm.generate([TEXTS[2], "ZZ", TEXTS[0]], [each[2], cold, each[0]])
  assert [mixed[0].token_ids, mixed[2].token_ids] == [alone[2].token_ids, alone[0].token_ids]
  assert mixed[1].token_ids == lm.generate("ZZ", cold).token_ids
  assert len({r.text for r in alone}) == 4


def test_stream_equals_generate_at_any_steps_per_call(lm, alone):
  stream = lm.stream(TEXTS[1], seed=1, **WARM)
  assert "".join(stream) == stream.result.text == alone[1].text
  for steps in (1, 3, LOOP, 10**6):
    decoding = lm.start([lm.request(TEXTS[1], seed=1, **WARM)])
    deltas = []
    while not decoding.done:
      deltas += decoding.advance(steps)
    (result,) = decoding.results(0.0)
    assert "".join(deltas) == result.text == alone[1].text
    assert result.token_ids == alone[1].token_ids


def test_prompts_longer_than_a_chunk_equal_short_chunks(lm, alone, monkeypatch):
  """Chunking leaves no trace: 4 tokens a chunk instead of 512."""
  monkeypatch.setattr("decoder.programs.Programs.chunk", 4)
  monkeypatch.setattr("decoder.programs.SMALLEST_CHUNK", 2)
  other = facade(*rand_lm(), Letters.build())
  assert other.generate(TEXTS[3], seed=3, **WARM).token_ids == alone[3].token_ids


def test_C35_samples_of_one_seed_differ_and_repeat():
  lm = uniform()
  four = lm.generate([1, 2], n=4, seed=7, temperature=1.0, max_new_tokens=16)
  again = lm.generate([1, 2], n=4, seed=7, temperature=1.0, max_new_tokens=16)
  two = lm.generate([1, 2], n=2, seed=7, temperature=1.0, max_new_tokens=16)
  assert len({r.token_ids for r in four}) == 4
  assert [r.token_ids for r in four] == [r.token_ids for r in again]
  assert [r.token_ids for r in two] == [r.token_ids for r in four[:2]]
  other = lm.generate([1, 2], n=4, seed=8, temperature=1.0, max_new_tokens=16)
  assert not {r.token_ids for r in four} & {r.token_ids for r in other}, "negative control"


FRESH = """
import sys; sys.path[:0] = [{tests!r}, {root!r}]
from generate_test import uniform
settings = dict(temperature=1.0, max_new_tokens=16, seed={seed})
result = uniform().generate([1, 2], **settings)
print(result.seed, *result.token_ids)
"""


def fresh_process():
  tests = Path(__file__).parent
  code = FRESH.format(tests=str(tests), root=str(tests.parent), seed=None)
  return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_C38_C39_unseeded_processes_differ_and_the_reported_seed_repeats_them():
  processes = [fresh_process(), fresh_process()]
  (one, *ids), (other, *other_ids) = ([int(x) for x in p.communicate(timeout=300)[0].split()] for p in processes)
  assert one != other
  assert ids != other_ids
  here = uniform().generate([1, 2], temperature=1.0, max_new_tokens=16, seed=one)
  assert (here.seed, list(here.token_ids)) == (one, ids)


def test_C51_any_of_the_end_ids_ends_a_text():
  lm = script([5, 106, 7, 1], generation={"eos_token_id": [1, 106]})
  result = lm.generate([1, 2, 3])
  assert (result.token_ids, result.finish_reason, result.stop_reason) == ((5,), "stop", 106)
  assert lm.generate([1, 2, 3], ignore_eos=True, max_new_tokens=4).token_ids == (5, 106, 7, 1)
  for said, ids, end in (([9, 9, 1, 106], (9, 9), 1), ([106, 5, 5, 5], (), 106), ([2, 0, 3, 106], (2, 0, 3), 106)):
    result = rescript(lm, said).generate([1, 2, 3])
    assert (result.token_ids, result.finish_reason, result.stop_reason) == (ids, "stop", end)


def test_C53_end_ids_are_a_union_of_every_source():
  tokenizer = Letters.build()
  lm = script([1, Letters.EOS], tokenizer=tokenizer, generation={"eos_token_id": [7]})
  lm.config = {"eos_token_id": 8}
  assert set(lm.ends) == {7, 8, Letters.EOS}
  assert lm.generate([1, 2, 3]).stop_reason == Letters.EOS
  for said in (7, 8):
    assert rescript(lm, [1, said]).generate([1, 2, 3]).stop_reason == said


def test_C55_a_tokenizer_without_specials_works():
  names = ("bos_token_id", "eos_token_id", "padding_token_id", "add_bos_token")
  bare = Letters.build(**{f"tokenizer.ggml.{name}": None for name in names})
  lm = script([1], tokenizer=bare)
  result = lm.generate("ABC", max_new_tokens=1)
  assert (result.prompt_ids, result.text, result.finish_reason) == ((0, 1, 2), "B", "length")
  with pytest.raises(ValueError, match="empty"):
    lm.generate("")


def test_C56_a_full_cache_ends_the_text_and_says_so():
  lm = five()
  result = lm.generate([1] * 12, max_new_tokens=32, capacity=16)
  assert (len(result.token_ids), result.finish_reason, result.truncated) == (4, "length", "context")
  for prompt, room in ((15, 1), (3, 13)):
    result = lm.generate([1] * prompt, max_new_tokens=32, capacity=16)
    assert (len(result.token_ids), result.finish_reason, result.truncated) == (room, "length", "context")
  result = lm.generate([1] * 12, max_new_tokens=4)
  assert (len(result.token_ids), result.truncated) == (4, None), "max_new_tokens ended this one"


def test_C77_until_the_context_is_full():
  lm = five()
  for prompt, asked in ((8, None), (1, None), (16, 10**9)):
    result = lm.generate([1] * prompt, max_new_tokens=asked)
    assert (len(result.token_ids), result.finish_reason, result.truncated) == (256 - prompt, "length", "context")


def test_no_new_tokens(lm, alone):
  for prompt in ("ABC", [1, 2, 3]):
    result = lm.generate(prompt, max_new_tokens=0)
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "length")
  none, some, _ = lm.generate(TEXTS[:3], [decoder.Settings(max_new_tokens=0), *[decoder.Settings(seed=1, **WARM)] * 2])
  assert (none.token_ids, some.token_ids) == ((), alone[1].token_ids)
  assert list(lm.stream("ABC", max_new_tokens=0)) == []


@pytest.mark.slow
def test_not_finite_logits_end_only_their_row(lm, alone):
  """C32."""
  network, params = rand_lm()
  poisoned = dict(params, embed={"weight": params["embed"]["weight"].at[63].set(jnp.nan)})
  sick = facade(network, poisoned, Letters.build())
  bad, good = sick.generate([[1, 63, 2], list(alone[1].prompt_ids)], seed=1, **WARM)
  assert (bad.token_ids, bad.finish_reason) == ((), "error")
  assert (good.token_ids, good.finish_reason) == (alone[1].token_ids, "length")


@pytest.mark.slow
def test_ids_beyond_the_tokenizer_are_never_drawn():
  lm = uniform(64, tokenizer=Letters.build())
  result = lm.generate([1], temperature=1.0, ignore_eos=True, max_new_tokens=255, seed=1)
  assert max(result.token_ids) <= 61
  assert len(set(result.token_ids)) > 40
  free = uniform(64).generate([1], temperature=1.0, max_new_tokens=255, seed=1)
  assert max(free.token_ids) > 61, "negative control"


def test_a_transform_of_ones_own_joins_the_chain():
  def only_odd(logits_V, state, context):
    return jnp.where(jnp.arange(logits_V.shape[0]) % 2 == 1, logits_V, -jnp.inf)

  odd = LogitTransform(lambda: np.float32(0), only_odd)
  result = uniform().generate([2], temperature=1.0, max_new_tokens=40, seed=1, transforms=(odd,))
  assert set(result.token_ids) == {1, 3, 5, 7}
  assert result.to_json()["settings"]["transforms"] == 1


def test_stop_strings_and_their_reason(lm):
  text = lm.generate(TEXTS[0], seed=0, **WARM).text
  stop = text[11:13]
  at = text.index(stop)
  for include, want in ((False, text[:at]), (True, text[: at + 2])):
    settings = dict(seed=0, stop=[stop, "never"], include_stop=include, **WARM)
    result = lm.generate(TEXTS[0], **settings)
    assert (result.text, result.finish_reason, result.stop_reason) == (want, "stop", stop)
    assert "".join(lm.stream(TEXTS[0], **settings)) == want


@pytest.mark.parametrize(
  ("name", "bad"),
  [
    ("temperature", -1), ("temperature", math.nan), ("temperature", "hot"), ("temperature", None), ("top_k", -2),
    ("top_k", 1.5), ("top_k", math.nan), ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1),
    ("min_p", 2), ("max_new_tokens", -1), ("max_new_tokens", 1.5), ("seed", -1), ("seed", 2**32), ("seed", 1.0),
    ("n", 0), ("n", None), ("capacity", 0), ("stop", ("",)), ("stop", (3,)), ("truncate", "right"),
  ],
)  # fmt: skip
def test_impossible_settings_are_named_with_what_was_got(name, bad):
  with pytest.raises(ValueError, match=name) as error:
    decoder.Settings(**{"temperature": 1.0, name: bad})
  assert repr(bad) in str(error.value)


def test_other_impossible_requests_say_what_to_do(lm):
  with pytest.raises(ValueError, match="temperature above 0"):
    lm.generate("A", n=2)
  with pytest.raises(ValueError, match="did you mean 'temperature'"):
    lm.generate("A", temprature=1)
  with pytest.raises(ValueError, match="2 settings for 1 prompts"):
    lm.generate(["A"], [decoder.Settings()] * 2)
  with pytest.raises(ValueError, match="one text"):
    lm.stream("A", n=2, temperature=1)
  with pytest.raises(ValueError, match="prompt token 64"):
    lm.generate([64])
  for nothing in ([], ()):
    assert lm.generate(nothing) == []
  with pytest.raises(ValueError, match="at least one"):
    lm.generate([[]])
  with pytest.raises(ValueError, match="tokenizer"):
    uniform().generate("A")
  with pytest.raises(ValueError, match="tokenizer"):
    uniform().generate([1], stop="x")


def test_C73_C74_one_bos_or_none_and_an_empty_prompt(lm):
  one = dict(max_new_tokens=1)
  assert lm.generate("", **one).prompt_ids == (Letters.BOS,)
  assert lm.generate("AB", **one).prompt_ids == (Letters.BOS, 0, 1)
  assert lm.generate("AB", add_bos=False, **one).prompt_ids == (0, 1)
  assert lm.generate([0, 1], **one).prompt_ids == (0, 1), "ids are taken as they are"
  with pytest.raises(ValueError, match="the prompt is empty"):
    lm.generate("", add_bos=False)
  with pytest.raises(ValueError, match="at least one"):
    lm.generate([[1], []])
  assert lm.generate("AB", **one).finish_reason == "length", "the next request is served"


def test_C75_a_prompt_beyond_the_context_names_both_numbers():
  lm = five()
  for length in (256, 300):
    with pytest.raises(ValueError, match=rf"{length} tokens.* 256"):
      lm.generate([1] * length)
  with pytest.raises(ValueError, match=r"20 tokens.*capacity holds 16"):
    lm.generate([1] * 20, capacity=16)


def test_C75_truncation_keeps_what_it_says():
  lm = five()
  ids = [n % 100 for n in range(300)]
  left = lm.generate(ids, truncate="left", max_new_tokens=6)
  assert list(left.prompt_ids) == ids[50:]
  assert (len(left.token_ids), left.truncated) == (6, "prompt")
  middle = lm.generate(ids, truncate="middle", max_new_tokens=6)
  assert list(middle.prompt_ids) == ids[:125] + ids[175:]
  whole = lm.generate(ids[:200], truncate="left", max_new_tokens=6)
  assert (list(whole.prompt_ids), whole.truncated) == (ids[:200], None)


def test_truncated_prompt_is_reported_when_the_text_ends_by_itself():
  lm = script([5, 5, 1], prompt=192, generation={"eos_token_id": 1})
  result = lm.generate([3] * 300, truncate="left")
  assert (len(result.prompt_ids), result.finish_reason, result.truncated) == (192, "stop", "prompt")


def test_results_are_plain_data(lm):
  one, two, _ = lm.generate(["A", "B", "C"], max_new_tokens=3)
  plain = json.loads(json.dumps(one.to_json(), allow_nan=False))
  assert plain["token_ids"] == list(one.token_ids)
  assert plain["timings"]["new_tokens"] == len(one.token_ids) <= 3
  assert two.prompt_ids == (Letters.BOS, 1)


def test_prompts_of_many_kinds(lm, alone):
  ids = list(alone[0].prompt_ids)
  for prompt in (ids, tuple(ids), np.array(ids)):
    assert lm.generate(prompt, seed=0, **WARM).token_ids == alone[0].token_ids


def test_warm_up_compiles_what_is_used_later(lm):
  from compiled_test import Compilations

  lm.warm_up(lengths=(5, 16))
  with Compilations() as compiled:
    lm.generate("A", max_new_tokens=3)
  assert compiled.count == 0


def test_an_unread_stream_has_no_result(lm):
  stream = lm.stream("ABC", seed=0, **WARM)
  next(stream)
  with pytest.raises(RuntimeError, match="close"):
    stream.result  # noqa: B018
  stream.close()
  assert stream.result.finish_reason == "cancelled"
  assert list(stream) == []


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"stop": 5}, "stop must be"),
    ({"stop": None}, "stop must be"),
    ({"transforms": 5}, "transforms must be"),
    ({"transforms": ("x",)}, "transforms must be"),
    ({"include_stop": "no"}, "include_stop must be"),
    ({"ignore_eos": None}, "ignore_eos must be"),
    ({"add_bos": 3}, "add_bos must be"),
    ({"capacity": 10**9}, "beyond the context"),
    ({"settings": "x"}, "settings must be"),
    ({"settings": {"temperature": 1}}, "settings must be"),
    ({"temprature": 1}, "did you mean 'temperature'"),
  ],
)
def test_a_wrong_type_is_a_clear_error(lm, changes, says):
  with pytest.raises(ValueError, match=says):
    lm.generate([1, 2], **changes)


def test_a_transform_of_the_wrong_shape_is_refused(lm):
  short = LogitTransform(init=lambda: (), update=lambda logits_V, state, context: logits_V[:5])
  with pytest.raises(ValueError, match="must give logits of shape"):
    lm.generate([1, 2], transforms=(short,))


@pytest.mark.parametrize("capacity", ["x", -5, 0, 1.5, True, 10**9])
def test_a_session_of_an_impossible_capacity_is_refused(lm, capacity):
  with pytest.raises(ValueError, match="capacity"):
    lm.session(capacity)
