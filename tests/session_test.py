"""A session answers as if it had no cache, whatever was said, changed or broken off before."""

import signal

import jax.numpy as jnp
import pytest
from fixtures import Letters, facade, rand_lm

WARM = dict(temperature=1.0, ignore_eos=True, max_new_tokens=6)


def turn(session, prompt, **changes):
  stream = session.stream(prompt, **{**WARM, **changes})
  text = "".join(stream)
  assert text == stream.result.text
  return stream.result


def fresh(lm, prompt, **changes):
  return lm.generate(prompt, **{**WARM, **changes})


def test_turns_equal_fresh_runs_while_history_grows_and_is_edited(lm):
  session, said = lm.session(capacity=16), [1, 2, 3]
  for number in range(3):  # grows from 16 to 32
    got = turn(session, said, seed=number)
    assert got.token_ids == fresh(lm, said, seed=number).token_ids
    assert session.held == len(said) + len(got.token_ids) - 1
    said = [*said, *got.token_ids, 9 + number]
  edited = [*said[:8], 33, *said[9:]]
  assert turn(session, edited, seed=5).token_ids == fresh(lm, edited, seed=5).token_ids
  for again in range(2):  # C101: the very same prompt twice
    assert turn(session, edited, seed=5).token_ids == fresh(lm, edited, seed=5).token_ids, again
  other = [40, 41]
  assert turn(session, other, seed=6).token_ids == fresh(lm, other, seed=6).token_ids


def test_a_turn_reads_only_what_is_new(lm, monkeypatch):
  session = lm.session(capacity=16)
  first = turn(session, [1, 2, 3, 4], seed=1)
  seen, start = [], lm.start
  monkeypatch.setattr(lm, "start", lambda *args, **more: seen.append(more["held"]) or start(*args, **more))
  turn(session, [1, 2, 3, 4, *first.token_ids, 5], seed=2)
  assert seen == [4 + len(first.token_ids) - 1]


def test_a_cancelled_turn_leaves_a_sound_session(lm):
  session = lm.session(capacity=16)
  stream = session.stream([1, 2, 3], seed=1, **WARM)
  cut = next(stream)
  stream.close()
  assert stream.result.finish_reason == "cancelled"
  assert stream.result.text == cut
  after = [1, 2, 3, *stream.result.token_ids, 7]
  assert turn(session, after, seed=2).token_ids == fresh(lm, after, seed=2).token_ids
  stream = session.stream([*after, 8], seed=3, **WARM)
  with pytest.raises(RuntimeError, match="close"):
    session.stream([1], seed=1, **WARM)
  stream.close()  # before its first token
  assert turn(session, [*after, 8], seed=3).token_ids == fresh(lm, [*after, 8], seed=3).token_ids


def test_a_stop_string_within_a_call_leaves_a_sound_session(lm):
  session = lm.session(capacity=16)
  text = fresh(lm, [1, 2, 3], seed=1).text
  got = turn(session, [1, 2, 3], seed=1, stop=[text[3:5]])
  assert got.stop_reason == text[3:5]
  after = [1, 2, 3, *got.token_ids, 7]
  assert turn(session, after, seed=2).token_ids == fresh(lm, after, seed=2).token_ids


@pytest.mark.slow
def test_an_error_clears_the_session(lm):
  network, params = rand_lm()
  sick = facade(network, dict(params, embed={"weight": params["embed"]["weight"].at[63].set(jnp.nan)}), Letters.build())
  session = sick.session(capacity=16)
  assert turn(session, [1, 63, 2], seed=1).finish_reason == "error"
  assert session.held == 0
  assert turn(session, [1, 2, 3], seed=1).token_ids == fresh(lm, [1, 2, 3], seed=1).token_ids


def test_no_new_tokens_and_bad_turns_leave_the_cache(lm):
  session = lm.session(capacity=16)
  first = turn(session, [1, 2, 3], seed=1)
  assert turn(session, [1, 2, 3], max_new_tokens=0).token_ids == ()
  with pytest.raises(ValueError, match="top_p"):
    session.stream([1, 2], top_p=0)
  with pytest.raises(ValueError, match="at least one"):
    session.stream([])
  assert turn(session, [1, 2, 3], seed=1).token_ids == first.token_ids


def test_ctrl_c_within_a_call_waits_for_its_state(lm, monkeypatch):
  """A signal that comes between giving a State away and keeping the next one must not lose the conversation."""
  whole = lm.generate([1, 2, 3], max_new_tokens=9, ignore_eos=True)
  session = lm.session(16)
  stream = session.stream([1, 2, 3], max_new_tokens=9, ignore_eos=True)
  stream._decoding.advance(1)
  running = stream._decoding._drive
  really = running.loop

  def interrupted(state, limit):
    done = really(state, limit)
    signal.raise_signal(signal.SIGINT)  # the old state is gone, the new one not yet kept
    return done

  monkeypatch.setattr(running, "loop", interrupted)
  with pytest.raises(KeyboardInterrupt):
    stream._decoding.advance(1)
  monkeypatch.undo()
  stream.close()
  assert stream.result.finish_reason == "cancelled"
  assert stream.result.token_ids == whole.token_ids[:2]
  assert session.held == 4  # the prompt and the token that was read back
  again = session.stream([1, 2, 3], max_new_tokens=9, ignore_eos=True)
  assert "".join(again) == whole.text
  assert again.result.token_ids == whole.token_ids


def test_a_turn_that_could_not_start_leaves_the_session_usable(lm, monkeypatch):
  session = lm.session(16)
  list(session.stream([1, 2, 3], max_new_tokens=4))
  with monkeypatch.context() as patch:
    patch.setattr(lm, "start", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
      session.stream([1, 2, 3, 4], max_new_tokens=4)
  assert session.held == 0
  list(session.stream([1, 2, 3, 4], max_new_tokens=4))
