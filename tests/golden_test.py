"""The default model computes what transformers computes: replays tests/golden/record.py's values, without torch.

Fetches the model as a user would, unless it is in the user's cache. Greedy ids are those of transformers wherever its
two best logits are more than MARGIN apart; logits, fed with transformers' own ids, differ by at most TOLERANCE.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from default_model import load_or_skip

from decoder import Settings
from decoder.cache import allocate
from decoder.programs import CHUNK, SMALLEST_CHUNK, bucket

pytestmark = pytest.mark.slow  # a real model

GOLDEN = Path(__file__).parent / "golden"
MARGIN, TOLERANCE = 0.01, 2e-3


class Logits(NamedTuple):
  """Of some rows, S logits each: after the prompt and after each greedy id. best_PS: the largest one's id."""

  subset_PSN: np.ndarray
  top_PSN: np.ndarray
  best_PS: np.ndarray


@pytest.fixture(scope="session")
def lm():
  return load_or_skip()


@pytest.fixture(scope="session")
def rows():
  return json.loads((GOLDEN / "greedy_smollm2.json").read_text("utf-8"))["rows"]


@pytest.fixture(scope="session")
def golden():
  with np.load(GOLDEN / "logits_smollm2.npz") as arrays:
    return {name: arrays[name] for name in arrays.files}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def read(model, params, tokens_BT, positions_BT, cache):
  features_BTD, cache = model.forward(params, tokens_BT, positions_BT, cache)
  return model.head(params, features_BTD[:, -1]), cache


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode(network, capacity, params, caches, order, tokens_SP, positions_SP, subset_PN, top_SPN):
  """Puts prefilled rows together in one cache and feeds it the recorded ids, one a step."""
  cache = allocate(network.cache_spec, len(order), capacity)
  first = 0
  for part in caches:
    cache = cache.insert(order[first : first + part.batch], part)
    first += part.batch

  def step(cache, fed):
    token_P, position_P, top_PN = fed
    features_PTD, cache = network.model.forward(params, token_P[:, None], position_P[:, None], cache)
    logits_PV = network.model.head(params, features_PTD[:, 0])
    return cache, (*(jnp.take_along_axis(logits_PV, ids, 1) for ids in (subset_PN, top_PN)), logits_PV.argmax(1))

  _, out = jax.lax.scan(step, cache, (tokens_SP, positions_SP, top_SPN))
  return tuple(jnp.swapaxes(x, 0, 1) for x in out)


def prefill(network, params, prompts):
  """Logits [B, V] after each prompt, and the cache, read in the same chunks as `lm.generate` reads them."""
  longest = max(map(len, prompts))
  size = bucket(min(longest, CHUNK), SMALLEST_CHUNK)
  cache = allocate(network.cache_spec, len(prompts), -(-longest // 256) * 256)
  for chunk in range(-(-longest // size), 0, -1):
    tokens_BT, positions_BT = np.zeros((2, len(prompts), size), np.int32)
    for row, ids in enumerate(prompts):
      positions_BT[row] = np.maximum(np.arange(size) + len(ids) - chunk * size, -1)
      tokens_BT[row] = np.asarray(ids)[np.maximum(positions_BT[row], 0)]
    logits_BV, cache = read(network.model, params, tokens_BT, positions_BT, cache)
  return np.asarray(logits_BV), cache


def picked(logits_PV, golden, chosen):
  """As the first of the S logits."""
  take = np.take_along_axis
  return Logits(
    take(logits_PV, golden["subset_ids"][chosen].astype(int), 1)[:, None],
    take(logits_PV, golden["top_ids"][chosen, 0].astype(int), 1)[:, None],
    logits_PV.argmax(1)[:, None],
  )


def check(found, golden, rows, chosen):
  """The same logits, and the same best id where the margin tells."""
  steps = found.best_PS.shape[1]
  wanted = golden["subset_logits"][chosen, :steps], golden["top_logits"][chosen, :steps]
  differences = [np.abs(found.subset_PSN - wanted[0]), np.abs(found.top_PSN - wanted[1])]
  for name, difference in zip(("random ids", "largest logits"), differences):
    place = np.unravel_index(difference.argmax(), difference.shape)
    assert difference.max() <= TOLERANCE, f"{name}: {difference.max()} at {rows[chosen[place[0]]]['name']}, {place}"
  clear = np.asarray([rows[i]["margins"][:steps] for i in chosen]) > MARGIN
  assert (found.best_PS == golden["top_ids"][chosen, :steps, 0])[clear].all()
  print(
    f"logits differ by {max(difference.max() for difference in differences):.1e}; {clear.mean():.1%} of ids compared"
  )


def agreed(result, row, length=64):
  """How many ids are those of transformers; they may part only where its margin is small."""
  assert len(result.token_ids) == length or result.finish_reason == "stop"
  for step, (ours, theirs) in enumerate(zip(result.token_ids, row["greedy"])):
    if ours != theirs:
      assert row["margins"][step] <= MARGIN, f"{row['name']}, step {step}: {ours} instead of {theirs}"
      return step
  return length


def group(rows, *, long):
  return [i for i, row in enumerate(rows) if (len(row["ids"]) > CHUNK) == long]


@pytest.fixture(scope="session")
def prefilled(lm, rows):
  """Short prompts and long ones: (rows, logits_BV, cache) each."""
  groups = [group(rows, long=False), group(rows, long=True)]
  return [(chosen, *prefill(lm.network, lm.params, [rows[i]["ids"] for i in chosen])) for chosen in groups]


def test_recorded_prompts_are_of_every_kind(rows):
  assert len(rows) >= 12
  assert {len(row["greedy"]) for row in rows} == {64}
  lengths = [len(row["ids"]) for row in rows]
  assert min(lengths) == 1
  assert sum(length >= 600 for length in lengths) >= 2
  assert sum(not isinstance(row["prompt"], str) for row in rows) >= 4


def test_logits_after_the_prompt(prefilled, golden, rows):
  for chosen, logits_PV, _ in prefilled:
    check(picked(logits_PV, golden, chosen), golden, rows, chosen)


def test_logits_of_64_decode_steps(lm, prefilled, golden, rows):
  order = np.concatenate([chosen for chosen, *_ in prefilled])
  lengths = np.asarray([len(row["ids"]) for row in rows])
  found = decode(
    lm.network, -(-(lengths.max() + 64) // 256) * 256, lm.params, [cache for *_, cache in prefilled], order,
    np.asarray([row["greedy"] for row in rows], np.int32).T, (lengths + np.arange(64)[:, None]).astype(np.int32),
    golden["subset_ids"].astype(np.int32), golden["top_ids"].astype(np.int32)[:, 1:].swapaxes(0, 1),
  )  # fmt: skip
  later = {name: golden[name][:, 1:] for name in ("subset_logits", "top_logits", "top_ids")}
  tail = [{**row, "margins": row["margins"][1:]} for row in rows]
  check(Logits(*map(np.asarray, found)), later, tail, np.arange(len(rows)))


def test_negative_control_a_dropped_layer_is_noticed(lm, golden, rows):
  chosen = group(rows, long=False)
  layer = lm.params["layers_15"]
  still = {
    **layer,
    "attention": {**layer["attention"], "o": jax.tree.map(jnp.zeros_like, layer["attention"]["o"])},
    "mlp": {**layer["mlp"], "down": jax.tree.map(jnp.zeros_like, layer["mlp"]["down"])},
  }
  logits_PV, _ = prefill(lm.network, {**lm.params, "layers_15": still}, [rows[i]["ids"] for i in chosen])
  with pytest.raises(AssertionError, match="random ids"):
    check(picked(logits_PV, golden, chosen), golden, rows, chosen)


def test_negative_control_a_wrong_token_is_noticed(rows):
  class Wrong(NamedTuple):
    token_ids: tuple
    finish_reason: str = "length"

  row = rows[3]
  assert agreed(Wrong(tuple(row["greedy"])), row) == 64
  step = int(np.argmax(row["margins"][:64]))
  with pytest.raises(AssertionError, match=f"step {step}"):
    agreed(Wrong(tuple(t + (i == step) for i, t in enumerate(row["greedy"]))), row)


def test_prompts_are_encoded_the_same(lm, rows):
  for row in rows:
    assert list(lm.encode(row["prompt"])) == row["ids"], row["name"]


def test_generate_writes_the_same_in_a_ragged_batch(lm, rows):
  """Texts and conversations of 1 to 60 tokens; the one that transformers ends within 64 ids ends at the same one."""
  names = ("one token", "story", "code", "japanese", "chat ends", "chat", "chat system", "chat turns")
  chosen = [row for row in rows if row["name"] in names]
  settings = [Settings(max_new_tokens=64, ignore_eos=row["name"] != "chat ends") for row in chosen]
  results = lm.generate([row["prompt"] for row in chosen], settings)
  ends = names.index("chat ends")
  end = json.loads((GOLDEN / "greedy_smollm2.json").read_text("utf-8"))["end"]
  assert (results[ends].finish_reason, results[ends].stop_reason) == ("stop", end)
  assert list(results[ends].token_ids) == chosen[ends]["greedy"][: chosen[ends]["greedy"].index(end)]
  same = {row["name"]: agreed(result, row) for result, row in zip(results, chosen)}
  assert sum(same.values()) >= 0.8 * 64 * len(chosen), same


def test_generate_writes_the_same_alone(lm, rows):
  """A conversation of more than one chunk, whose margins are wide at every step."""
  (row,) = [row for row in rows if row["name"] == "long chat"]
  result = lm.generate(row["prompt"], max_new_tokens=64, ignore_eos=True)
  assert agreed(result, row) == 64
