"""Bytes of arrays in a TPU's memory: what libtpu 0.0.52 counted for the argument of a program for v5e."""

import jax
import jax.numpy as jnp
import pytest

from decoder.measure import tiles

COUNTED = [  # type, shape, bytes
  ("int32", (), 512), ("int32", (1,), 512), ("int32", (8,), 512), ("int32", (130,), 1024), ("int32", (1000,), 4096),
  ("int32", (1025,), 8192), ("float32", (14336,), 57344), ("bfloat16", (4096,), 8192), ("bfloat16", (576,), 2048),
  ("float16", (576,), 2048), ("int8", (1,), 512), ("int8", (64,), 512), ("bool", (8,), 512),
  ("int32", (1, 2048), 8192), ("int32", (8, 2048), 65536), ("int32", (3, 2048), 32768), ("int32", (8, 8), 4096),
  ("int32", (1, 8), 512), ("int32", (32, 8), 4096), ("int32", (8, 1), 512), ("int32", (2, 100), 1024),
  ("uint32", (8, 2), 1024), ("bfloat16", (576, 192), 245760), ("bfloat16", (192, 576), 245760),
  ("bfloat16", (49152, 576), 56623104), ("bfloat16", (100, 100), 26624), ("bfloat16", (10, 100), 4096),
  ("bfloat16", (3, 100), 1024), ("bfloat16", (100, 3), 1024), ("int8", (576, 192), 122880),
  ("int8", (100, 100), 13312), ("int8", (10, 100), 2048), ("uint4", (4096, 4096), 8388608),
  ("uint4", (576, 192), 61440), ("uint4", (100, 100), 6656), ("float16", (4096, 448), 3670016),
  ("float16", (576, 18), 30720), ("float16", (49152, 18), 2359296), ("float16", (512, 28), 32768),
  ("float16", (4096, 16), 131072), ("uint16", (8, 8, 2048, 128), 33554432), ("uint16", (1, 3, 512, 64), 196608),
  ("uint16", (1, 1, 100, 64), 16384), ("uint16", (1, 2, 100, 80), 40960), ("uint16", (3, 5, 10, 7), 30720),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "shape", "counted"), COUNTED)
def test_padding_is_what_the_compiler_counts(dtype, shape, counted):
  assert tiles.padded(shape, getattr(jnp, dtype) if dtype != "bool" else jnp.bool_) == counted


def test_counting_without_tiles_is_not():
  """Negative control: most of these are padded."""
  same = [tiles.plain(shape, jnp.dtype(dtype)) == counted for dtype, shape, counted in COUNTED]
  assert sum(same) < len(same) / 2


def test_a_key_is_two_words_a_row():
  key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
  assert tiles.plain(key.shape, key.dtype) == 64
  assert tiles.padded(key.shape, key.dtype) == tiles.padded((8, 2), jnp.uint32)


def test_only_what_lies_by_columns_is_copied():
  """Of SmolLM2's 64 rows of 512 tokens libtpu copied each buffer of the cache and the table, of Llama's nothing."""
  assert tiles.turned((64, 3, 512, 64), jnp.uint16) == 64 * 3 * 512 * 128 * 2
  assert tiles.turned((49152, 576), jnp.bfloat16) == 49152 * 640 * 2
  assert tiles.turned((128, 8, 512, 128), jnp.uint16) == tiles.turned((128256, 4096), jnp.bfloat16) == 0


def test_few_logits_are_drawn_from_in_fast_memory():
  fast = 128 << 20
  assert tiles.drawing(4 << 20, fast) < 8 << 20
  assert tiles.drawing(64 << 20, fast) > 400 << 20
