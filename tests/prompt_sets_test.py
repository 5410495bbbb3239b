"""The prompts in scripts/prompts: whole, without repeats, and what is held out kept apart from what is trained on."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parents[1] / "scripts" / "prompts"
COUNTS = {"copy_edit": 20, "free": 20, "chat": 30}
RUN = 8  # words in a row that would make a prompt recognisable


def read(name: str) -> list[dict]:
  return [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def words(text: str) -> tuple[str, ...]:
  return tuple(re.findall(r"[\w']+", text.lower()))


def runs(sequence: tuple[str, ...], length: int) -> set[tuple[str, ...]]:
  return {sequence[i : i + length] for i in range(len(sequence) - length + 1)}


def repeats(texts: list[str]) -> list[tuple[str, ...]]:
  """Texts that occur twice, whatever their case and punctuation."""
  return [text for text, count in Counter(map(words, texts)).items() if count > 1]


def leaks(held_out: list[str], seeds: dict) -> list[str]:
  """Held-out prompts that share `RUN` words in a row with a filled template, or that name a topic."""
  slots = [tuple(map(words, template.split("{topic}"))) for template in seeds["templates"]]
  topics = [words(topic) for topic in seeds["topics"]]
  filled = {before + topic + after for before, after in slots for topic in topics}
  seen = {run for sequence in filled for run in runs(sequence, RUN)}
  lengths = {len(topic) for topic in topics}
  found = []
  for prompt in held_out:
    sequence = words(prompt)
    named = set(topics) & {run for length in lengths for run in runs(sequence, length)}
    if named or runs(sequence, RUN) & seen:
      found.append(prompt)
  return found


@pytest.fixture(scope="module")
def seeds() -> dict:
  return json.loads((PROMPTS / "seeds.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def held_out() -> list[str]:
  return [row["prompt"] for name in COUNTS for row in read(name)]


@pytest.mark.parametrize("name", COUNTS)
def test_held_out_files_are_whole(name):
  rows = read(name)
  fields = {"name", "kind", "prompt"} if name == "copy_edit" else {"name", "prompt"}
  assert len(rows) == COUNTS[name]
  assert all(row.keys() == fields for row in rows)
  assert all(isinstance(text, str) and text and text == text.strip() for row in rows for text in row.values())


def test_no_name_or_text_occurs_twice(held_out, seeds):
  names = [row["name"] for name in COUNTS for row in read(name)]
  assert len(set(names)) == len(names)
  for texts in (held_out, seeds["templates"], seeds["topics"]):
    assert not repeats(texts)
  assert repeats([*held_out, held_out[0].upper() + "!"]) == [words(held_out[0])], "negative control"


def test_copies_repeat_a_passage():
  rows = read("copy_edit")
  assert Counter(row["kind"] for row in rows) == {"typos": 7, "rename": 7, "quote": 6}
  for row in rows:
    instruction, passage = row["prompt"].split("\n\n", 1)
    lines = [line for line in passage.splitlines() if not line.startswith("```")]
    assert len(words(instruction)) <= 25, row["name"]
    if "```" in passage:
      assert 10 <= len(lines) <= 25, row["name"]
    else:
      assert 80 <= len(passage.split()) <= 200, row["name"]


def test_renames_have_a_name_to_replace_and_a_free_one():
  for row in read("copy_edit"):
    if row["kind"] != "rename":
      continue
    instruction, code = row["prompt"].split("\n\n", 1)
    old, new = re.search(r"the (?:variable|attribute) (\w+) to (\w+)", instruction).groups()
    assert len(re.findall(rf"\b{old}\b", code)) >= 3, row["name"]
    assert not re.findall(rf"\b{new}\b", code), row["name"]


def test_seeds_fill(seeds):
  assert seeds.keys() == {"templates", "topics"}
  assert len(seeds["templates"]) >= 120
  assert len(seeds["topics"]) >= 400
  for template in seeds["templates"]:
    assert template.count("{topic}") == 1, template
    assert template.format(topic="tea") == template.replace("{topic}", "tea")
  for topic in seeds["topics"]:
    assert topic == topic.strip(), topic
    assert 1 <= len(words(topic)) <= 6, topic
    assert not set(topic) & set('"{}\\\n.:;?!'), f"{topic} is put between quotes and into code"


def test_nothing_held_out_is_trained_on(held_out, seeds):
  assert leaks(held_out, seeds) == []


@pytest.mark.parametrize(
  ("prompt", "caught"),
  [
    ("explain black holes, in simple words", True),
    ("Hm: write a story about two old friends who quarrel", True),
    ("Hm: write a story about two old friends that quarrel", False),
    ("Nothing here but dark matter, I fear", True),
    ("Good day", False),
  ],
)
def test_leaks_are_found(prompt, caught):
  """A filled template, a topic, and eight words in a row, not seven."""
  few = {
    "templates": [
      "Explain {topic} in simple words.",
      "Write a story about two old friends who disagree about {topic}.",
    ],
    "topics": ["black holes", "dark matter"],
  }
  assert leaks([prompt], few) == ([prompt] if caught else [])
