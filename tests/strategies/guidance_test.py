"""Guidance against two plain models recomputed from scratch, mixed in float64; and as rows of ordinary batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import Letters, V, blocks_of, cache_for, facade, prompts, ragged, rand_lm

import decoder
from decoder.strategies import GuidedCache, guided, read_negative
from decoder.types import NONE

PROMPTS, NEGATIVES, NEW = prompts([3, 9, 5]), prompts([7, 2, 5], seed=1), prompts([6] * 3, seed=2)
SCALES = [1.5, 3.0, 1.0]


@functools.cache
def plain():
  """(tokens of one row) -> float64 logits after each, read at once."""
  network, params = rand_lm()

  @jax.jit
  def logits(tokens_BT, positions_BT, cache):
    features_BTD, _ = network.model.forward(params, tokens_BT, positions_BT, cache)
    return network.model.head(params, features_BTD[0])

  def whole(tokens):
    cache = cache_for(network, 1, 32, blocks_of(7))
    return np.asarray(logits(*ragged([tokens], right=32 - len(tokens)), cache), np.float64)[: len(tokens)]

  return whole


def log_softmax(logits_V):
  shifted = logits_V - logits_V.max()
  return shifted - np.log(np.exp(shifted).sum())


def mixed(prompt, negative, new, scale):
  """The law of the token after prompt + new, from scratch."""
  own, other = (log_softmax(plain()([*start, *new])[-1]) for start in (prompt, negative))
  return other + scale * (own - other)


def law(logits_BV):
  return np.stack([log_softmax(x) for x in np.asarray(logits_BV, np.float64)])


def run(shift=0, chunk=4):
  """Log-probs at each step of NEW. shift: an error added to the second half's positions."""
  network, params = rand_lm()
  model = guided(network.model, network.dtype)
  cache = GuidedCache.around(cache_for(network, 6, 32, blocks_of(7)), 32)
  lengths = jnp.asarray([len(p) for p in NEGATIVES])
  cache = cache.replace(prompt_B=jnp.asarray([len(p) for p in PROMPTS]), scale_B=jnp.asarray(SCALES))
  tokens_BM = np.zeros((3, 8), np.int32)
  for row, ids in enumerate(NEGATIVES):
    tokens_BM[row, : len(ids)] = ids
  for start in range(0, 8, chunk):
    cache = read_negative(network.model, params, cache, tokens_BM[:, start : start + chunk], start, lengths)
  cache = cache.replace(shift_B=cache.shift_B + shift)
  forward, head = jax.jit(model.forward), jax.jit(model.head)
  out = []
  tokens_BT, positions_BT = ragged(PROMPTS, left=2)
  for step in range(7):
    features_BTD, cache = forward(params, tokens_BT, positions_BT, cache)
    out.append(law(head(params, features_BTD[:, -1])))
    if step < 6:
      tokens_BT = jnp.asarray([[row[step]] for row in NEW])
      positions_BT = jnp.asarray([[len(p) + step] for p in PROMPTS])
  return np.stack(out), cache, forward


def wanted():
  rows = list(zip(PROMPTS, NEGATIVES, NEW, SCALES))
  return np.stack([law([mixed(p, n, new[:step], scale) for p, n, new, scale in rows]) for step in range(7)])


def test_law_equals_two_models_mixed_in_float64():
  """Ragged prompts, longer and shorter negative prompts, a scale a row."""
  want = wanted()
  for chunk in (4, 8):
    np.testing.assert_allclose(run(chunk=chunk)[0], want, atol=2e-4)
  for row in (0, 1):
    assert np.abs(want[:, row] - law([plain()([*PROMPTS[row], *NEW[row][:n]])[-1] for n in range(7)])).max() > 0.3


def test_negative_control_a_wrong_shift_is_seen():
  got, want = run(shift=1)[0], wanted()
  assert np.abs(got[2:, :2] - want[2:, :2]).max() > 0.01
  np.testing.assert_allclose(got[:, 2], want[:, 2], atol=2e-4, err_msg="a row of scale 1 has no second half")


def test_truncate_and_insert_keep_both_halves():
  want, cache, forward = run()
  params = rand_lm()[1]
  model = guided(rand_lm()[0].model, jnp.float32)
  fewer = cache.truncate(jnp.asarray([len(p) + 4 for p in PROMPTS]))
  larger = GuidedCache.around(cache_for(rand_lm()[0], 8, 40, blocks_of(7)), 32)
  moved = larger.insert(jnp.asarray([2, 0, 4]), fewer)  # the last is dropped
  tokens = jnp.asarray([[NEW[1][4]], [0], [NEW[0][4]], [0]])
  positions = jnp.asarray([[len(PROMPTS[1]) + 4], [NONE], [len(PROMPTS[0]) + 4], [NONE]])
  features_BTD, _ = forward(params, tokens, positions, moved)
  got = law(model.head(params, features_BTD[:, -1]))
  np.testing.assert_allclose(got[[2, 0]], want[5, :2], atol=1e-5)


@functools.cache
def lm():
  return facade(*rand_lm(), Letters.build())


ASKED = [
  decoder.Settings(guidance_scale=2.0, negative_prompt="SOMETHING_ELSE", max_new_tokens=9, ignore_eos=True),
  decoder.Settings(guidance_scale=3.0, max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True),
  decoder.Settings(max_new_tokens=9, temperature=1.0, seed=4, ignore_eos=True),
  decoder.Settings(guidance_scale=1.5, negative_prompt=[1, 2], max_new_tokens=7, ignore_eos=True),
]
TEXTS = ["ABC", "HELLO[THERE", "Q", "the_quick_brown_fox"]


@pytest.fixture(scope="module")
def alone():
  return [lm().generate(text, each) for text, each in zip(TEXTS, ASKED)]


def test_greedy_text_follows_the_law(alone):
  tokenizer = lm().tokenizer
  prompt, negative = (tokenizer.encode(text) for text in (TEXTS[0], "SOMETHING_ELSE"))
  ids = []
  for token in alone[0].token_ids:
    scores = mixed(prompt, negative, ids, 2.0)[: tokenizer.vocab_size]
    assert scores[token] > scores.max() - 1e-4
    ids.append(token)
  assert alone[0].text != lm().generate(TEXTS[0], max_new_tokens=9, ignore_eos=True).text


def test_without_a_negative_prompt_it_is_the_last_token(alone):
  last = alone[1].prompt_ids[-1:]
  asked = dict(guidance_scale=3.0, max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
  assert lm().generate(TEXTS[1], negative_prompt=list(last), **asked).token_ids == alone[1].token_ids


def test_batch_equals_single_guided_or_not(alone):
  """The third is plain, alone decoded by the plain programs: scale 1 is off."""
  for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
    got = lm().generate([TEXTS[i] for i in order], [ASKED[i] for i in order])
    assert [r.token_ids for r in got] == [alone[i].token_ids for i in order]


def test_streams_and_sessions_equal_generate(alone):
  assert "".join(lm().stream(TEXTS[0], ASKED[0])) == alone[0].text
  session = lm().session()
  for index in (0, 3, 2, 3, 1, 1):  # between guided and plain, and with prompts that share nothing and all
    stream = session.stream(TEXTS[index], ASKED[index])
    assert "".join(stream) == alone[index].text
  longer = [*alone[1].prompt_ids, *alone[1].token_ids, 5, 6]
  before = session.held
  text = "".join(session.stream(longer, ASKED[1]))
  assert before > len(alone[1].prompt_ids)
  assert text == lm().generate(longer, ASKED[1]).text


def test_long_prompts_in_chunks_equal_whole(alone, monkeypatch):
  for name, size in (
    ("decoder.programs.Programs.chunk", 4),
    ("decoder.guided.CHUNK", 4),
    ("decoder.programs.SMALLEST_CHUNK", 2),
  ):
    monkeypatch.setattr(name, size)
  other = facade(*rand_lm(), Letters.build())
  assert [r.token_ids for r in other.generate(TEXTS, ASKED)] == [r.token_ids for r in alone]


def test_a_constraint_masks_what_guidance_says():
  asked = dict(guidance_scale=2.0, negative_prompt="NO", choice=["YES", "NO", "MAYBE"])
  assert lm().generate("ABC", **asked).text in ("YES", "NO", "MAYBE")


def test_a_negative_prompt_takes_its_room():
  long = "A" * 100
  result = lm().generate(
    "ABC", guidance_scale=2.0, negative_prompt=long, max_new_tokens=None, capacity=110, ignore_eos=True
  )
  assert len(result.token_ids) == 110 - 101
  assert (result.finish_reason, result.truncated) == ("length", "context")
  with pytest.raises(ValueError, match="negative prompt has 101 tokens, there is room for 64"):
    lm().generate("ABC", guidance_scale=2.0, negative_prompt=long, capacity=64)


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ({"negative_prompt": "A"}, "does nothing at guidance_scale 1"),
    ({"guidance_scale": -1}, "from 0 to 10"),
    ({"guidance_scale": float("nan")}, "from 0 to 10"),
    ({"guidance_scale": "2"}, "guidance_scale must be a number"),
    ({"guidance_scale": 2.0, "negative_prompt": [V]}, "not an id of this model"),
  ],
)
def test_what_makes_no_sense_is_refused(settings, words):
  with pytest.raises(ValueError, match=words):
    lm().generate("A", **settings)


def test_impossible_tokens_stay_impossible_and_nothing_is_nan():
  """−inf on either side: the difference of two would be NaN."""
  from decoder.strategies.guidance import _push

  own = jnp.asarray([[0.0, -jnp.inf, 0.0, -jnp.inf]])
  other = jnp.asarray([[0.0, 0.0, -jnp.inf, -jnp.inf]])
  pushed = np.asarray(_push(own, other, jnp.asarray([[1.5]])))[0]
  assert np.isneginf(pushed[[1, 3]]).all()
  assert np.isfinite(pushed[[0, 2]]).all()
  assert pushed[2] > pushed[0]
