"""Converts a checkpoint into a self-contained Orbax directory.

  python scripts/convert.py --source model.gguf --out models/mine [--dtype float32] [--weights keep]

--source: a GGUF file, a Hugging Face or Orbax directory, a registered name, or hf:org/name[@revision].
--dtype: float32, float16, bfloat16, or keep (each tensor's own type; quantised ones become float32).
--weights: float (default), keep (8- and 4-bit blocks as they are), or int8, q8_0, q4_0, q4_1 to round to.

Prints one line, for example
  models/mine: 272 tensors, 134515008 parameters, float32, 538.1 MB, 6.3 s
Exit code 2 and one line on stderr for bad input; nothing is left behind then.
"""

import json
import time
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_weights_flag("float", "float", *entry.WEIGHTS)
flags.DEFINE_string("source", None, "GGUF file, directory, registered name, or hf:org/name.")
flags.DEFINE_string("out", None, "Directory to write; new, empty, or an earlier conversion.")
flags.DEFINE_enum("dtype", "keep", ["keep", "float32", "float16", "bfloat16"], "Type of the stored weights.")


def main() -> None:
  for name in ("source", "out"):
    if FLAGS[name].value is None:
      raise ValueError(f"--{name} is missing; see --help")
  from decoder import checkpoint

  start = time.perf_counter()
  dtype = None if FLAGS.dtype == "keep" else FLAGS.dtype
  out = checkpoint.convert(checkpoint.resolve(FLAGS.source), Path(FLAGS.out), dtype, weights=entry.weights())
  manifest = json.loads((out / "manifest.json").read_text())
  size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
  print(
    f"{out}: {len(manifest['tensors'])} tensors, {manifest['parameters']} parameters, {manifest['dtype']}, "
    f"{size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s"
  )


if __name__ == "__main__":
  entry.run(main)
