"""Guessing ahead under constraints: the same texts as without, which end where the grammar ends, in fewer steps."""

import dataclasses
import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from compiled_test import Compilations
from constrained_test import noted, pairs_lm
from fixtures import Letters, facade, rand_lm, table_lm

from decoder import Settings, constrained, speculating
from decoder.ops.kernels import build
from decoder.strategies import Drafts, Proposer
from decoder.text.constraints import Constraint

WARM = dict(temperature=1.0, max_new_tokens=120)
COLD = dict(max_new_tokens=120)
ROW = {"type": "object", "properties": {"yes": {"enum": [True, None]}}, "required": ["yes"]} | {
  "additionalProperties": False
}
ROWS = {"type": "array", "items": ROW, "minItems": 3, "maxItems": 6}
COMPACT = ROWS | {"x-guidance": {"whitespace_flexible": False}}
ASKED = [
  Settings(json_schema=COMPACT, seed=1, **WARM),
  Settings(seed=2, temperature=1.0, max_new_tokens=30, ignore_eos=True),
  Settings(regex=r"(\[(yes|ab)\]\n\n){4,9}", seed=3, **WARM),
  Settings(grammar='start: "(" start ")" | "[" /(ab){3,7}/ "]"', seed=4, top_k=3, repetition_penalty=1.1, **WARM),
  Settings(json_schema=COMPACT, **COLD),
  Settings(max_new_tokens=30, ignore_eos=True, allowed_tokens=[5, 6]),
  Settings(choice=["yes yes yes yes no", "no"], seed=6, **WARM),
]
PROMPTS = [[1], [2, 3, 4, 2, 3, 4, 2, 3], [3, 3], [4] * 20, [5, 6, 7], [8, 8, 8], [9] * 5]
BOTH = pytest.mark.parametrize("way", ["one call", pytest.param("two calls", marks=pytest.mark.slow)])


def ahead(settings, size=3):
  return dataclasses.replace(settings, speculate="lookup", draft_tokens=size)


@functools.cache
def plain():
  return pairs_lm().generate(PROMPTS, ASKED)


@pytest.fixture
def take(monkeypatch):
  """Sees to it that steps are made in one way, or skips."""

  def taking(way):
    if way == "two calls":
      monkeypatch.setattr(constrained, "build", SimpleNamespace(ready=lambda: False))
    elif not build.ready():
      pytest.skip("no C++ compiler is on the PATH here")

  return taking


def same(got, want):
  assert [(r.text, r.token_ids, r.finish_reason, r.stop_reason, r.truncated) for r in got] == [
    (r.text, r.token_ids, r.finish_reason, r.stop_reason, r.truncated) for r in want
  ]


def guess(lm, function):
  """Puts `function`, (context_L, length, size) -> (tokens_K, count), in lookup's place; for a façade not used yet."""

  def propose(params, state, size):
    tokens_BK, count_B = jax.vmap(lambda *row: function(*row, size))(state.context_BL, state.length_B)
    return state, Drafts(tokens_BK.astype(jnp.int32), count_B.astype(jnp.int32))

  proposer = Proposer(lambda: (), propose, lambda memory, drafted, accepted: memory)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(speculating, "lookup", lambda **_: proposer)
    lm.programs([Settings(speculate="lookup", draft_tokens=3)])
  return lm


@pytest.mark.slow
@BOTH
def test_texts_of_a_ragged_batch_are_those_without_guesses(way, take):
  take(way)
  for order, size in (([0, 1, 2, 3, 4, 5, 6], 3), ([6, 2, 5, 0], 7)):
    got = pairs_lm().generate([PROMPTS[i] for i in order], [ahead(ASKED[i], size) for i in order])
    same(got, [plain()[i] for i in order])
    for result in got:
      if result.settings.json_schema:
        jsonschema.validate(json.loads(result.text), ROWS)
    told = [result.speculated for result in got]
    assert sum(one.accepted for one in told) > 10
    assert sum(one.drafted - one.accepted for one in told) > 3


@pytest.mark.slow
@pytest.mark.skipif(not build.ready(), reason="no C++ compiler is on the PATH here")
def test_one_call_makes_many_steps(monkeypatch):
  made = []
  for kind in (constrained.Constrained, constrained.Asked):
    monkeypatch.setattr(kind, "loop", noted(kind.loop, kind.__name__, made))
  same(pairs_lm().generate(PROMPTS, [ahead(settings) for settings in ASKED]), plain())
  assert set(made) == {"Asked"}
  assert len(made) <= 3


@BOTH
def test_masks_of_the_wrong_place_are_found_out(way, take, monkeypatch):
  """Negative control: the mask of each guess stands one place too far."""
  take(way)
  really = Constraint.masks
  monkeypatch.setattr(Constraint, "masks", lambda self, guesses: np.roll(really(self, guesses), 1, axis=0))
  with pytest.raises(AssertionError):
    same(pairs_lm().generate(PROMPTS, [ahead(settings) for settings in ASKED]), plain())


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_it_ends_where_the_grammar_ends(way, seed, take):
  """Guesses reach past the end: what repeats stops, must stop, or may."""
  take(way)
  for regex in ("a{12}", "a{3,12}", "(ab){1,9}a", "b?a{9}"):
    asked = Settings(regex=regex, seed=seed, **WARM)
    got = pairs_lm().generate([1, 2], ahead(asked))
    same([got], [pairs_lm().generate([1, 2], asked)])
    assert re.fullmatch(regex, got.text)
    assert got.finish_reason == "stop"
  assert pairs_lm().generate([1, 2], ahead(Settings(regex="a{12}", **WARM))).speculated.steps < 9


def always(token, count=3):
  return lambda context_L, length, size: (jnp.full(size, token), jnp.int32(count))


def likely(chance=0.9):
  """A after everything, nearly always."""
  return facade(*table_lm(np.tile([chance] + [(1 - chance) / 61] * 61, (62, 1))), Letters.build())


@BOTH
@pytest.mark.parametrize("settings", [dict(max_new_tokens=30), dict(max_new_tokens=30, temperature=1.0, seed=3)])
def test_guesses_that_the_grammar_forbids_are_never_kept(way, settings, take):
  """A is what the model would write, and what is always guessed."""
  take(way)
  lm = guess(likely(), always(0))
  free = lm.generate("B", ignore_eos=True, **settings, speculate="lookup", draft_tokens=3)
  assert free.speculated.accepted > 10, "negative control: without the grammar they are kept"
  bound = lm.generate("B", regex="[B-F]{30}", **settings, speculate="lookup", draft_tokens=3)
  assert (bound.speculated.accepted, bound.speculated.drafted > 20) == (0, True)
  same([bound], [likely().generate("B", regex="[B-F]{30}", **settings)])
  # Allowed at each second place only.
  other = lm.generate("B", regex="(A[B-F]){15}", **settings, speculate="lookup", draft_tokens=3)
  same([other], [likely().generate("B", regex="(A[B-F]){15}", **settings)])
  assert 10 < other.speculated.accepted <= 15


@BOTH
def test_a_guess_that_leads_nowhere_leaves_the_text_as_it_is(way, take):
  """Letters has no digits: after B nothing can follow, and B is always guessed. Who draws it ends, as without."""
  take(way)
  chances = np.tile([0.4, 0.2, 0.4] + [1e-4] * 59, (62, 1))
  lm, seen = guess(facade(*table_lm(chances), Letters.build()), always(1)), set()
  without = facade(*table_lm(chances), Letters.build())
  asked = [Settings(regex="A{3,9}(B[0-9]|C)", seed=seed, **WARM) for seed in range(12)]
  for got, want in zip(lm.generate(["AB"] * 12, [ahead(one) for one in asked]), without.generate(["AB"] * 12, asked)):
    same([got], [want])
    seen.add((got.finish_reason, got.stop_reason))
  assert seen == {("stop", None), ("error", "no token of the vocabulary can follow")}


@BOTH
def test_stop_strings_and_lengths_within_a_block(way, take):
  take(way)
  base = dict(regex="(abba){30}", temperature=1.0, seed=5)
  for more in (
    dict(stop=["bbaa"]),
    dict(stop=["baab"], include_stop=True),
    *(dict(max_new_tokens=n) for n in (4, 5, 6, 9)),
  ):
    asked = Settings(**base, **more)
    got = pairs_lm().generate([1, 2, 3], ahead(asked))
    same([got], [pairs_lm().generate([1, 2, 3], asked)])
    assert len(got.token_ids) <= asked.max_new_tokens


@pytest.mark.slow
@BOTH
def test_samples_and_what_is_told_of_their_tokens(way, take):
  take(way)
  lm, asked, three = pairs_lm(), ASKED[0], dict(n=3, logprobs=2, explain=True)
  for got, want in zip(lm.generate([1], ahead(asked), **three), lm.generate([1], asked, **three)):
    same([got], [want])
    assert [one.logprob for one in got.logprobs] == pytest.approx([one.logprob for one in want.logprobs], abs=1e-4)
    assert [one.kept for one in got.explanation] == [one.kept for one in want.explanation]


@BOTH
def test_streams_and_sessions_go_on_from_what_was_kept(way, take):
  """With a model whose logits depend on all that its cache holds."""
  take(way)
  lm, bound = facade(*rand_lm(), Letters.build()), dict(regex="([AB]C){12}D{9}", temperature=1.0, max_new_tokens=40)
  session, said = lm.session(capacity=256), [1, 2, 3]
  for seed in range(4):
    got = session.stream(said, seed=seed, speculate="lookup", draft_tokens=3, **bound)
    assert "".join(got) == got.result.text == lm.generate(said, seed=seed, **bound).text
    assert got.result.speculated.accepted > 0
    said = [*said, *got.result.token_ids, 9]


@BOTH
def test_nothing_recompiles_while_acceptance_varies(way, take):
  take(way)
  lm, asked = pairs_lm(), [ahead(settings) for settings in ASKED[:4]]
  lm.generate(PROMPTS[:4], asked)
  kept = set()
  with Compilations() as compiled:
    for seed in range(4):
      got = lm.generate(PROMPTS[:4], [dataclasses.replace(settings, seed=seed) for settings in asked])
      kept.add(tuple(result.speculated.accepted for result in got))
  assert len(kept) > 1
  assert compiled.count == 0
