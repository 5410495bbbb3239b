"""The peers' work on a tiny model: every figure, and the format that ran."""

import pytest
from fixtures import Letters, facade, rand_lm

from decoder.measure import machine
from decoder.measure.latency import decode_times, peer_line


def test_the_peer_line_has_every_figure():
  network, params = rand_lm("gqa")
  lm = facade(network._replace(context=2048), params, Letters.build())
  line = peer_line(lm, [1, 2, 3], capacity=140, batches=(2,))
  figures = {"tpot_ms", "stream_tpot_ms", "ttft_ms", "prefill512_ms", "batch2_tokens_per_s"}
  assert set(line) == figures | {"weights", "cache"}
  assert all(line[name] > 0 for name in figures)
  assert (line["weights"], line["cache"]) == ("float32", "float32")


def test_times_are_one_for_the_prompt_and_one_a_call(lm):
  assert len(decode_times(lm, [1, 2], 1, 10, steps=4, capacity=64)) == 1 + 3  # 9 further tokens: 4, 4, 1


def test_the_peak_is_forgotten_and_seen_again():
  machine.forget_peak()
  before = machine.peak_memory()
  block = bytearray(64 << 20)
  block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
  assert machine.peak_memory() - before > 60 << 20
  del block
  machine.forget_peak()
  if machine.peak_memory() > before + (60 << 20):
    pytest.skip("this system does not let a process forget its peak, or the allocator kept the block")


def test_a_machine_is_described_in_one_line():
  facts = machine.describe()
  assert facts["machine"]["cores"] >= 1
  assert facts["versions"]["jax"] in machine.line(facts)
  assert "/" not in machine.line(facts)
