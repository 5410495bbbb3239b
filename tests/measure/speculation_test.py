"""What is scored when guessing ahead is timed, and that both sides write it."""

import pytest

from decoder.measure.speculation import before_repeating, compare


@pytest.mark.parametrize(
  ("ids", "scored"),
  [
    ([1, 2, 3, 4], 4),
    ([1, 2, 3, 3, 3, 3], 3),
    ([1, 2, 3, 3], 4),  # twice is no circle
    ([9, 1, 2, 1, 2, 1, 2, 1], 3),
    ([9, 1, 2, 1, 2, 1], 6),
    ([5] * 10, 1),
    ([*range(70), *range(70), *range(70)], 210),  # longer than what counts as a circle
    ([*range(60), *range(60), *range(60)], 60),
    ([], 0),
  ],
)
def test_a_text_counts_until_it_goes_in_a_circle(ids, scored):
  assert before_repeating(ids) == scored


class Chat:
  """A façade that notes what it was asked."""

  def __init__(self, lm):
    self._lm, self.asked = lm, []

  def generate(self, prompt, **settings):
    self.asked.append(settings)
    return self._lm.generate(prompt[0]["content"], **settings)


def test_both_sides_write_what_is_scored_in_turn(lm):
  chat, told = Chat(lm), []
  compared = compare(
    chat, [("one", "ABCABCABC"), ("two", "HELLO")], {"speculate": "lookup"}, tokens=30, rounds=2, told=told.append,
    temperature=1.0, seed=3, ignore_eos=True,
  )  # fmt: skip
  assert [one.name for one in compared] == ["one", "two"]
  assert told == compared
  for one in compared:
    assert one.same
    assert one.tokens == 30
    assert len(one.ratios) == 2
    assert one.each >= 1
  kinds = [settings.get("speculate", "off") for settings in chat.asked]
  assert kinds == ["off", "lookup", *["off", "lookup"] * 2] * 2
