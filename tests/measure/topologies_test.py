"""Names of topologies: which devices they stand for, and which are refused."""

import pytest

from decoder.measure import topologies


@pytest.mark.parametrize(
  ("name", "jax", "devices", "chips"),
  [
    ("v5e-8", "v5e:2x4", 8, 8),
    ("v5litepod-16", "v5e:4x4", 16, 16),
    ("V6E-4", "v6e:2x2", 4, 4),
    ("v4-8", "v4:2x2x1", 4, 4),  # TensorCores, two a chip
    ("v5p-8", "v5p:2x2x1", 4, 4),
    ("v5p-64", "v5p:2x4x4", 32, 32),  # which JAX itself rejects
    ("tpu7x-8", "tpu7x:2x2x1", 8, 4),  # each chip is two devices
    ("7x-2", "tpu7x:1x1x1", 2, 1),
    ("v5e", "v5e:1x1", 1, 1),
    ("v5e:4x8", "v5e:4x8", 32, 32),
    ("v5p:2x2x2", "v5p:2x2x2", 8, 8),
  ],
)
def test_peoples_names_are_jaxs_topologies(name, jax, devices, chips):
  found = topologies.find(name)
  assert (found.jax[0], found.devices, found.chips) == (jax, devices, chips)


def test_every_name_is_found_as_itself():
  for name in topologies.names():
    if name != "cpu":
      assert topologies.find(name).name == name


def test_gpus_are_those_of_one_host():
  assert (topologies.find("h200").devices, topologies.find("h100-8").devices) == (1, 8)
  assert topologies.find("h200-8").hops(8) == 1
  assert topologies.find("v5e-8").hops(8) == 4


def test_this_machine_is_measured():
  cpu = topologies.find("cpu").device
  assert cpu.memory > 1e9
  assert cpu.bandwidth > 1e8
  assert cpu.flops > 1e8


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("v5e-9", "counts chips; the nearest are v5e-4 or v5e-8"),
    ("v5p-7", "TensorCores, two a chip; the nearest are v5p-8"),
    ("v4-9", "the nearest are v4-8"),
    ("v5pe-8", "did you mean v5"),
    ("h201", "did you mean h200"),
    ("h200-16", "h200-1 … h200-8"),
    ("v5e:2x2x1", "wants a shape such as v5e:2x2"),
    ("v5e:0x2", "wants a shape such as"),
    ("v5e:x", "wants a shape such as"),
    ("", "known are"),
    ("zz", "known are v4-8"),
  ],
)
def test_unknown_names_are_refused_and_near_ones_named(name, says):
  with pytest.raises(ValueError, match="topology") as told:
    topologies.find(name)
  assert says in str(told.value)


def test_larger_ones_are_of_the_same_kind_and_grow():
  more = topologies.larger(topologies.find("v5e-4"))
  assert [one.name for one in more[:2]] == ["v5e-8", "v5e-16"]
  assert topologies.larger(topologies.find("h200-8")) == []


def test_facts_are_near_those_of_jaxs_own_table():
  """JAX has figures of each chip for its kernels."""
  info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
  table = getattr(info, "_get_tpu_info_impl", None)
  if table is None:
    pytest.skip("this JAX has no table of TPUs")
  versions = {"v4": "TPU_V4", "v5e": "TPU_V5E", "v5p": "TPU_V5P", "v6e": "TPU_V6E", "tpu7x": "TPU_7X"}
  for name, version in versions.items():
    theirs, ours = table(info.ChipVersion[version], 1), topologies.TPUS[name]
    cores = 2 if name in ("v4", "v5p") else 1  # a device of ours has both
    assert ours.bandwidth == pytest.approx(cores * theirs.mem_bw_bytes_per_second, rel=0.15)
    assert ours.flops == pytest.approx(cores * theirs.bf16_ops_per_second, rel=0.05)
    assert 0.85 < ours.memory / (cores * theirs.hbm_capacity_bytes) <= 1
