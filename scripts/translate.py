"""Translates texts line by line with an encoder–decoder.

Usage:
  echo "En el principio crió Dios los cielos y la tierra." | python scripts/translate.py
  python scripts/translate.py --model hf:facebook/nllb-200-distilled-600M --src eng_Latn --tgt deu_Latn --input en.txt
  cat en.txt | python scripts/translate.py --model hf:Helsinki-NLP/opus-mt-en-es > es.txt
  python scripts/translate.py --model my-model --input en.txt --output es.txt --reference gold.txt

Each line of the input gives one line, in order; an empty one stays empty. With --output a run that was killed goes on
where it stopped when it is started again, and loses at most the batch that it was at. --reference tells BLEU and chrF.
Figures go to stderr:
  1000 lines, 31424 tokens read, 35310 written in 43.5 s · 1093 a second, compiled in 11.2 s, peak memory 1.10 GB
"""

import collections
import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import config
import entry
import lines
from absl import flags

MODEL = "bible-es-en"  # Spanish to English, trained here
ENDS = {
  "length": "translations are cut at their limit of tokens, see --max_new_tokens",
  "time": "translations are cut at their limit of time",
  "error": "translations end where the model's logits were not finite",
}

FLAGS = flags.FLAGS
entry.define_model_flags(MODEL)
config.define_flags()
lines.define_flags()
flags.DEFINE_string("output", None, "Write to this file instead of stdout; resumable.")
flags.DEFINE_enum("output_format", "text", ["text", "json"], "json: one object a line, with text, score and source.")
flags.DEFINE_string("src", None, "Language of the text, by the model's own code; for models that know several.")
flags.DEFINE_string("tgt", None, "Language of the translation, likewise.")
flags.DEFINE_integer("num_beams", 4, "Texts carried on together; 1 takes the most probable token each time.")
flags.DEFINE_float("length_penalty", 1.0, "A score is Σ log p / length^this.")
flags.DEFINE_integer("max_new_tokens", None, "Most tokens a line; three times those read and 15 if not given.")
flags.DEFINE_integer("batch_tokens", 16384, "Most tokens that a batch holds, of all beams, padding counted.", 1)
flags.DEFINE_bool("split", False, "Cut lines that are beyond the context at the ends of their sentences.")
flags.DEFINE_bool("print_config", False, "Print every setting and where it came from, and exit.")
for module in (entry, config, lines):
  flags.adopt_module_key_flags(module)


def main() -> None:
  names = ("src", "tgt", "num_beams", "length_penalty", "max_new_tokens")
  settings, origins = config.gather({name: FLAGS[name].value for name in names})
  if FLAGS.print_config:
    print(config.table(settings, origins))
    return
  given = lines.read_input(whole=FLAGS.output is not None or FLAGS.reference is not None)
  reference, metrics = lines.read_reference(given.lines)
  with contextlib.nullcontext() if FLAGS.output is None else open_journal(given.lines, settings) as journal:
    if journal is not None and journal.complete:
      print(f"{FLAGS.output} is complete; remove it and {journal.path.name} to begin anew", file=sys.stderr)
      texts = read_output(len(given.lines))
    else:
      try:
        texts = write(settings, given, journal)
      except KeyboardInterrupt:
        if journal is not None:
          print("stopped; the same command goes on from here", file=sys.stderr)
        raise
  for line in lines.scores(texts, reference, metrics):
    print(line, file=sys.stderr if journal is None else sys.stdout)


def open_journal(texts: list[str], settings: dict[str, Any]) -> Any:
  from decoder.journal import Journal
  from decoder.settings import gather_settings

  target = Path(FLAGS.output).expanduser()
  for name in (*FLAGS.input, *filter(None, [FLAGS.reference])):
    if target.exists() and target.samefile(Path(name).expanduser()):
      raise ValueError(f"--output {FLAGS.output} would overwrite what is read; name another file")
  digest = hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()
  identity = {name: FLAGS[name].value for name in ("model", "dtype", "weights", "split", "output_format")}
  identity["input"] = f"{len(texts)} lines, sha256 {digest[:16]}"
  return Journal(target, identity | {"settings": gather_settings(None, settings).describe()})


def read_output(number: int) -> list[str]:
  """The texts of a file that is complete."""
  texts = lines.read(FLAGS.output)
  if len(texts) != number:
    raise ValueError(f"--output {FLAGS.output} has {len(texts)} lines, the input {number}; it was changed, remove it")
  return [json.loads(text)["text"] for text in texts] if FLAGS.output_format == "json" else texts


def write(settings: dict[str, Any], given: lines.Input, journal: Any) -> list[str]:
  """Writes each line's translation as soon as those before it are there; gives all of them."""
  lm = entry.load(settings)
  from tqdm import tqdm

  from decoder.settings import gather_settings
  from decoder.translating import Lines, translate_windows

  job = Lines(lm, gather_settings(None, settings), FLAGS.batch_tokens, FLAGS.split)
  windows, total = job.windows(given.lines, given.where), None
  if isinstance(given.lines, list):
    windows, total = list(windows), len(given.lines)  # what cannot be translated is refused before any compute
  if journal is not None and journal.records:
    print(f"{FLAGS.output}: going on after {len(journal.records)} batches", file=sys.stderr)
  texts, counts, start = [], collections.Counter(), time.perf_counter()
  number, ended = 0, {reason: [] for reason in ENDS}

  def hear(batch: list[Any]) -> None:
    counts.update(read=sum(len(one.prompt_ids) for one in batch), new=sum(len(one.token_ids) for one in batch))
    counts.update(compiled=batch[0].timings.compile_s)

  with contextlib.ExitStack() as stack:
    out = sys.stdout if journal is None else stack.enter_context(journal.target.open("w", encoding="utf-8"))
    bar = stack.enter_context(tqdm(total=total, unit=" lines", leave=False, disable=None))  # on a terminal
    for number, (source, told) in enumerate(translate_windows(job, windows, journal, hear), 1):
      text, fields = " ".join(told.text.split("\n")), {"text": told.text, "score": told.score, "source": source}
      print(json.dumps(fields, ensure_ascii=False) if FLAGS.output_format == "json" else text, file=out, flush=True)
      texts += [text] if FLAGS.reference is not None else []
      ended.get(told.finish_reason, []).append(given.where(number))
      bar.update()
  if journal is not None:
    journal.finish()
  tell(number, counts, time.perf_counter() - start, ended)
  return texts


def tell(number: int, counts: collections.Counter, seconds: float, ended: dict[str, list[str]]) -> None:
  from decoder.measure.machine import peak_memory

  rate = counts["new"] / max(seconds - counts["compiled"], 1e-9)
  parts = [f"{number} lines, {counts['read']} tokens read, {counts['new']} written in {seconds:.1f} s"]
  parts += [f"{rate:.0f} a second, compiled in {counts['compiled']:.1f} s, peak memory {peak_memory() / 1e9:.2f} GB"]
  print(" · ".join(parts), file=sys.stderr)
  for reason, names in ended.items():
    if names:
      named = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
      print(f"warning: {len(names)} {ENDS[reason]}: {named}", file=sys.stderr)


if __name__ == "__main__":
  entry.run(main)
