"""A request's text depends on its own seed: not on who is beside it, in which order, whether it is streamed, or on the
chunks its prompt came in."""

import itertools

import pytest
from fixtures import Letters, facade, rand_lm

from decoder import Settings
from decoder.programs import Programs

TEXTS = ["ABC", "HELLO[THERE", "Q", "the_quick_brown_fox"]
WARM = dict(temperature=1.0, ignore_eos=True, max_new_tokens=12)
EACH = [Settings(seed=10 + i, **WARM) for i in range(4)]


@pytest.fixture(scope="module")
def alone(lm):
  return [lm.generate(text, settings).token_ids for text, settings in zip(TEXTS, EACH)]


@pytest.fixture(scope="module")
def chunked():
  """The same model, reading prompts 4 tokens at a time."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("decoder.programs.Programs.chunk", 4)
    patch.setattr("decoder.programs.SMALLEST_CHUNK", 2)
    yield facade(*rand_lm(), Letters.build())


def batch(lm, order, settings=EACH):
  return [r.token_ids for r in lm.generate([TEXTS[i] for i in order], [settings[i] for i in order])]


def test_c36_every_order_of_four_requests_gives_each_its_text(lm, alone):
  for order in itertools.permutations(range(4)):
    assert batch(lm, order) == [alone[i] for i in order]


@pytest.mark.slow
def test_c36_every_size_of_a_batch_gives_each_its_text(lm, alone):
  for size in range(1, 9):
    order = [(3 * i + size) % 4 for i in range(size)]
    assert batch(lm, order) == [alone[i] for i in order]


def test_c36_streamed_or_not_and_in_chunks_or_not(lm, chunked, alone):
  for text, settings, ids in zip(TEXTS, EACH, alone):
    for model in (lm, chunked):
      stream = model.stream(text, settings)
      assert "".join(stream) == stream.result.text
      assert stream.result.token_ids == ids
  for order in ((3, 1, 0, 2), (2, 3, 0)):
    assert batch(chunked, order) == [alone[i] for i in order]


def test_c37_the_seed_decides(lm, alone):
  """Negative control: other seeds, other texts; and a seed that were the batch's would not do."""
  other = [Settings(seed=50 + i, **WARM) for i in range(4)]
  assert not set(batch(lm, range(4), other)) & set(alone)
  shifted = [EACH[(i + 1) % 4] for i in range(4)]
  assert all(a != b for a, b in zip(batch(lm, range(4), shifted), alone))
  assert lm.generate(TEXTS[0], EACH[0]).token_ids == lm.generate(TEXTS[0], EACH[0]).token_ids


def test_c39_the_seed_in_the_result_reproduces_it(lm):
  for settings in (WARM, {**WARM, "temperature": 1.7, "top_p": 0.9}, {**WARM, "n": 2}):
    first = lm.generate("ABC", **settings)
    first = first if isinstance(first, list) else [first]
    again = lm.generate("ABC", **{**settings, "seed": first[0].seed})
    again = again if isinstance(again, list) else [again]
    assert [r.token_ids for r in again] == [r.token_ids for r in first]
  assert lm.generate("ABC", **WARM).seed != lm.generate("ABC", **WARM).seed


def test_a_prompt_broken_off_between_chunks_leaves_a_sound_session(chunked, monkeypatch):
  prompt, warm = [*range(40)], dict(max_new_tokens=4, ignore_eos=True)
  whole = chunked.generate(prompt, **warm).token_ids
  session = chunked.session(256)
  stream, read, chunks = session.stream(prompt, **warm), Programs.read_chunk, []

  def read_and_cancel(self, *arguments):
    stream.cancel()
    chunks.append(arguments[-1])
    return read(self, *arguments)

  with monkeypatch.context() as patch:
    patch.setattr(Programs, "read_chunk", read_and_cancel)
    assert list(stream) == []
  assert (stream.result.finish_reason, len(chunks), session.held) == ("cancelled", 1, 0)
  again = session.stream(prompt, **warm)
  assert "".join(again) == again.result.text
  assert again.result.token_ids == whole
