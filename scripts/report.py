"""What is said of a generation besides its text: figures, log-probs, explanations, an HTML view."""

from pathlib import Path
from typing import Any

from absl import flags

FLAGS = flags.FLAGS
_FEW = 25  # tokens without guessing, to compare with


def define_flags() -> None:
  flags.DEFINE_integer("logprobs", None, "Print each token's log-prob and rank, and so many alternatives.")
  flags.DEFINE_bool("explain", False, "Print for each token what each transform did.")
  flags.DEFINE_string("html", None, "Write tokens coloured by probability, with alternatives, to this file.")


def settings() -> dict[str, Any]:
  """The keywords of `decoder.Settings` that these flags give."""
  if FLAGS.html is not None and not Path(FLAGS.html).expanduser().absolute().parent.is_dir():
    raise ValueError(f"--html {FLAGS.html}: there is no such directory; make it first")
  alternatives = 5 if FLAGS.logprobs is None and FLAGS.html is not None else FLAGS.logprobs
  return {"logprobs": alternatives, "explain": FLAGS.explain}


def show(results: list[Any]) -> None:
  """Prints and writes what was asked; in JSON it is part of the objects."""
  from decoder.view import show as view

  if FLAGS.output == "text" and (FLAGS.logprobs is not None or FLAGS.explain):
    print(view(results), flush=True)
  if FLAGS.html is not None:
    Path(FLAGS.html).expanduser().write_text(view(results).page(), encoding="utf-8")


def guessed(results: list[Any]) -> list[str]:
  """What guessing ahead came to; nothing where it was not asked for."""
  told = [result.speculated for result in results if result.speculated is not None]
  steps, drafted, accepted = (sum(getattr(one, name) for one in told) for name in ("steps", "drafted", "accepted"))
  if not steps:
    return []
  share = f"{accepted} of {drafted} guesses kept" if drafted else "nothing to guess from"
  return [f"{share}, {1 + accepted / steps:.2f} tokens a step"]


def gained(lm: Any, prompts: list[Any], settings: dict[str, Any], results: list[Any]) -> list[str]:
  """What guessing ahead gains, by a few tokens written without it; nothing where it was not asked for."""
  each = max((result.timings.tpot_ms or 0.0 for result in results), default=0.0)
  if settings.get("speculate", "off") == "off" or not each:
    return []
  few = {**settings, "speculate": "off", "draft_tree": (), "max_new_tokens": _FEW, "seed": 0, "logprobs": None}
  few |= {"explain": False, "min_new_tokens": 0, "stop": (), "ignore_eos": True, "max_time": None}
  for _ in range(2):  # the first compiles
    plain = lm.generate(prompts, **few)
  told = [one for group in plain for one in (group if isinstance(group, list) else [group])]
  without = max(result.timings.tpot_ms or 0.0 for result in told)
  gain = f"{without / each:.2f} × as fast as the {without:.1f} ms without"
  return [gain if each < without else f"{gain}: guessing ahead does not pay here"] if without else []


def figures(results: list[Any], gain: list[str]) -> str:
  """One line of what it took; rates of several prompts are those of all together. gain: see `gained`."""
  from decoder.measure.machine import peak_memory

  timings = [result.timings for result in results]
  first, each = (max((getattr(t, name) or 0.0 for t in timings), default=0.0) for name in ("ttft_ms", "tpot_ms"))
  read, new = sum(t.prompt_tokens for t in timings), sum(t.new_tokens for t in timings)
  parts = [f"prompt {read} tokens"]
  if first:
    parts[0] += f", {1e3 * read / first:.0f} a second, first token after {first:.0f} ms"
  parts.append(f"{new} new tokens")
  if each:
    parts[1] += f", {sum(t.tokens_per_s or 0 for t in timings):.1f} a second ({each:.1f} ms each)"
  parts += [*guessed(results), *gain]
  parts.append(f"peak memory {peak_memory() / 1e9:.2f} GB")
  parts.append(f"loaded in {timings[0].load_s:.1f} s, compiled in {timings[0].compile_s:.1f} s")
  if any(result.settings.temperature > 0 for result in results):
    parts.append("seed " + ", ".join(str(result.seed) for result in results))
  return " · ".join(parts)
