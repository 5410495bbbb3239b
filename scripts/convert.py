"""Converts a checkpoint into a self-contained Orbax directory.

  python scripts/convert.py --source model.gguf --out models/mine [--dtype float32]

--source: a GGUF file, a Hugging Face or Orbax directory, a registered name, or hf:org/name[@revision].
--dtype: float32, float16, bfloat16, or keep (each tensor's own type; quantised ones become float32).

Prints one line, for example
  models/mine: 272 tensors, 134515008 parameters, float32, 538.1 MB, 6.3 s
Exit code 2 and one line on stderr for bad input; nothing is left behind then.
"""

import json
import sys
import time
from pathlib import Path

from absl import app, flags

from decoder import checkpoint

_SOURCE = flags.DEFINE_string("source", None, "GGUF file, directory, registered name, or hf:org/name.", required=True)
_OUT = flags.DEFINE_string("out", None, "Directory to write; new, empty, or an earlier conversion.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "keep", ["keep", "float32", "float16", "bfloat16"], "Type of the stored weights.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  start = time.perf_counter()
  dtype = None if _DTYPE.value == "keep" else _DTYPE.value
  out = checkpoint.convert(checkpoint.resolve(_SOURCE.value), Path(_OUT.value), dtype)
  manifest = json.loads((out / "manifest.json").read_text())
  size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
  print(
    f"{out}: {len(manifest['tensors'])} tensors, {manifest['parameters']} parameters, {manifest['dtype']}, "
    f"{size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s"
  )


def run() -> int:
  """Parses the flags and runs main; every error of the user's is one line and exit code 2."""
  app.define_help_flags()
  try:
    main(flags.FLAGS(sys.argv))
  except (flags.Error, app.UsageError, ValueError, OSError) as error:
    print(f"convert.py: {error}".replace("\n", " "), file=sys.stderr)
    return 2
  except SystemExit:  # absl ends --help with 1
    return 0
  except KeyboardInterrupt:
    print("convert.py: interrupted; nothing was left behind", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(run())
