"""Which settings a script runs with, and where each came from: flags first, then the checkpoint's own where asked for,
then defaults."""

import ast
import json
from typing import Any

import entry
from absl import flags

FLAGS = flags.FLAGS


def define_flags() -> None:
  flags.DEFINE_multi_string("set", [], "Any setting by name, e.g. --set max_time=2.5 --set stop_token_ids=[2].")
  flags.DEFINE_bool("generation_config", False, "Begin with what the checkpoint's generation_config.json asks for.")


def parse(value: str) -> Any:
  """A number, a list, None, true or false, or the text itself."""
  try:
    return ast.literal_eval(value.capitalize() if value.lower() in ("none", "true", "false") else value)
  except (ValueError, SyntaxError):
    return value


def gather(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
  """The keywords of `decoder.Settings`, checked, and where each came from. asked: the values of the flags named like
  settings, defaults included."""
  from decoder.checkpoint.loading import read_generation
  from decoder.generation_config import read_generation_config
  from decoder.settings import gather_settings

  asked, origins = dict(asked), {name: "flag" if FLAGS[name].present else "default" for name in asked}
  if FLAGS.generation_config:
    for name, value in read_generation_config(read_generation(FLAGS.model, weights=entry.weights())).items():
      if origins.get(name) != "flag":
        asked[name], origins[name] = value, "generation_config.json"
  for pair in FLAGS.set:
    name, equals, value = pair.partition("=")
    if not equals:
      raise ValueError(f"--set wants NAME=VALUE, got {pair!r}")
    asked[name], origins[name] = parse(value), "flag"
  gather_settings(None, asked)
  return asked, origins


def searches(asked: dict[str, Any]) -> bool:
  """Whether these settings ask for a search, which no stream shows."""
  from decoder.settings import gather_settings

  return gather_settings(None, asked).searches


def table(asked: dict[str, Any], origins: dict[str, str]) -> str:
  """One line a setting: name, value, where it came from; then the transforms that are on, in their order."""
  from decoder.settings import gather_settings

  told = gather_settings(None, asked).describe()
  chain, _ = told.pop("chain"), told.pop("transforms")
  rows = [(name, json.dumps(value, ensure_ascii=False), origins.get(name, "default")) for name, value in told.items()]
  rows += [("chain", " → ".join(link["name"] for link in chain), "what of these is on, in order")]
  widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
  return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows)
