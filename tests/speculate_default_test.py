"""The registered model guesses ahead: at temperature 0 the text is plain decoding's, on fifty prompts."""

import json
from pathlib import Path

import pytest
from default_model import load_or_skip

PROMPTS = Path(__file__).parents[1] / "scripts" / "prompts"
TEXTS = [
  json.loads(line)["prompt"]
  for name in ("copy_edit", "chat")
  for line in (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
]
NEW, CLEAR = 32, 1e-3  # tokens; log-probs whose difference a block's rounding may make up
DRAFTERS = {"lookup": ("lookup", ()), "head": ("head", ()), "tree": ("head", (3, 2, 2)), "draft": ("draft:", ())}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def default():
  return load_or_skip()


@pytest.fixture(scope="module")
def plain(default):
  assert len(TEXTS) == 50
  asked = [[{"role": "user", "content": text}] for text in TEXTS]
  return [
    one
    for start in range(0, 50, 10)
    for one in default.generate(asked[start : start + 10], max_new_tokens=NEW, logprobs=2)
  ]


def sure(result):
  """How many tokens come before the first whose rival is nearly as probable."""
  for number, token in enumerate(result.logprobs):
    rival = max(one.logprob for one in token.alternatives if one.id != token.id)
    if token.logprob - rival <= CLEAR:
      return number
  return len(result.token_ids)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_is_plain_decodings(default, plain, kind, rows):
  """A draft model here is the model itself, in the bits of its file; it guesses as if that cost nothing."""
  speculate, tree = DRAFTERS[kind]
  if speculate == "draft:":
    speculate += default.name
    default._drafters[speculate] = default.drafter(speculate)._replace(each=0.0)
  some = plain[::5] if kind == "draft" and rows == 1 else plain
  compared = kept = 0
  for start in range(0, len(some), rows):
    wanted = some[start : start + rows]
    ids = [list(one.prompt_ids) for one in wanted]
    for got, want in zip(default.generate(ids, max_new_tokens=NEW, speculate=speculate, draft_tree=tree), wanted):
      assert got.token_ids[: sure(want)] == want.token_ids[: sure(want)]
      compared, kept = compared + sure(want), kept + got.speculated.accepted
  assert compared > 0.9 * sum(len(one.token_ids) for one in some)
  assert kept > 0.2 * compared, "guesses were made, and kept"
