"""Laws of encoder–decoders: cached = recomputed, a row = itself in a batch, beams and chosen rows share a source."""

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import few
from sources import CONFIGS, V, padded, sources, tiny

from decoder.cache import CROSS, allocate
from decoder.models import registry
from decoder.models.seq2seq import Sinusoid

WRITTEN = sources(10, 10, seed=5)


def encoded(name, rows, width=16, capacity=32):
  network, params = tiny(name)
  cache = allocate(network.cache_spec, len(rows), capacity, source=width)
  return network.encode(params, *padded(rows, width), cache)


def logits(name, cache, tokens, positions):
  network, params = tiny(name)
  features_BTD, cache = network.model.forward(params, jnp.asarray(tokens), jnp.asarray(positions), cache)
  logits_RV = network.model.head(params, features_BTD.reshape(-1, features_BTD.shape[-1]))
  return np.asarray(logits_RV).reshape(*features_BTD.shape[:2], V), cache


def at(start, end, rows=2):
  return np.broadcast_to(np.arange(start, end, dtype=np.int32), (rows, end - start))


@pytest.mark.parametrize("name", few(["flan", "bart", "t5", "marian", "nllb"], 2))
def test_cached_is_recomputed_and_a_row_is_itself_in_a_batch(name):
  rows, written = sources(13, 6), np.array(WRITTEN, np.int32)
  cache = encoded(name, rows)
  parts = []
  for start, end in ((0, 4), (4, 5), (5, 9), (9, 10)):
    part, cache = logits(name, cache, written[:, start:end], at(start, end))
    parts.append(part)
  got = np.concatenate(parts, axis=1)
  for row in range(2):
    want, _ = logits(name, encoded(name, rows[row : row + 1], width=32), written[row : row + 1], at(0, 10, 1))
    np.testing.assert_allclose(got[row], want[0], atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_read_matters_and_its_order_too(name):
  """Negative control of all comparisons: another source, and the same turned round, give other logits."""
  (source,) = sources(13)
  wants = [
    logits(name, encoded(name, [one]), [WRITTEN[0]], at(0, 10, 1))[0] for one in (source, source[::-1], source[:-1])
  ]
  assert np.abs(wants[0] - wants[1]).max() > 1e-2
  assert np.abs(wants[0] - wants[2]).max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_of_a_source_leaves_no_trace(name):
  (source,) = sources(9)
  network, params = tiny(name)
  tokens_BS, positions_BS = padded([source])
  noisy_BS = jnp.where(positions_BS < 0, 7, tokens_BS)
  caches = [
    network.encode(params, tokens, positions_BS, allocate(network.cache_spec, 1, 16, source=16))
    for tokens in (tokens_BS, noisy_BS)
  ]
  one, other = (logits(name, cache, [WRITTEN[0]], at(0, 10, 1))[0] for cache in caches)
  np.testing.assert_array_equal(one, other)


def test_chosen_rows_share_what_was_read_and_nothing_is_copied():
  """Selecting rows changes a map: the buffers are the same objects."""
  rows, written = sources(13, 6), np.array(WRITTEN, np.int32)
  cache = encoded("bart", rows)
  chosen = cache.select(jnp.array([1, 0, 1]))
  layers = len(cache.spec) // 2
  assert all(new["k"] is old["k"] for new, old in zip(chosen.layers[layers:], cache.layers[layers:]))
  again = chosen.select(jnp.array([2, 1]))
  got, _ = logits("bart", again, written, at(0, 10))
  want, _ = logits("bart", cache.select(jnp.array([1, 0])), written, at(0, 10))
  np.testing.assert_allclose(got, want, atol=1e-5)
  straight, _ = logits("bart", encoded("bart", rows[::-1]), written, at(0, 10))
  np.testing.assert_allclose(got, straight, atol=1e-5)


@pytest.mark.parametrize("name", few(["marian", "t5"], 1))
def test_beams_are_queries_of_one_row(name):
  """Three texts of one source in one row, one token at a time, as in rows of their own."""
  beams, steps = 3, 6
  (source,) = sources(11)
  texts = np.array(sources(steps, steps, steps, seed=9), np.int32)
  cache = encoded(name, [source]).spread(beams)
  buffers = cache.layouts[CROSS]
  for step in range(steps):
    got, cache = logits(name, cache, texts[None, :, step], np.full((1, beams), step, np.int32))
  assert cache.layouts[CROSS] is buffers
  want, _ = logits(name, encoded(name, [source] * beams), texts, at(0, steps, beams))
  np.testing.assert_allclose(got[0], want[:, -1], atol=2e-4)


def test_forgetting_what_was_written_keeps_what_was_read():
  rows, written = sources(13, 6), np.array(WRITTEN, np.int32)
  fresh = encoded("marian", rows)
  _, cache = logits("marian", fresh, written[:, ::-1].copy(), at(0, 10))
  got, _ = logits("marian", cache.truncate(jnp.zeros(2, jnp.int32)), written, at(0, 10))
  want, _ = logits("marian", fresh, written, at(0, 10))
  np.testing.assert_array_equal(got, want)


def test_replacing_a_row_that_is_shared_is_refused():
  cache = encoded("bart", sources(4, 4))
  with pytest.raises(ValueError, match="sources of their own"):
    cache.select(jnp.array([0, 0])).insert(jnp.array([0]), encoded("bart", sources(5)))
  replaced = cache.insert(jnp.array([1]), encoded("bart", sources(5)))
  got, _ = logits("bart", replaced, np.array(WRITTEN, np.int32), at(0, 10))
  want, _ = logits("bart", encoded("bart", [sources(4, 4)[0], sources(5)[0]]), np.array(WRITTEN, np.int32), at(0, 10))
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_sinusoids_of_late_positions():
  """As NumPy makes them in float64; float32 alone would be 1e-4 off."""
  positions = np.array([[0, 1, 127, 128, 1000, 5000]])
  got = Sinusoid(64, 31, 2).apply({}, jnp.asarray(positions))
  angles = (positions[0][:, None] + 2) * 10000.0 ** (-np.arange(32) / 31)
  np.testing.assert_allclose(got[0], np.concatenate([np.sin(angles), np.cos(angles)], axis=1), atol=1e-6)


@pytest.mark.parametrize(
  ("name", "field", "value", "message"),
  [
    ("t5", "d_kv", 0, "'d_kv' must be a positive integer"),
    ("t5", "feed_forward_proj", "gated-dance", "unknown activation 'dance'"),
    ("t5", "feed_forward_proj", "double-gelu", "unknown feed_forward_proj"),
    ("bart", "encoder_layers", None, "'encoder_layers' must be a positive integer"),
    ("bart", "decoder_attention_heads", 5, "not a multiple of decoder_attention_heads 5"),
    ("marian", "share_encoder_decoder_embeddings", False, "two vocabularies"),
    ("nllb", "activation_function", "dance", "unknown activation"),
  ],
)
def test_impossible_configs_are_refused(name, field, value, message):
  with pytest.raises(ValueError, match=message):
    registry.build({**CONFIGS[name], field: value})


def test_a_checkpoint_may_leave_out_a_bias_of_zeros():
  from decoder.checkpoint.source import Source, Tensor, check

  shapes = {"embed/weight": (V, 8), "logits_bias/bias": (1, V)}
  tensors = {"embed/weight": Tensor((V, 8), np.dtype(np.float32), lambda: np.ones((V, 8), np.float32))}
  source = check(Source(None, CONFIGS["marian"], {}, tensors, None, None, ()), shapes)
  np.testing.assert_array_equal(source.tensors["logits_bias/bias"].read(), np.zeros((1, V)))
