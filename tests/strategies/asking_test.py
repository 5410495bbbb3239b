"""What a host is told while a program runs, and that draws obey what it answers, step by step or in one call."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import V, begin, rand_lm
from strategies.speculative_test import (
  CHAINS,
  GUESSED,
  LIMITS,
  ROWS,
  SEEDS,
  SIZE,
  knowing,
  proposer,
  whole_texts,
  wrong,
)

from decoder.ops.kernels import build
from decoder.ops.kernels.channel import Channel, over
from decoder.strategies import (
  announced,
  answered,
  asking,
  autoregressive,
  drafting,
  lookup,
  run,
  speculative,
  told_width,
)

NEEDS_COMPILER = pytest.mark.skipif(not build.ready(), reason="no C++ compiler is on the PATH here")


def allowed_after(text):
  """A rule of what may follow a text: some dozen ids, by its length and last token."""
  return np.random.default_rng([len(text), text[-1]]).random(V) < 0.2


def masks_after(text, guesses):
  """After the text, and after each guess, right or wrong: [guesses + 1, V]."""
  return np.stack([allowed_after([*text, *guesses[:count]]) for count in range(len(guesses) + 1)])


@functools.cache
def bound_texts(name):
  """What plain decoding writes under the rule."""
  network, params = rand_lm()
  strategy = autoregressive(network.model, CHAINS[name])
  forward, draw = jax.jit(strategy.forward), jax.jit(strategy.draw)
  state, texts = begin(network, ROWS, LIMITS, seeds=SEEDS, transforms=CHAINS[name]), [list(row) for row in ROWS]
  while (np.asarray(state.finish_B) == 0).any():
    state, logits_BV = forward(params, state)
    state, emission = draw(state, logits_BV, np.stack([allowed_after(text) for text in texts]))
    hear(texts, emission)
  return [text[len(row) :] for text, row in zip(texts, ROWS)]


def hear(texts, emission):
  for text, tokens, count in zip(texts, np.asarray(emission.tokens_BN), emission.count_B):
    text += tokens[: int(count)].tolist()


def begun(name, guesses):
  """After the first token: the parameters, the state, the texts, and what goes on. guesses: None for none."""
  network, params = rand_lm()
  link = CHAINS[name] if guesses is None else drafting(CHAINS[name], guesses.init)
  first = autoregressive(network.model, link)
  further = first if guesses is None else speculative(network.model, CHAINS[name], guesses, SIZE)
  state, texts = begin(network, ROWS, LIMITS, seeds=SEEDS, transforms=link), [list(row) for row in ROWS]
  state, logits_BV = jax.jit(first.forward)(params, state)
  state, emission = jax.jit(first.draw)(state, logits_BV, np.stack([allowed_after(text) for text in texts]))
  hear(texts, emission)
  return params, state, texts, further


def step_by_step(name, guesses, shift=0):
  """The final state and the texts; shift: how many places too far the masks are given."""
  params, state, texts, further = begun(name, guesses)
  forward, draw = jax.jit(further.forward), jax.jit(further.draw)
  while (np.asarray(state.finish_B) == 0).any():
    state, logits_BJV = forward(params, state)
    guessed_BK = np.asarray(state.tokens_BT[:, 1:]).tolist()
    allowed_BJV = np.stack([masks_after(text, row) for text, row in zip(texts, guessed_BK)])
    state, emission = draw(state, logits_BJV, np.roll(allowed_BJV, shift, axis=1))
    hear(texts, emission)
  return state, [text[len(row) :] for text, row in zip(texts, ROWS)]


def proposers(name):
  known = functools.partial(knowing, whole_texts(bound_texts(name)))
  return {"wrong": proposer(wrong), "lookup": lookup(1), "right": known(4), "half right": known(2)}


@pytest.mark.parametrize(("guesses", "name"), GUESSED)
def test_the_text_is_plain_decodings_under_the_same_masks(name, guesses):
  state, got = step_by_step(name, proposers(name)[guesses])
  assert got == bound_texts(name)
  kept = np.asarray(state.settings.accepted) / np.asarray(state.settings.drafted).clip(1)
  assert (kept == 1).all() if guesses == "right" else (kept < 1).all()


def test_masks_one_place_too_far_are_found_out():
  """Negative control."""
  _, got = step_by_step("sampled", proposers("sampled")["right"], shift=1)
  assert got != bound_texts("sampled")


@pytest.mark.slow
def test_guesses_that_are_forbidden_are_never_kept():
  """One token is always guessed, and is what the model wants: it is kept up to the mask that forbids it."""
  forbidden = proposer(lambda context_L, length, size: (jnp.full(size, 63), jnp.int32(size)))
  network, params = rand_lm()
  further = speculative(network.model, CHAINS["greedy"], forbidden, SIZE)
  state = begin(network, ROWS, LIMITS, seeds=SEEDS, transforms=drafting(CHAINS["greedy"], forbidden.init))
  state, _ = autoregressive(network.model, drafting(CHAINS["greedy"], forbidden.init)).step(params, state)
  state, judgement = further.forward(params, state)
  wants = judgement._replace(raw_BJV=judgement.raw_BJV.at[..., 63].set(1e3))
  allowed_BJV = jnp.ones(judgement.raw_BJV.shape, bool)
  _, free = further.draw(state, wants, allowed_BJV)
  assert (np.asarray(free.count_B) == SIZE + 1).all(), "negative control"
  for place in range(SIZE):
    _, bound = further.draw(state, wants, allowed_BJV.at[:, place, 63].set(False))
    assert (np.asarray(bound.count_B) == place + 1).all()
    assert (np.asarray(bound.tokens_BN[:, place]) != 63).all()


@NEEDS_COMPILER
@pytest.mark.parametrize("guesses", ["wrong", "right", "half right", "none"])
def test_a_host_that_hears_writes_the_same_text_in_one_call(guesses):
  """All that is drawn is told, in order, and each guess after it."""
  want, guessing = bound_texts("sampled"), proposers("sampled").get(guesses)
  block = 1 if guessing is None else SIZE + 1
  params, state, texts, further = begun("sampled", guessing)

  def strategy(number):
    if guessing is None:
      return asking(further, number, unpack)
    told = announced(guessing, number)
    return answered(speculative(rand_lm()[0].model, CHAINS["sampled"], told, SIZE), number, unpack)

  def whole(params, state, number):
    done, emission = run(strategy(number), params, state, 40, 40 * block)
    return done, over(number, emission.count_B)

  program = jax.jit(whole)
  with Channel() as channel, concurrent.futures.ThreadPoolExecutor(1) as other:
    running = other.submit(lambda: jax.block_until_ready(program(params, state, np.int32(channel.number))))
    try:
      while (told := channel.hear(len(ROWS), told_width(block), running.done)) is not None:
        channel.answer(*answer_to(told, texts, block))
    finally:
      channel.close()
    done, _ = running.result()
  whole_BL, length_B = np.asarray(done.context_BL), np.asarray(done.length_B)
  assert [whole_BL[row, len(ROWS[row]) : length_B[row]].tolist() for row in range(len(ROWS))] == want
  for text, row, wanted in zip(texts, ROWS, want):
    written = text[len(row) :]
    assert written == wanted[: len(written)]
    assert len(wanted) - len(written) <= block, "but for the last step's, after which nothing is asked"


def answer_to(told, texts, block):
  """Masks as words, by the texts, which are extended by what was told."""
  allowed_BJV = np.ones((len(texts), block, V), bool)
  for row, text in enumerate(texts):
    there = told.positions_BT[row] >= 0
    tokens, positions = told.tokens_BT[row][there].tolist(), told.positions_BT[row][there].tolist()
    assert positions == sorted(positions)
    new = [token for token, position in zip(tokens, positions) if len(text) <= position < told.length_B[row]]
    if there.any():
      text += new
      assert len(text) == told.length_B[row]
      guessed = [token for token, position in zip(tokens, positions) if position >= len(text)]
      allowed_BJV[row, : len(guessed) + 1] = masks_after(text, guessed)
  masks = np.packbits(allowed_BJV, axis=-1, bitorder="little").view(np.uint32)
  return masks, np.zeros(len(texts), np.int8)


def unpack(masks):
  bits = masks[..., None] >> jnp.arange(32, dtype=jnp.uint32).reshape([1] * masks.ndim + [32])
  return (bits & 1).astype(bool).reshape(*masks.shape[:-1], -1)
