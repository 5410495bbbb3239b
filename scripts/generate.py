"""Completes prompts with a language model, streamed to the terminal.

Usage:
  python scripts/generate.py --prompt "The three laws of thermodynamics are"
  python scripts/generate.py --chat --prompt "What is the capital of France?" --temperature 0.7 --seed 1
  python scripts/generate.py --prompt "Water boils at" --top_p 0.9 --temperature 1 --explain --html tokens.html
  cat prompt.txt | python scripts/generate.py --output json --max_new_tokens 32
  python scripts/generate.py --mesh tensor=4,data=2 --coordinator host:1234 --num_processes 2 --process_id 0

The text goes to stdout, one line of figures to stderr:
  prompt 6 tokens, first token after 61 ms · 256 new tokens, 38.1 a second (26.2 ms each) · peak memory 1.1 GB · …
One prompt is streamed, unless it is searched for with beams (--set num_beams=4); several (--prompt again) are decoded
together and printed in their order.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import config
import entry
import processes
import prompting
import report
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
entry.define_sampling_flags(max_new_tokens=256, temperature=0.0)
entry.define_constraint_flags()
config.define_flags()
processes.define_flags()
prompting.define_flags()
report.define_flags()
flags.DEFINE_bool("stream", True, "Print text as it is written.")
flags.DEFINE_enum("output", "text", ["text", "json"], "json: one object a prompt.")
flags.DEFINE_integer("capacity", None, "Tokens the cache has room for; chosen if not given.")
flags.DEFINE_enum("truncate", None, ["left", "middle"], "Where to cut a prompt that is too long; refused if not given.")
flags.DEFINE_string("speculate", "off", "Guess ahead: lookup (what followed before), head, head:NAME, draft:MODEL.")
flags.DEFINE_integer("draft_tokens", 7, "Most guesses a step: 1, 3 or 7.")
flags.DEFINE_string("profile", None, "Write a JAX trace of the generation to this directory.")
flags.DEFINE_bool("print_config", False, "Print every setting and where it came from, and exit.")
flags.adopt_module_key_flags(entry)
flags.adopt_module_key_flags(config)
flags.adopt_module_key_flags(processes)
flags.adopt_module_key_flags(prompting)
flags.adopt_module_key_flags(report)


def main() -> None:
  asked = {**entry.sampling_settings(), **entry.constraint_settings()}
  asked |= {"capacity": FLAGS.capacity, "truncate": FLAGS.truncate, "speculate": FLAGS.speculate}
  asked |= {"draft_tokens": FLAGS.draft_tokens, **report.settings()}
  settings, origins = config.gather(asked)
  if FLAGS.print_config:
    print(config.table(settings, origins))
    return
  with processes.joined() as lead:
    generate(lead, settings)


def generate(lead: Any, settings: dict[str, Any]) -> None:
  """lead: of all processes; what they do is the same, and only the first has something to say."""
  prompts = prompting.arranged(lead.agree(prompting.read_texts() if lead.first else None))
  if FLAGS.profile is not None:
    Path(FLAGS.profile).mkdir(parents=True, exist_ok=True)
  lm = entry.load(settings, mesh=FLAGS.mesh)
  with profiler():
    if FLAGS.stream and FLAGS.output == "text" and len(prompts) == 1 and not config.searches(settings):
      results = [stream(lm, prompts[0], settings, lead)]
    else:
      answers = lm.generate(prompts, **settings)
      results = [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]
      write(results)
  gained = report.gained(lm, prompts, settings, results)
  if lead.first:
    report.show(results)
  for result in results:
    report_problem(result)
  if FLAGS.output == "text":
    print(report.figures(results, gained), file=sys.stderr)


def stream(lm: Any, prompt: Any, settings: dict[str, Any], lead: Any) -> Any:
  pieces = lm.stream(prompt, **settings)
  try:
    for piece in pieces:
      print(piece, end="", flush=True)
  except KeyboardInterrupt:
    if lead.count > 1:  # the others wait for this one, and end with it
      raise
    pieces.close()
  print(flush=True)
  return pieces.result


def write(results: list[Any]) -> None:
  for number, result in enumerate(results, 1):
    if FLAGS.output == "json":
      print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False), flush=True)
    else:
      print(f"── {number} ──\n{result.text}" if len(results) > 1 else result.text, flush=True)


def report_problem(result: Any) -> None:
  if result.finish_reason == "error":
    why = result.stop_reason or "the model's logits were not finite"
    print(f"warning: {why}; the text ends there", file=sys.stderr)
  if result.truncated == "context":
    print("warning: the context is full; the text was cut there", file=sys.stderr)


def profiler() -> Any:
  if FLAGS.profile is None:
    return contextlib.nullcontext()
  import jax

  return jax.profiler.trace(FLAGS.profile)


if __name__ == "__main__":
  entry.run(main)
