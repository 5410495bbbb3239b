"""Chat templates: what templates expect is there, strangers' code cannot act, errors say what to do."""

import datetime

import pytest

from decoder.text import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def test_special_tokens_and_variables_reach_the_template():
  template = ChatTemplate(
    "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ x }}{{ missing }}",
    {"bos_token": "<s>", "eos_token": "</s>"},
  )
  assert template.render(USER, x=3) == "<s>Hi</s>3"
  assert ChatTemplate("{{ bos_token }}|{{ messages[0].content }}").render(USER) == "|Hi"  # C55: no special token at all


def test_blocks_are_trimmed_and_json_is_not_escaped_for_html():
  source = "{% for m in messages %}\n  {% if loop.first %}\n{{ m | tojson }}\n  {% endif %}\n{% endfor %}\nend"
  assert (
    ChatTemplate(source).render([{"role": "user", "content": "<é & '>"}])
    == '{"role": "user", "content": "<é & \'>"}\nend'
  )


def test_loop_controls_generation_tag_and_generation_prompt():
  source = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
  )
  messages = [{"role": role, "content": role[0]} for role in ("user", "tool", "assistant", "user")]
  assert ChatTemplate(source).render(messages) == "ua>"
  assert ChatTemplate(source).render(messages, add_generation_prompt=False) == "ua"


def test_tools_are_none_unless_given():
  source = "{{ tools is none }}{{ documents is none }}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}"
  assert ChatTemplate(source).render(USER) == "TrueTrue"
  assert ChatTemplate(source).render(USER, tools=[1]) == "FalseTrue[\n 1\n]"


def test_the_date_is_now_or_what_the_caller_says():
  template = ChatTemplate("{{ strftime_now('%Y') }}")
  assert abs(int(template.render(USER)) - datetime.datetime.now().year) <= 1
  assert template.render(USER, strftime_now=lambda _: "1999") == "1999"


def test_text_parts_become_one_string_and_messages_stay_as_they_were():
  messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
  assert ChatTemplate("{{ messages[0].content }}").render(messages) == "ab"
  assert isinstance(messages[0]["content"], list)


def test_an_assistant_may_only_call_tools():
  messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
  assert ChatTemplate("{{ messages[1].tool_calls[0].name }}").render(messages) == "f"


@pytest.mark.parametrize(
  ("messages", "match"),
  [
    ([], "at least one"),
    ("Hi", "wanted a list"),
    ({"role": "user", "content": "Hi"}, "wanted a list"),
    (["Hi"], r"messages\[0\]: wanted a mapping"),
    ([{"content": "Hi"}], r"messages\[0\]: wanted a role"),
    ([{"role": 3, "content": "Hi"}], "wanted a role"),
    ([{"role": "user"}], "without content"),
    ([*USER, {"role": "user", "content": 5}], r"messages\[1\]: wanted content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "wanted content"),
    ([{"role": "user", "content": b"Hi"}], "wanted content"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
  ],
)
def test_malformed_messages_say_what_was_wanted(messages, match):
  with pytest.raises(ValueError, match=match):
    ChatTemplate("x").render(messages)


@pytest.mark.parametrize(
  ("source", "match"),
  [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[0].content + 3 }}", "TypeError"),
    ("{{ missing.field }}", "missing"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined|__mro__"),
    ("{{ messages.append(1) }}", "unsafe|not safe"),
    ("{% include 'x' %}", "refused|failed"),
  ],
)
def test_template_errors_are_value_errors(source, match):
  with pytest.raises(ValueError, match=match):
    ChatTemplate(source).render(USER)


def test_a_broken_template_names_its_line():
  with pytest.raises(ValueError, match="line 2"):
    ChatTemplate("a\n{% if %}")
  with pytest.raises(ValueError, match="wanted Jinja source"):
    ChatTemplate(None)
