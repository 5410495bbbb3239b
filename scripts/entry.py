"""What every script here shares: mistakes end with one line and exit code 2, and generation flags mean one thing."""

import logging as python_logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging

FLAGS = flags.FLAGS
WEIGHTS = ("keep", "int8", "q8_0", "q4_0", "q4_1")  # besides float


def run(main: Callable[[], None]) -> None:
  """Parses flags and calls main(). A wrong flag, value, prompt, model or file: one line on stderr, exit code 2.

  --verbosity=1 adds the traceback. Ctrl-C ends with 130; a closed pipe (`| head`) is no error.
  """

  def parse(argv: list[str]) -> list[str]:
    try:
      return FLAGS(argv)
    except flags.Error as error:
      _fail(error)
    except SystemExit:  # absl ends --help with 1
      sys.exit(0)

  def guarded(argv: list[str]) -> None:
    if len(argv) > 1:
      _fail(f"unexpected argument {argv[1]!r}; everything is given by flags, see --help")
    logging.get_absl_handler().setFormatter(python_logging.Formatter("%(levelname)s: %(message)s"))
    if not FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # JAX tells at INFO, absl's own default, of every backend it does not find
    try:
      main()
      sys.stdout.flush()
    except KeyboardInterrupt:
      sys.exit(130)
    except BrokenPipeError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains while it exits
      sys.exit(0)
    except (ValueError, OSError) as error:
      if FLAGS.verbosity > 0:
        raise
      _fail(error)

  app.run(guarded, flags_parser=parse)


def check_folder(name: str) -> None:
  """ValueError where the file that this flag names, if it does, has no directory to lie in: before work is done."""
  file = FLAGS[name].value
  if file and not Path(file).expanduser().absolute().parent.is_dir():
    raise ValueError(f"--{name}: the directory of {file} does not exist; create it")


def _fail(error: Any) -> None:
  print("error:", "; ".join(str(error).splitlines()), file=sys.stderr)
  sys.exit(2)


def define_model_flags(model: str | None = "smollm2-135m-instruct") -> None:
  """model: the default; None where one must be named."""
  flags.DEFINE_string(
    "model",
    model,
    "A registered name, a path (GGUF file, Hugging Face or Orbax directory), or hf:org/name.",
  )
  flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Of weights and compute; default float32 on CPU, else bfloat16."
  )
  define_weights_flag("auto", "auto", "float", *WEIGHTS)


def define_weights_flag(default: str, *known: str) -> None:
  flags.DEFINE_enum(
    "weights",
    default,
    known,
    "How weights are held: float is --dtype's; keep, the file's own 8 or 4 bits; the others round to it"
    + ("; auto: keep on CPU, else float." if default == "auto" else "."),
  )


def weights() -> str | None:
  """What the library calls the choice of --weights. auto: a file's own bits change its logits by less than 0.02 and
  are read several times faster by the CPU's kernels; without those, over a mesh and on other devices, floats."""
  if FLAGS.weights == "auto":
    from decoder.ops.kernels import build

    over_mesh = "mesh" in FLAGS and FLAGS.mesh is not None
    return "keep" if FLAGS.dtype in (None, "float32") and not over_mesh and build.ready() else None
  return None if FLAGS.weights == "float" else FLAGS.weights


def define_sampling_flags(max_new_tokens: int, temperature: float) -> None:
  flags.DEFINE_integer("max_new_tokens", max_new_tokens, "Most tokens to write.")
  flags.DEFINE_float("temperature", temperature, "0 takes the most probable token.")
  flags.DEFINE_integer("top_k", None, "Keep the k most probable tokens; 0 is off.")
  flags.DEFINE_float("top_p", None, "Keep the smallest set of tokens with this mass; 1 is off.")
  flags.DEFINE_float("min_p", None, "Keep tokens at least this many times as probable as the most probable; 0 is off.")
  flags.DEFINE_float("repetition_penalty", 1.0, "Above 1 makes tokens that were used before less likely.")
  flags.DEFINE_float("guidance_scale", 1.0, "Above 1 leads away from what follows the negative prompt.")
  flags.DEFINE_string("negative_prompt", None, "What to lead away from; the prompt's last token if not given.")
  flags.DEFINE_integer("seed", None, "Of every draw; a fresh one is taken, and reported, if not given.")
  flags.DEFINE_multi_string("stop", [], "Text that ends the answer; repeatable.")
  flags.DEFINE_bool("ignore_eos", False, "Go on past end-of-text tokens.")


def sampling_settings() -> dict[str, Any]:
  """The keywords of `decoder.Settings` that the flags give."""
  numbers = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "guidance_scale")
  return {name: FLAGS[name].value for name in (*numbers, "negative_prompt", "stop", "ignore_eos")}


def define_constraint_flags() -> None:
  flags.DEFINE_string("json_schema", None, "A JSON schema, or the path of one, that the text must fit.")
  flags.DEFINE_string("regex", None, "A regular expression that the whole text must match.")
  flags.DEFINE_multi_string("choice", None, "One of the texts to choose from; repeatable.")
  flags.DEFINE_string("grammar", None, "A Lark or GBNF grammar, or the path of one, that the text must fit.")


def constraint_settings() -> dict[str, Any]:
  """The keywords of `decoder.Settings` that these flags give."""
  given = {name: FLAGS[name].value for name in ("json_schema", "regex", "choice", "grammar")}
  for name in ("json_schema", "grammar"):
    if given[name] is not None and os.path.isfile(given[name]):
      with open(given[name], encoding="utf-8") as file:
        given[name] = file.read()
  return given


def load(settings: dict[str, Any], mesh: str | None = None) -> Any:
  """The model of --model, --dtype and --weights, over a mesh if given. `settings` are checked first: a wrong one costs
  no loading."""
  from decoder.settings import gather_settings

  gather_settings(None, settings)
  import decoder

  def announce(what: str) -> None:
    print(f"compiling {what}, kept for the next time …", file=sys.stderr, flush=True)

  return decoder.load(FLAGS.model, dtype=FLAGS.dtype, weights=weights(), mesh=mesh, announce=announce)
