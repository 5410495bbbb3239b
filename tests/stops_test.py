"""What ends a text: tokens, time, another thread; and that the result says which."""

import functools
import itertools
import threading
import time

import pytest
from fixtures import Letters, facade, rescript, script_lm

from decoder import Settings
from decoder.programs import LOOP, Programs

HELLO = [ord(c) - ord("A") for c in "HELLO"]
E, L, OH = HELLO[1], HELLO[2], HELLO[4]


@pytest.fixture(scope="module")
def voice():
  """SCRIPT-LM with letters: `voice(ids)` is the model that says them; compiled once."""
  lm = facade(*script_lm([0] * 256, 3, size=62), Letters.build())
  return functools.partial(rescript, lm)


@pytest.fixture
def hello(voice):
  return voice([*HELLO, Letters.EOS])


@pytest.fixture
def slow(voice, monkeypatch):
  """`slow(seconds)`: as `voice`, where every step and every chunk of a prompt takes that long; says HELLO 40 times."""

  def say(seconds):
    loop, chunk, last = Programs.loop, Programs._chunk, Programs._last

    def after_a_while(program, steps=lambda *arguments: 1):
      return lambda self, *arguments: time.sleep(seconds * steps(*arguments)) or program(self, *arguments)

    monkeypatch.setattr(Programs, "loop", after_a_while(loop, lambda state, limit: limit))
    monkeypatch.setattr(Programs, "_chunk", after_a_while(chunk))
    monkeypatch.setattr(Programs, "_last", after_a_while(last))
    return voice([*HELLO * 40, Letters.EOS])

  return say


def ending(result):
  return result.text, result.finish_reason, result.stop_reason


def test_stop_token_ids_end_a_text_and_are_named(hello):
  assert ending(hello.generate("AB", stop_token_ids=[L])) == ("HE", "stop", L)
  assert ending(hello.generate("AB", stop_token_ids=(E, L))) == ("H", "stop", E)
  assert ending(hello.generate("AB", stop_token_ids=[9])) == ("HELLO", "stop", Letters.EOS)
  kept = hello.generate("AB", stop_token_ids=[L], include_stop=True)
  assert ending(kept) == ("HEL", "stop", L)
  assert list(kept.token_ids) == HELLO[:3]


def test_stop_token_ids_act_where_end_tokens_are_ignored(hello):
  free = dict(ignore_eos=True, max_new_tokens=8)
  assert ending(hello.generate("AB", stop_token_ids=[OH], **free)) == ("HELL", "stop", OH)
  assert hello.generate("AB", **free).finish_reason == "length"
  asked = hello.generate("AB", stop_token_ids=[Letters.EOS], **free)
  assert ending(asked) == ("HELLO", "stop", Letters.EOS)


def test_end_tokens_are_never_kept(hello):
  result = hello.generate("AB", include_stop=True)
  assert (ending(result), list(result.token_ids)) == (("HELLO", "stop", Letters.EOS), HELLO)


def test_of_a_stop_token_and_a_stop_string_the_earlier_wins(hello):
  both = dict(stop=["LO"], include_stop=True)
  assert ending(hello.generate("AB", stop_token_ids=[L], **both)) == ("HEL", "stop", L)
  assert ending(hello.generate("AB", stop_token_ids=[OH], **both)) == ("HELLO", "stop", "LO")
  assert ending(hello.generate("AB", stop_token_ids=[OH], stop=["LO"])) == ("HELL", "stop", OH)


def test_rows_of_a_batch_have_stops_of_their_own_and_nothing_recompiles(hello):
  from compiled_test import Compilations

  hello.generate(["AB"] * 3)
  with Compilations() as compiled:
    results = hello.generate(["AB"] * 3, [Settings(stop_token_ids=[E]), Settings(), Settings(stop_token_ids=[OH, 2])])
  assert [r.text for r in results] == ["H", "HELLO", "HELL"]
  assert compiled.count == 0


@pytest.mark.parametrize("ids", [5, None, "5", ["a"], [-1], [1.0], [True], [62], [10**12]])
def test_stop_token_ids_that_are_none_are_refused(hello, ids):
  with pytest.raises(ValueError, match="stop_token_ids"):
    hello.generate("AB", stop_token_ids=ids)


@pytest.mark.slow
def test_c54_no_end_id_of_any_source_before_min_new_tokens(voice):
  lm = voice([Letters.EOS, 9, Letters.EOS, 9, 9, Letters.EOS])
  early = lm.generate("AB")
  assert (early.token_ids, early.stop_reason) == ((), Letters.EOS), "negative control"
  late = lm.generate("AB", min_new_tokens=5)
  assert not {Letters.EOS} & set(late.token_ids[:5])
  assert (len(late.token_ids), late.stop_reason) == (5, Letters.EOS)
  for changes in ({"stop_token_ids": [9]}, {"stop_token_ids": [9, 3], "ignore_eos": True, "max_new_tokens": 9}):
    result = lm.generate("AB", min_new_tokens=2, **changes)
    assert len(result.token_ids) >= 2
    assert not {9, 3} & set(result.token_ids[:2])
  bare = Letters.build(**{f"tokenizer.ggml.{name}": None for name in ("eos_token_id", "bos_token_id", "add_bos_token")})
  assert bare.eos_ids == ()
  of_config = facade(*script_lm([1, 7, 1, 7], 3, size=62), bare, {"eos_token_id": [1, 7]})
  five = of_config.generate([2, 2, 2], min_new_tokens=5, max_new_tokens=8)
  assert not {1, 7} & set(five.token_ids[:5])
  assert of_config.generate([2, 2, 2]).stop_reason == 1


def test_c54_stop_strings_and_dedents_wait_as_well(voice):
  lm = voice([0, 1, 0, 1, 0, 1, Letters.EOS])
  for least, text in ((0, ""), (1, ""), (2, "AB"), (3, "AB"), (4, "ABAB")):
    result = lm.generate("AB", stop=["AB"], min_new_tokens=least)
    assert (result.text, result.stop_reason) == (text, "AB")
    stream = lm.stream("AB", stop=["AB"], min_new_tokens=least)
    assert "".join(stream) == text == stream.result.text
  assert lm.generate("AB", stop=["AB"], min_new_tokens=6).stop_reason == Letters.EOS


def test_c61_what_was_held_back_is_there_however_the_text_ends(voice):
  lm = voice([*HELLO, Letters.EOS])
  for changes, text in (({"max_new_tokens": 3}, "HEL"), ({"stop_token_ids": [OH]}, "HELL"), ({}, "HELLO")):
    stream = lm.stream("AB", stop=["HELLO!"], **changes)
    assert "".join(stream) == stream.result.text == text
  stream = lm.stream("AB", stop=["LOVE"])
  written = next(stream)
  stream.cancel()
  written += "".join(stream)
  assert stream.result.text == written
  assert "HELLO".startswith(written)


def test_c78_a_shift_of_the_context_is_not_offered_and_its_end_is_told(voice):
  lm = voice(HELLO * 60)
  result = lm.generate("AB", max_new_tokens=200, capacity=32)
  assert (len(result.token_ids), result.finish_reason, result.truncated) == (29, "length", "context")
  for name in ("context_shift", "n_keep", "sinks"):
    with pytest.raises(ValueError, match=f"unknown setting '{name}'"):
      lm.generate("AB", **{name: 4})


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_max_time_that_is_none_is_refused(seconds):
  with pytest.raises(ValueError, match="max_time must be") as error:
    Settings(max_time=seconds)
  assert repr(seconds) in str(error.value)


def test_c65_stop_strings_need_text():
  with pytest.raises(ValueError, match=r"stop strings .* leave detokenize on, or give stop_token_ids"):
    Settings(detokenize=False, stop="x")
  silent = facade(*script_lm([0], 3))
  with pytest.raises(ValueError, match="tokenizer"):
    silent.generate([1, 2, 3], stop=["x"])
  for changes in (dict(stop=("LL", "O")), dict(stop=["H"], include_stop=True)):
    with pytest.raises(ValueError, match="detokenize"):
      silent.generate([1, 2, 3], Settings(detokenize=False), **changes)


def test_without_detokenisation_there_are_ids_and_no_text(hello):
  quiet = hello.generate("AB", detokenize=False)
  assert (quiet.text, list(quiet.token_ids), quiet.stop_reason) == ("", HELLO, Letters.EOS)
  stream = hello.stream("AB", detokenize=False)
  assert list(stream) == []
  assert list(stream.result.token_ids) == HELLO


def test_max_time_ends_a_text_and_keeps_what_was_written(slow):
  """Of 200 steps of 10 ms a tenth of a second allows a few; a whole call would pass it by LOOP steps."""
  lm = slow(0.01)
  stream = lm.stream("AB", max_time=0.1, stop=["LOX"])
  assert "".join(stream) == stream.result.text
  for result in (stream.result, lm.generate("AB", max_time=0.1)):
    assert (result.finish_reason, result.stop_reason, result.truncated) == ("time", None, None)
    assert len(result.token_ids) < LOOP / 2
    assert ("HELLO" * 40).startswith(result.text)
  assert lm.generate("AB", max_time=60.0, max_new_tokens=3).finish_reason == "length"


def test_calls_get_shorter_towards_max_time(slow, monkeypatch):
  lm, steps = slow(0.002), []
  loop = Programs.loop
  monkeypatch.setattr(Programs, "loop", lambda self, state, limit: steps.append(limit) or loop(self, state, limit))
  result = lm.generate("AB", max_time=0.3)
  assert result.finish_reason == "time"
  assert steps[-1] < max(steps) < LOOP
  free = lm.generate("AB", max_new_tokens=LOOP)
  assert (free.finish_reason, steps[-1]) == ("length", LOOP), "negative control"


def test_max_time_is_a_rows_own(slow):
  timed, free = slow(0.001).generate(["AB", "CD"], [Settings(max_time=0.05), Settings()])
  assert (timed.finish_reason, free.finish_reason) == ("time", "stop")
  assert free.text == "HELLO" * 40
  assert free.text.startswith(timed.text)
  assert len(timed.token_ids) < len(free.token_ids)


def test_max_time_is_looked_at_between_chunks_of_a_prompt(slow, monkeypatch):
  monkeypatch.setattr("decoder.programs.Programs.chunk", 16)
  lm = slow(0.02)
  result = lm.generate([1] * 193, max_time=0.05)  # 12 chunks of 20 ms before the last
  assert (result.text, result.token_ids, result.finish_reason) == ("", (), "time")
  assert result.timings.ttft_ms is None
  assert lm.generate([1] * 193, max_time=60.0, max_new_tokens=5).text == "HELLO"


def test_cancel_from_another_thread_ends_a_stream(slow):
  stream = slow(0.002).stream("AB", stop=["OX"])
  pieces = [next(stream)]
  threading.Timer(0.05, stream.cancel).start()
  pieces += stream
  result = stream.result
  assert result.finish_reason == "cancelled"
  assert "".join(pieces) == result.text  # with what was held back for the stop
  assert 1 <= len(result.token_ids) < 200
  stream.cancel()
  stream.close()
  assert stream.result is result


@pytest.mark.parametrize(("each_ms", "steps"), [(0.0, 8), (50.0, 8), (5.0, 20), (1.0, LOOP)])
def test_what_can_be_cancelled_takes_as_many_steps_as_a_moment_holds(hello, each_ms, steps):
  for cancel, stop, wanted in ((threading.Event(), [], steps), (threading.Event(), ["OX"], 8), (None, [], LOOP)):
    decoding = hello.start([hello.request("AB", stop=stop)], cancel=cancel)
    decoding._moment = decoding._moment._replace(each=each_ms)
    assert decoding._few(LOOP) == wanted


def test_cancel_before_the_first_token_and_close_from_another_thread(slow):
  lm = slow(0.002)
  stream = lm.stream("AB")
  stream.cancel()
  assert list(stream) == []
  assert (stream.result.text, stream.result.finish_reason) == ("", "cancelled")
  stream = lm.stream("AB")
  closer = threading.Timer(0.05, stream.close)
  closer.start()
  text = "".join(stream)
  closer.join()
  assert stream.result.finish_reason == "cancelled"
  assert stream.result.text.startswith(text)
  stream = lm.stream("AB")
  assert "".join(stream) == "HELLO" * 40, "negative control"


def test_an_event_cancels_a_batch_and_finished_rows_stay(slow):
  lm, cancel = slow(0.004), threading.Event()
  threading.Timer(0.2, cancel.set).start()
  short, long = lm.generate(["AB", "CD"], [Settings(max_new_tokens=1), Settings()], cancel=cancel)
  assert (short.text, short.finish_reason) == ("H", "length")
  assert long.finish_reason == "cancelled"
  assert len(long.token_ids) < 200
  row = lm.generate("AB", cancel=cancel)  # still set
  assert (row.text, row.finish_reason) == ("", "cancelled")


def test_what_is_drawn_beyond_a_stop_string_is_dropped_whatever_the_steps_a_call(voice):
  lm, text = voice(HELLO * 20), "HELLO" * 20
  for stop, steps in itertools.product(("LOH", "OHEL", "LL"), (1, 3, LOOP)):
    decoding = lm.start([lm.request("AB", stop=[stop])])
    while not decoding.done:
      decoding.advance(steps)
    (result,) = decoding.results(0.0)
    assert ending(result) == (text[: text.index(stop)], "stop", stop)


def test_threads_take_turns(voice):
  """Two threads read one stream: every piece goes to one of them, none is lost or doubled."""
  lm = voice([*HELLO * 20, Letters.EOS])
  stream, heard = lm.stream("AB"), [[], []]
  threads = [threading.Thread(target=lambda i=i: heard[i].extend(stream)) for i in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted("".join(heard[0] + heard[1])) == sorted("HELLO" * 20)
  assert stream.result.text == "HELLO" * 20
