"""How does a conversation become the one string a model was trained to read?

By the Jinja template that came with the checkpoint, rendered with what templates written for Hugging Face expect to
find. A template is code from strangers, so it runs in a sandbox that cannot change what it is given. Encoding is
`tokenizer.py`.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

_MESSAGE_SHAPE = 'a mapping such as {"role": "user", "content": "Hi"}'


class ChatTemplate:
  """A compiled template. `special_tokens` become variables, for example {"bos_token": "<s>", "eos_token": "</s>"}."""

  def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
    import jinja2

    if not isinstance(source, str):
      raise ValueError(f"chat template: wanted Jinja source, got {type(source).__name__}; name one of its templates")
    self.source = source
    self._special_tokens = dict(special_tokens or {})
    try:
      self._template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(f"chat template: line {error.lineno}: {error.message}; correct the template") from error

  def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables) -> str:
    """The prompt for these messages; `add_generation_prompt` ends it where the model's reply begins.

    A content of text parts is handed over as one string. `variables` (tools, documents, enable_thinking, ...) go to the
    template as they are. Raises ValueError for a malformed message and for what the template itself refuses.
    """
    import jinja2

    given = {"tools": None, "documents": None, **self._special_tokens, **variables}
    given |= {"messages": _checked(messages), "add_generation_prompt": add_generation_prompt}
    try:
      return self._template.render(given)
    except jinja2.UndefinedError as error:
      raise ValueError(
        f"chat template: {error.message}; give the messages what the template reads, or pass it as a variable"
      ) from error
    except jinja2.TemplateError as error:
      raise ValueError(
        f"chat template refused the messages: {error.message}; change the messages to what it accepts"
      ) from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
      raise ValueError(
        f"chat template failed on these messages: {type(error).__name__}: {error}; "
        "check the types of their contents, and of the variables passed"
      ) from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
    raise ValueError(f"messages: wanted a list of messages, got {type(messages).__name__}; pass [{_MESSAGE_SHAPE}]")
  if not messages:
    raise ValueError(f"messages: wanted at least one, got none; pass [{_MESSAGE_SHAPE}]")
  return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
  where = f"messages[{index}]"
  if not isinstance(message, Mapping):
    raise ValueError(f"{where}: wanted {_MESSAGE_SHAPE}, got {type(message).__name__}")
  role = message.get("role")
  if not isinstance(role, str) or not role:
    raise ValueError(
      f"{where}: wanted a role (a string such as 'system', 'user', 'assistant', 'tool'), got {role!r}; "
      "add it to the message"
    )
  content = message.get("content")
  if content is None and role in ("system", "user"):
    raise ValueError(f"{where}: a {role} message without content; give it a string")
  if content is None or isinstance(content, str):
    return dict(message)
  if isinstance(content, Mapping) or not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
    raise ValueError(
      f"{where}: wanted content as a string or a list of parts, got {type(content).__name__}; pass a string"
    )
  return {**message, "content": "".join([_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)])}


def _part_text(where: str, part: Any) -> str:
  if isinstance(part, str):
    return part
  if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
    got = f"type {part.get('type')!r}" if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f'{where}: wanted {{"type": "text", "text": "..."}}, got {got}; models here read text only')
  return part["text"]


@functools.cache
def _environment():
  from jinja2.ext import Extension, loopcontrols
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  class Generation(Extension):
    """`{% generation %}` marks an assistant's text for training masks; here it is only its body."""

    tags = frozenset({"generation"})

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
  import jinja2

  raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
  return datetime.datetime.now().strftime(format_)
