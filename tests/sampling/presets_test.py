"""Presets keep what the libraries keep: transformers by recorded vectors, others by the measured rules of the cases."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import oracle
from sampling.full_chain_test import context_of
from sampling.oracle import Row

from decoder.sampling import SamplingSettings

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "sampling_transformers.npz")
ABOUT = json.loads(str(GOLDEN["about"]))
NAMES = {
  "bad_words_ids": "bad_words",
  "exponential_decay_length_penalty": "length_decay",
  "forced_eos_token_id": "forced_eos",
}


@functools.partial(jax.jit, static_argnums=0)
def _left(update, logits_BV, state, context):
  return jax.vmap(lambda x_V: update(x_V, state, context))(logits_BV)


def left(settings, logits_BV, row):
  chain = SamplingSettings(**settings).chain(True)
  state = jax.tree.map(jnp.asarray, chain.init())
  return np.asarray(_left(chain.update, jnp.asarray(logits_BV, jnp.float32), state, context_of(row)))


def ours(asked):
  """transformers' names in ours; its default is not to be greedy."""
  named = {NAMES.get(name, name): value for name, value in asked.items() if name != "max_length"}
  if "sequence_bias" in named:
    named["sequence_bias"] = {tuple(sequence): number for sequence, number in named["sequence_bias"]}
  return {"temperature": 1.0, "preset": "hf", **named}


def recorded(name, **changes):
  asked = ABOUT["chains"][name]
  tokens = (*ABOUT["prompt"], *ABOUT["said"])
  row = Row(tokens, len(ABOUT["prompt"]), tuple(ABOUT["eos"]), asked.get("max_length", 100))
  return left({**ours(asked), **changes}, GOLDEN["logits"], row), GOLDEN[f"left {name}"]


def differ(got, want):
  """Rows whose kept sets differ, or whose values do beyond a shift, which no law knows of. Where transformers leaves
  NaN (an end that is masked and then raised) there is nothing to compare."""
  wrong = []
  for number, (mine, theirs) in enumerate(zip(got, want)):
    if np.isnan(theirs).any():
      continue
    kept = np.isfinite(theirs)
    shift = (theirs[kept] - mine[kept]).max() if np.array_equal(kept, np.isfinite(mine)) else np.nan
    if not np.allclose(theirs[kept] - mine[kept], shift, rtol=2e-5, atol=2e-5):
      wrong.append(number)
  return wrong


@pytest.mark.parametrize("name", ABOUT["chains"])
def test_hf_keeps_and_leaves_what_transformers_does(name):
  assert differ(*recorded(name)) == []


def test_our_own_rules_are_seen_to_differ_from_transformers():
  """Negative control: ties at the k-th, ties at the nucleus' edge."""
  for name in ("top_k 2", "top_p .5", "typical"):
    assert differ(*recorded(name, preset=None))


def log(*p):
  with np.errstate(divide="ignore"):
    return np.log(np.array(p, np.float64))


def kept(settings, logits, size=16):
  """In one vocabulary for all, so that each preset compiles once."""
  padded = np.full(size, -np.inf)
  padded[: len(logits)] = logits
  row = left({"temperature": 1.0, **settings}, padded[None], Row((1, 2), 1))[0]
  return set(np.nonzero(row > -np.inf)[0].tolist())


ALL = ("hf", "vllm", "llamacpp", "mlx", None)


@pytest.mark.parametrize("preset", ALL)
@pytest.mark.parametrize(
  ("p", "top_p", "want"),
  [
    ((0.5, 0.25, 0.125, 0.125), 0.75, {0, 1}),
    ((0.0625, 0.5, 0.1875, 0.25), 0.5, {1}),
    ((0.25, 0.0625, 0.125, 0.5, 0.0625), 0.875, {0, 2, 3}),
  ],
)
def test_C20_exact_nucleus_boundary(preset, p, top_p, want):
  assert kept({"preset": preset, "top_p": top_p}, log(*p)) == want


@pytest.mark.parametrize(
  ("p", "k", "top_p", "sequential", "joint"),
  [
    ((0.4, 0.3, 0.2, 0.1), 2, 0.57, {0}, {0, 1}),
    ((0.1, 0.3, 0.2, 0.4), 2, 0.55, {3}, {1, 3}),
    ((0.35, 0.3, 0.25, 0.1), 3, 0.7, {0, 1}, {0, 1, 2}),
  ],
)
def test_C21_joint_or_sequential(p, k, top_p, sequential, joint):
  for preset in ALL:
    assert kept({"preset": preset, "top_k": k, "top_p": top_p}, log(*p)) == (joint if preset == "mlx" else sequential)


@pytest.mark.parametrize(
  ("p", "k", "tied", "exact"),
  [
    ((0.4, 0.2, 0.2, 0.2), 2, {0, 1, 2, 3}, {0, 1}),
    ((0.125, 0.125, 0.5, 0.125, 0.125), 3, {0, 1, 2, 3, 4}, {0, 1, 2}),
    ((0.25, 0.25, 0.25, 0.125, 0.125), 4, {0, 1, 2, 3, 4}, {0, 1, 2, 3}),
  ],
)
def test_C22_ties_at_the_kth(p, k, tied, exact):
  for preset in ALL:
    assert kept({"preset": preset, "top_k": k}, log(*p)) == (tied if preset in ("hf", "vllm") else exact)


@pytest.mark.parametrize(
  ("p", "top_p", "high", "low", "every"),
  [
    ((0.4, 0.2, 0.2, 0.2), 0.5, {0, 3}, {0, 1}, {0, 1, 2, 3}),
    ((0.125, 0.5, 0.125, 0.125, 0.125), 0.75, {1, 3, 4}, {0, 1, 2}, {0, 1, 2, 3, 4}),
    ((0.25, 0.25, 0.25, 0.25), 0.25, {3}, {0}, {0, 1, 2, 3}),
  ],
)
def test_C23_ties_at_the_nucleus_edge(p, top_p, high, low, every):
  rule = {"hf": high, "vllm": high, "mlx": every, "llamacpp": low, None: low}
  for preset, want in rule.items():
    assert kept({"preset": preset, "top_p": top_p}, log(*p)) == want


@pytest.mark.parametrize(("size", "k"), [(3, 10), (2, 3), (16, 10**6)])
def test_C24_top_k_beyond_the_vocabulary(size, k):
  for preset in ALL:
    assert kept({"preset": preset, "top_k": k}, np.arange(size) / 10) == set(range(size))


@pytest.mark.parametrize("p", [(0.25, 0.5, 0.25), (0.1, 0.2, 0.3, 0.4), (0.625, 0.375)])
def test_C25_top_p_of_zero(p):
  best = {int(np.argmax(p))}
  for preset, want in (("hf", best), ("llamacpp", best), ("mlx", set(range(len(p))))):
    assert kept({"preset": preset, "top_p": 0}, log(*p)) == want
  with pytest.raises(ValueError, match="temperature=0"):
    SamplingSettings(top_p=0)


@pytest.mark.parametrize(
  ("settings", "p", "first", "last"),
  [
    ({"top_p": 0.9}, (0.5, 0.3, 0.15, 0.05), {0, 1, 2, 3}, {0, 1, 2}),
    ({"min_p": 0.2}, (0.6, 0.25, 0.1, 0.05), {0, 1, 2, 3}, {0, 1}),
    ({"top_p": 0.8}, (0.1, 0.7, 0.15, 0.05), {0, 1, 2}, {1, 2}),
    ({"min_p": 0.3}, (0.5, 0.1, 0.4), {0, 1, 2}, {0, 2}),
  ],
)
def test_C26_temperature_first_or_last(settings, p, first, last):
  for preset in ALL:
    want = last if preset in ("llamacpp", "mlx") else first
    assert kept({"preset": preset, "temperature": 2.0, **settings}, log(*p)) == want
  turned = ("repetition", "min_p", "top_p", "top_k", "temperature")
  assert kept({"order": turned, "temperature": 2.0, **settings}, log(*p)) == last


RULES = [
  ("hf", "top_k", 5, "top_k_with_ties"), ("vllm", "top_k", 5, "top_k_with_ties"), ("mlx", "top_k", 5, "top_k"),
  ("hf", "top_p", 0.6, "top_p_from_below"), ("vllm", "top_p", 0.6, "top_p_from_below"),
  ("mlx", "top_p", 0.6, "top_p_with_ties"), ("llamacpp", "top_p", 0.6, "top_p"),
  ("hf", "typical_p", 0.5, "typical_with_ties"), ("llamacpp", "typical_p", 0.5, "typical_beyond"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "setting", "value", "rule"), RULES)
def test_rules_equal_their_oracles(preset, setting, value, rule):
  rng = np.random.default_rng(0)
  for number in range(40):
    logits = rng.normal(size=16)
    logits = np.round(logits * 2) / 2 if number % 2 else logits
    must, may = oracle.bounds(rule, value, logits)
    assert must <= kept({"preset": preset, setting: value}, logits) <= may


def test_a_window_is_the_preset_s_own_unless_one_is_named():
  row, logits = Row(tuple([1] + [2] * 15 + [0] * 6), 3), np.linspace(0.5, 2, 16)[None]
  row = row._replace(tokens=(*row.tokens, 0, 0))
  for preset, scope in (("hf", "all"), ("vllm", "all"), ("llamacpp", 64), ("mlx", 20), (None, "all")):
    got = left({"temperature": 1.0, "preset": preset, "repetition_penalty": 2.0}, logits, row)[0]
    want = oracle.apply("repetition", (2.0, scope), logits[0], row)
    np.testing.assert_allclose(got - got.max(), want - want.max(), atol=1e-5)
  ask = {"temperature": 1.0, "repetition_penalty": 2.0}
  ours, mlx, named = (
    left({**ask, **more}, logits, row)[0]
    for more in ({}, {"preset": "mlx"}, {"preset": "mlx", "repetition_scope": "all"})
  )
  np.testing.assert_allclose(named, ours, atol=1e-5)
  assert not np.allclose(named, mlx)


def test_vllm_clamps_a_very_small_temperature_and_says_so():
  logits = np.array([[0.0, 0.02, 0.01] + [-9.0] * 13])
  got = left({"preset": "vllm", "temperature": 0.001}, logits, Row((1,), 1))
  np.testing.assert_allclose(got[0, :3], [-2, 0, -1], atol=1e-4)
  greedy = left({"preset": "vllm", "temperature": 0.000001}, logits, Row((1,), 1))
  assert np.nonzero(greedy[0] > -np.inf)[0].tolist() == [1]
  chain = SamplingSettings(preset="vllm", temperature=0.001).describe_chain()
  assert [link["name"] for link in chain] == ["temperature_clamped"]


@pytest.mark.parametrize(
  ("asked", "named"),
  [
    (dict(preset="hf", dry_multiplier=1.0), "preset 'hf' .*dry_multiplier"),
    (dict(preset="vllm", typical_p=0.5), "preset 'vllm' .*typical_p"),
    (dict(preset="mlx", no_repeat_ngram_size=2), "preset 'mlx' .*no_repeat_ngram_size"),
    (dict(preset="transformers"), "preset must be one of 'hf'"),
    (dict(order=("temprature",)), "did you mean 'temperature'"),
    (dict(order=("temperature", "top_k", "top_k_with_ties")), "order obeys top_k twice"),
    (dict(order=("temperature",), top_k=5), "order has no transform for top_k"),
    (dict(order=("temperature",), preset="hf"), "order and preset"),
  ],
)
def test_orders_that_make_no_sense(asked, named):
  with pytest.raises(ValueError, match=named):
    SamplingSettings(**asked)
