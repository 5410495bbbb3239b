"""Talks with a language model in the terminal; what was said stays in its cache from turn to turn.

Usage:
  python scripts/chat.py --temperature 0.7
The prompt line shows how much of the context is used: [42/8192]. Ctrl-C ends a reply, Ctrl-D the program.
"""

import signal
import sys
from typing import Any

import config
import entry
from absl import flags

FLAGS = flags.FLAGS
entry.define_model_flags()
entry.define_sampling_flags(max_new_tokens=1024, temperature=0.2)
flags.DEFINE_string("system", None, "A system message.")
config.define_flags()
flags.adopt_module_key_flags(entry)
flags.adopt_module_key_flags(config)

HELP = """\
/reset            forget the conversation
/system TEXT      set the system message (and forget the conversation); without TEXT, show it
/set NAME VALUE   change a setting, e.g. /set temperature 0.7; without a name, show all
/help  /exit
A line that ends in \\ goes on in the next; a line of \"\"\" begins and ends a text of several lines."""


class Chat:
  """A session, its history, its settings."""

  def __init__(self, lm: Any, settings: Any, system: str | None):
    self.lm, self.settings, self.system = lm, settings, system
    self.session = lm.session()
    self.reset()

  def reset(self) -> None:
    self.session.clear()
    self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

  def reply(self, text: str) -> None:
    """Streams the answer; what was said before a Ctrl-C stays in the conversation."""
    asked, pieces, pressed = [*self.messages, {"role": "user", "content": text}], None, []

    def interrupt(number: int, frame: Any) -> None:
      pressed.append(number)
      raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
      pieces = self.session.stream(asked, self.settings)
      for piece in pieces:
        print(piece, end="", flush=True)
        if pressed:  # raised within a callback of a library, it was swallowed
          raise KeyboardInterrupt
    except KeyboardInterrupt:
      if pieces is None:  # nothing was read yet: as if it had not been asked
        print("[stopped]", flush=True)
        return
      pieces.close()
      print(" [stopped]", end="")
    finally:
      signal.signal(signal.SIGINT, before)
    print(flush=True)
    self.messages = [*asked, {"role": "assistant", "content": pieces.result.text}]
    if pieces.result.truncated == "context":
      print("[the context is full; /reset to go on]")
    elif pieces.result.finish_reason == "length":
      print(f"[cut at max_new_tokens = {self.settings.max_new_tokens}; /set max_new_tokens N for longer answers]")

  def command(self, line: str) -> None:
    name, _, rest = line[1:].partition(" ")
    if name == "reset":
      self.reset()
    elif name == "system" and rest.strip():
      self.system = rest.strip()
      self.reset()
    elif name == "system":
      print(self.system if self.system is not None else "no system message of yours; the model's own, if it has one")
    elif name == "set":
      self.set(*rest.split(None, 1))
    else:
      print(HELP if name == "help" else f"unknown command /{name}\n{HELP}")

  def set(self, name: str | None = None, value: str | None = None) -> None:
    from decoder.settings import gather_settings

    if value is not None:
      self.settings = gather_settings(self.settings, {name: config.parse(value)})
    shown = {key: now for key, now in self.settings.describe().items() if key not in ("transforms", "n")}
    if name is not None and name not in shown:
      gather_settings(self.settings, {name: None})  # says what is known
    for key, now in shown.items():
      if name in (None, key):
        print(f"{key} = {now}")


def read_text(prompt: str) -> str:
  """One message: a line, lines joined by a backslash, or a block between lines of three quotes."""
  line = input(prompt)
  if line.strip() == '"""':
    lines = []
    while (line := input("... ")).strip() != '"""':
      lines.append(line)
    return "\n".join(lines)
  while line.endswith("\\"):
    line = line[:-1] + "\n" + input("... ")
  return line


def main() -> None:
  from decoder.settings import Settings

  settings, _ = config.gather(entry.sampling_settings())
  lm = entry.load(settings)
  chat = Chat(lm, Settings(**settings), FLAGS.system)
  if sys.stdin.isatty():
    import readline  # noqa: F401  (line editing and history for input())

    print(f"{lm.name}: /help for commands, Ctrl-D to leave.")
  while True:
    try:
      text = read_text(f"[{chat.session.held}/{lm.context}] > ")
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print("  (Ctrl-D or /exit to leave)")
      continue
    if text.strip() in ("/exit", "/quit"):
      return
    try:
      if text.startswith("/"):
        chat.command(text)
      elif text.strip():
        chat.reply(text)
    except ValueError as error:
      print(f"error: {error}")


if __name__ == "__main__":
  entry.run(main)
