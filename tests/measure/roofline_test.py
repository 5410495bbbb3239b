"""Bytes of a step against numbers worked out by hand, and the speed they are held against."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import WINDOW, rand_lm

from decoder.cache import Raw
from decoder.measure import roofline
from decoder.ops import quantised

LAYER = 4 * 32 * 32 + 3 * 48 * 32 + 2 * 32  # q, k, v, o; gate, up, down; two norms


def test_weights_are_counted_once_and_an_embedding_only_as_a_head():
  _, params = rand_lm("rope")
  assert roofline.weight_bytes(params) == 4 * (
    2 * LAYER + 32 + 64 * 32
  )  # the head; the embedding beside it is not read
  assert sum(x.nbytes for x in jax.tree.leaves(params)) == roofline.weight_bytes(params) + 4 * 64 * 32
  _, tied = rand_lm("gqa")
  fewer = 2 * 2 * 24 * 32  # one kv head of 8 instead of four, for k and v, in two layers
  assert roofline.weight_bytes(tied) == 4 * (2 * LAYER - fewer + 32 + 64 * 32)


@pytest.mark.parametrize(("kind", "wanted"), [("int8", 1), ("q8_0", 1 + 2 / 32), ("q4_0", 18 / 32), ("q4_1", 20 / 32)])
@pytest.mark.parametrize("striped", [True, False])
def test_weights_in_few_bits_count_as_they_are_read(kind, wanted, striped):
  weight = quantised.quantise(np.ones((48, 64), np.float32), kind, striped=striped)
  scales = 48 * 4 if kind == "int8" else 0
  assert roofline.weight_bytes({"mlp": {"weight": weight}}) == 48 * 64 * wanted + scales
  assert roofline.weight_formats({"mlp": {"weight": weight}, "norm": jnp.ones(4)}) == f"{kind}, float32"


def test_a_cache_counts_what_is_filled_and_seen():
  network, params = rand_lm("rope")  # two layers of four heads of 8, keys and values
  assert roofline.cache_bytes(network.cache_spec, Raw(jnp.float32), 10) == 10 * 2 * 2 * 4 * 8 * 4
  assert roofline.cache_bytes(network.cache_spec, Raw(jnp.bfloat16), 10) == 10 * 2 * 2 * 4 * 8 * 2
  windowed, _ = rand_lm("window")  # two heads, both layers look back WINDOW tokens
  assert roofline.cache_bytes(windowed.cache_spec, Raw(jnp.float32), 100) == WINDOW * 2 * 2 * 2 * 8 * 4
  assert roofline.cache_bytes(windowed.cache_spec, Raw(jnp.float32), 3) == 3 * 2 * 2 * 2 * 8 * 4
  whole = roofline.step_bytes(params, network.cache_spec, Raw(jnp.float32), rows=3, held=10)
  assert whole == roofline.weight_bytes(params) + 3 * 10 * 512


@pytest.mark.parametrize("measure", [roofline.read_speed, roofline.device_speed])
def test_memory_is_read_at_some_speed(measure):
  assert 1e8 < measure(8, 2) < 1e14
