"""Texts that are read line by line: files or stdin, what their lines are called, and translations to compare with."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

FLAGS = flags.FLAGS


class Input(NamedTuple):
  """lines: a list of all, or an iterator over a stream. where: what the line of a number, from 1 on, is called."""

  lines: Iterable[str]
  where: Callable[[int], str]


def define_flags() -> None:
  flags.DEFINE_multi_string("input", [], "A text file; repeatable. Without one, stdin is read.")
  flags.DEFINE_string("reference", None, "A file of translations, one a line, to tell BLEU and chrF by.")


def read_input(whole: bool) -> Input:
  """What --input names, else stdin. whole: read stdin to its end first."""
  files = [(name, read(name)) for name in FLAGS.input]
  if not files and not whole:
    stream = (line for number, data in enumerate(sys.stdin.buffer, 1) for line in split(data, "stdin", number))
    return Input(stream, "line {}".format)
  files = files or [("stdin", split(sys.stdin.buffer.read(), "stdin"))]
  names = [f"{name}, line {number}" for name, lines in files for number in range(1, len(lines) + 1)]
  return Input([line for _, lines in files for line in lines], lambda number: names[number - 1])


def read(name: str) -> list[str]:
  return split(Path(name).expanduser().read_bytes(), name)


def split(data: bytes, name: str, first: int = 1) -> list[str]:
  """Lines as a line feed ends them, with or without a carriage return; first: the number of the first, for errors."""
  try:
    lines = data.decode("utf-8").split("\n")
  except UnicodeDecodeError as error:
    line = first + data[: error.start].count(b"\n")
    raise ValueError(f"{name}, line {line} is not UTF-8 text: it has byte {data[error.start]:#x}") from error
  return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def read_reference(lines: Sequence[str]) -> tuple[list[str], list[Any]]:
  """What --reference names, and the metrics to compare by; nothing of both without it."""
  if FLAGS.reference is None:
    return [], []
  try:
    from sacrebleu import BLEU, CHRF
  except ImportError as error:
    raise ValueError("--reference needs the package sacrebleu; pip install 'decoder[translate]'") from error
  reference = read(FLAGS.reference)
  if len(reference) != len(lines):
    raise ValueError(
      f"--reference {FLAGS.reference} has {len(reference)} lines, the input {len(lines)}; give the input's translations"
    )
  return reference, [BLEU(), CHRF()]


def scores(texts: Sequence[str], reference: Sequence[str], metrics: Sequence[Any]) -> list[str]:
  """A line for each metric, with what it takes to compute the same again; none for no texts."""
  return [f"{metric.corpus_score(texts, [reference])} ({metric.get_signature()})" for metric in metrics if texts]
