"""Conversion holds slices, not the model, and one of several processes its shard: measured on more than 1 GB.

By hand, with the figures: python -m pytest tests/checkpoint/memory_test.py --slow -s
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from fixtures import free_port
from safetensors.numpy import save_file

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc"),
]
ROOT = Path(__file__).parents[2]
SIZES = {
  "hidden_size": 2048,
  "intermediate_size": 5632,
  "num_hidden_layers": 7,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "vocab_size": 8000,
  "tie_word_embeddings": True,
}

MEASURE = """if True:
  import sys, time
  import jax, orbax.checkpoint
  import decoder.models.registry
  from decoder.checkpoint import convert
  # Not getrusage: its ru_maxrss survives exec, so a child of a large process starts from its parent's peak.
  peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
  base, start = peak(), time.perf_counter()
  if sys.argv[3] == "whole":  # the negative control: what saving the whole tree at once takes
    from decoder.checkpoint import conversion
    conversion.SLICE_BYTES = 1 << 60
  convert(sys.argv[1], sys.argv[2], "float32")
  print(peak() - base, time.perf_counter() - start)
"""


def measure(source: Path, out: Path, how: str) -> float:
  """MB that a conversion takes above what its imports take."""
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
    [sys.executable, "-c", MEASURE, source, out, how], check=True, capture_output=True, text=True, env=environment
  )
  above, seconds = (float(number) for number in result.stdout.split())
  size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
  print(f"{source.name} {how}: {above:.0f} MB above the imports, {size:.0f} MB written, {seconds:.1f} s")
  assert size > 1000
  return above


def write_shards(tiny, directory: Path, config: dict, dtype) -> Path:
  """One shard a layer, so that the test itself stays small."""
  generator = np.random.default_rng(0)
  tiny.huggingface(directory, config, {"model.norm.weight": np.ones(config["hidden_size"], dtype)}, shards=2)
  index, shards = {}, {}
  for name, (_, shape) in tiny.names(config).items():
    shards.setdefault(name.split(".")[2] if ".layers." in name else "top", {})[name] = shape
  for shard, shapes in shards.items():
    values = {name: generator.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}
    save_file(values, directory / f"{shard}.safetensors")
    index |= dict.fromkeys(values, f"{shard}.safetensors")
  text = json.dumps({"weight_map": index})
  (directory / "model.safetensors.index.json").write_text(text)
  return directory


def write_gguf(tiny, file: Path, config: dict) -> Path:
  """Q8_0 blocks of arbitrary bytes: what they mean does not matter here."""
  kind = gguf.GGMLQuantizationType.Q8_0
  writer = gguf.GGUFWriter(str(file), "llama", use_temp_file=True)
  for key in ("context_length", "embedding_length", "feed_forward_length", "block_count"):
    source = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size"}
    source |= {"feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers"}
    writer.add_uint32(f"llama.{key}", config[source[key]])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_layer_norm_rms_eps(1e-5)
  for _, (name, shape) in tiny.names(config).items():
    if len(shape) == 1:
      writer.add_tensor(name, np.ones(shape, np.float32))
    else:
      packed = gguf.quant_shape_to_byte_shape(shape, kind)
      writer.add_tensor(name, np.random.default_rng(0).integers(0, 60, packed, np.uint8), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "gguf"])
def test_conversion_peaks_below_three_tensors_and_200_mb(tiny, tmp_path, kind):
  config = tiny.config(**SIZES)
  largest = max(int(np.prod(shape)) for _, shape in tiny.names(config).values()) * 4 / 2**20
  if kind == "gguf":
    source = write_gguf(tiny, tmp_path / "big.gguf", config)
  else:
    dtype = np.float32 if kind == "float32" else ml_dtypes.bfloat16
    source = write_shards(tiny, tmp_path / kind, config, dtype)
  bound = 3 * largest + 200
  print(f"bound: 3 × {largest:.0f} MB + 200 MB = {bound:.0f} MB")
  assert measure(source, tmp_path / "out", "slices") <= bound
  if kind == "float32":
    assert measure(source, tmp_path / "whole", "whole") > bound


# Pages of a mapped file are the system's, which drops them as it likes; what counts are a process's own.
LOAD = """if True:
  import sys, threading
  import decoder
  from decoder import processes
  own = lambda: int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024
  path, dtype, mesh, coordinator, number, count = sys.argv[1:]
  with processes.join(coordinator, int(number), int(count)):
    import jax
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    base, seen, done = own(), [], threading.Event()
    def look():
      while not done.wait(0.002):
        seen.append(own())
    looking = threading.Thread(target=look)
    looking.start()
    lm = decoder.load(path, dtype=dtype, mesh=mesh)
    done.set()
    looking.join()
    held = [shard.data.nbytes for leaf in jax.tree.leaves(lm.params) for shard in leaf.addressable_shards]
    print(max(seen) - base, sum(held) / 2**20, flush=True)
"""


def load_together(path: Path, dtype: str, mesh: str) -> list[tuple[float, float]]:
  """(MB that loading takes above what was there, MB of its shard) of each of two processes."""
  at = f"127.0.0.1:{free_port()}"
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", LOAD, str(path), dtype, mesh, at]
  running = [
    subprocess.Popen([*command, str(n), "2"], stdout=subprocess.PIPE, text=True, env=environment) for n in range(2)
  ]
  told = [process.communicate(timeout=300)[0] for process in running]
  assert [process.returncode for process in running] == [0, 0]
  return [tuple(map(float, text.splitlines()[-1].split())) for text in told]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_process_holds_its_shard_and_a_tensor(tiny, tmp_path, dtype):
  """From a converted checkpoint, as it is stored and in another type."""
  from decoder.checkpoint import convert

  config = tiny.config(**SIZES)
  source = write_shards(tiny, tmp_path / "source", config, ml_dtypes.bfloat16)
  convert(source, tmp_path / "converted", "bfloat16")
  largest = max(int(np.prod(shape)) for _, shape in tiny.names(config).values()) * np.dtype(dtype).itemsize / 2**20
  told = load_together(tmp_path / "converted", dtype, "tensor=2")
  for above, shard in told:
    print(
      f"{dtype}: {above:.0f} MB above the start, for a shard of {shard:.0f} MB; the largest tensor has {largest:.0f}"
    )
    assert above <= shard + largest + 32  # and what the interpreter takes
  if dtype != "bfloat16":  # the negative control: all of it in both; as it is stored, it stays in the file
    whole = load_together(tmp_path / "converted", dtype, "data=2")
    assert all(above > shard + largest + 32 for above, _ in whole for _, shard in told)
