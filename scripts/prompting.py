"""Prompts from flags, files or stdin, as plain texts, to be filled in, or as turns of a conversation."""

import sys
from pathlib import Path
from typing import Any

from absl import flags

FLAGS = flags.FLAGS


def define_flags() -> None:
  flags.DEFINE_multi_string("prompt", [], "A prompt; repeatable. Without one, stdin is read.")
  flags.DEFINE_multi_string("prompt_file", [], "A file that holds one prompt; repeatable.")
  flags.DEFINE_string("suffix", None, "Fill in: write what comes between the prompt and this text.")
  flags.DEFINE_bool("chat", False, "Put each prompt into the model's chat template, as a user's turn.")
  flags.DEFINE_string("system", None, "A system message; only with --chat.")


def read_texts() -> list[str]:
  texts = list(FLAGS.prompt) + [decode(Path(name).expanduser().read_bytes(), name) for name in FLAGS.prompt_file]
  if not texts:
    if sys.stdin.isatty():
      print("reading a prompt from the terminal; end it with Ctrl-D", file=sys.stderr)
    texts = [decode(sys.stdin.buffer.read(), "stdin")]
  return texts


def arranged(texts: list[str]) -> list[Any]:
  """The prompts, as --suffix, --chat and --system ask for them."""
  if FLAGS.system is not None and not FLAGS.chat:
    raise ValueError("--system needs --chat: a raw prompt has no system message")
  if FLAGS.suffix is not None and FLAGS.chat:
    raise ValueError("--suffix fills in plain text; leave out --chat")
  if FLAGS.suffix is not None:
    from decoder.text.infill import Infill

    return [Infill(text, FLAGS.suffix) for text in texts]
  if not FLAGS.chat:
    return texts
  before = [{"role": "system", "content": FLAGS.system}] if FLAGS.system is not None else []
  return [[*before, {"role": "user", "content": text}] for text in texts]


def decode(data: bytes, name: str) -> str:
  try:
    return data.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{name} is not UTF-8 text: byte {data[error.start]:#x} at {error.start}") from error
