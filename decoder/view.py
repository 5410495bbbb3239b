"""A Result to look at: tokens coloured by how probable they were, alternatives where one points at them.

`show(result)` is drawn by notebooks as HTML and printed by terminals as tables; `page()` is an HTML file that needs
nothing else. Everything a model wrote is escaped. It shows what the Result holds: ask for logprobs, prompt_logprobs or
explain when generating.
"""

import codecs
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from decoder.result import Explanation, Result, TokenLogprob

_FAINTEST = math.log(1000)  # a token of probability 1/1000 has the deepest colour
_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_ROOM = "padding: 0 16em 12em 0"  # for the cards of the last tokens: a notebook cuts off what its output does not hold
_STYLE = """
.decoder-view { font: 15px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.decoder-view .note { font: 13px/1.4 system-ui, sans-serif; color: #777; margin: .4em 0; white-space: normal; }
.decoder-view .t { position: relative; unicode-bidi: isolate; border-radius: 3px; outline: 1px solid rgba(128,128,128,.2); cursor: help; }
.decoder-view .mark { color: #888; font-size: .8em; }
.decoder-view .prompt > .t { color: color-mix(in srgb, currentcolor 70%, transparent); }
.decoder-view .card { display: none; position: absolute; left: 0; top: 1.7em; z-index: 9; padding: .5em .7em; background: #fff;
  color: #111; border: 1px solid #aaa; border-radius: 5px; font-size: 13px; line-height: 1.4; white-space: pre; }
.decoder-view .t:hover > .card, .decoder-view .t:focus > .card { display: block; }
.decoder-view td { padding: 0 .6em 0 0; text-align: right; } .decoder-view td.w { text-align: left; }
.decoder-view .drawn { font-weight: bold; }
""".strip()  # noqa: E501


class View:
  """What `show` gives: `_repr_html_` for notebooks, str() for terminals, page() for a file."""

  def __init__(self, results: Sequence[Result]):
    self._results = list(results)

  def __str__(self) -> str:
    parts = [_tables(result) for result in self._results]
    if len(parts) > 1:
      parts = [f"── {number} ──\n{part}" for number, part in enumerate(parts, 1)]
    return "\n".join(parts)

  def _repr_html_(self) -> str:
    views = "".join(_html(result) for result in self._results)
    return f'<style>{_STYLE}</style><div style="{_ROOM}">{views}</div>'

  def page(self) -> str:
    """A whole HTML document."""
    return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Tokens by probability</title></head>'
      f'<body style="margin: 2em; padding-bottom: 8em">{self._repr_html_()}</body></html>\n'
    )


def show(results: Result | Sequence[Result]) -> View:
  """A view of one Result or of several. ValueError for one without logprobs, prompt_logprobs or explanation."""
  results = [results] if isinstance(results, Result) else list(results)
  for result in results:
    if not isinstance(result, Result):
      raise ValueError(f"show() wants a Result of generate(), got {type(result).__name__}")
    if result.logprobs is None and result.explanation is None and result.prompt_logprobs is None:
      raise ValueError("this result tells nothing of its tokens; generate it with logprobs=5, say, or explain=True")
  return View(results)


def visible(text: str | None, token: int) -> str:
  """A token's text with blanks and control characters to be seen; its id where there is no text."""
  if not text:
    return f"#{token}"
  return "".join(_VISIBLE.get(c) or _picture(c) for c in text)


def _picture(character: str) -> str:
  """Characters that HTML forbids or that move others about stand for themselves only in pictures."""
  code = ord(character)
  if code < 32 and character not in "\n\t":
    return chr(0x2400 + code)
  return (
    "�" if code == 127 or 0x80 <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 else character
  )


# ---- HTML ----


def _html(result: Result) -> str:
  parts = []
  if result.prompt_logprobs is not None:
    known = [one for one in result.prompt_logprobs if one is not None]
    parts.append(f'<span class="prompt">{"".join(_spans(known, [None] * len(known)))}</span>')
  steps = result.explanation or [None] * len(result.logprobs or ())
  parts += _spans(result.logprobs or [None] * len(steps), steps)
  return f'<div class="decoder-view" dir="auto"><div class="note">{_summary(result)}</div>{"".join(parts)}</div>'


def _summary(result: Result) -> str:
  said = [f"{len(result.token_ids)} tokens, finish {result.finish_reason}"]
  drawn = result.logprobs or ()
  if drawn:
    mean = sum(one.logprob for one in drawn) / len(drawn)
    said.append(f"mean log-prob {mean:.3f} ({result.settings.logprobs_mode})")
  scale = "".join(f'<span class="t" style="{_colour(math.log(p))}">{p:g}</span> ' for p in (1, 0.5, 0.1, 0.01, 0.001))
  return html.escape(" · ".join(said)) + f" · probability {scale}"


def _spans(tokens: Iterable[TokenLogprob | None], steps: Iterable[Explanation | None]) -> list[str]:
  """One span a token. Bytes of a character that later tokens complete are shown as such, then the character."""
  utf8, spans = codecs.getincrementaldecoder("utf-8")("replace"), []
  for one, step in zip(tokens, steps):
    known: Any = one or step
    data = one.bytes if one is not None else (known.token or "").encode()
    if not data:
      face = f'<span class="mark">#{known.id}</span>'
    else:
      text = utf8.decode(data)
      face = _face(text) if text else f'<span class="mark">⟨{data.hex(" ")}⟩</span>'
    logprob = one.logprob if one is not None else _log(step.before)
    card = (_alternatives(one) if one is not None else "") + (_changes(step) if step is not None else "")
    spans.append(
      f'<span class="t" tabindex="0" style="{_colour(logprob)}">{face}<span class="card">{card}</span></span>'
    )
  return spans


def _face(text: str) -> str:
  shown = html.escape("".join(_picture(c) for c in text))
  return shown.replace("\n", '<span class="mark">↵</span>\n')


def _colour(logprob: float) -> str:
  depth = min(1.0, -logprob / _FAINTEST) if logprob < 0 else 0.0
  return f"background: rgba(225, 95, 0, {0.75 * depth:.3f})"


def _log(probability: float) -> float:
  return math.log(probability) if probability > 0 else -math.inf


def _alternatives(one: TokenLogprob) -> str:
  rows = [(a.logprob, a.token, a.id) for a in one.alternatives]
  if one.id not in [token for *_, token in rows]:
    rows.append((one.logprob, one.token, one.id))
  cells = [
    f"<tr{' class=drawn' if token == one.id else ''}><td>{_percent(logprob)}</td>"
    f'<td class="w">{html.escape(visible(text, token))}</td><td>{token}</td></tr>'
    for logprob, text, token in rows
  ]
  head = '<tr><td></td><td class="w">token</td><td>id</td></tr>'
  return f"rank {one.rank}, log-prob {one.logprob:.3f}<table>{head}{''.join(cells)}</table>"


def _changes(step: Explanation) -> str:
  rows = [
    f'<tr><td class="w">{html.escape(c.transform)}</td><td>{c.kept}</td><td>{c.removed or ""}</td>'
    f"<td>{_percent(_log(c.probability))}</td><td>{'took the most probable' if c.best_removed else ''}</td></tr>"
    for c in _effective(step)
  ]
  head = "<tr><td></td><td>kept</td><td>removed</td><td>then</td><td></td></tr>"
  return f"by the model {_percent(_log(step.before))}<table>{head}{''.join(rows)}</table>"


def _percent(logprob: float) -> str:
  return f"{100 * math.exp(logprob):.2f} %"


# ---- tables ----


def _tables(result: Result) -> str:
  count = max(len(result.logprobs or ()), len(result.explanation or ()))
  lines = []
  for one in result.prompt_logprobs or ():
    if one is not None:
      lines.append(f"prompt {_line(one)}")
  for number in range(count):
    one = result.logprobs[number] if result.logprobs is not None else None
    step = result.explanation[number] if result.explanation is not None else None
    lines.append(f"{number + 1:5d}  " + (_line(one) if one is not None else f"{visible(step.token, step.id):16s}"))
    lines += _steps(step) if step is not None else []
  return "\n".join(lines)


def _line(one: TokenLogprob) -> str:
  others = "  ".join(f"{visible(a.token, a.id)} {math.exp(a.logprob):.3f}" for a in one.alternatives)
  return f"{visible(one.token, one.id):16s} p {math.exp(one.logprob):.4f}  rank {one.rank:<5d} {others}".rstrip()


def _steps(step: Explanation) -> list[str]:
  lines = [f"         {'':20s} {'kept':>7s} {'removed':>8s} {'p(token)':>9s}"]
  lines.append(f"         {'model':20s} {'':7s} {'':8s} {step.before:9.4f}")
  for change in _effective(step):
    took = "  took the most probable" if change.best_removed else ""
    numbers = f"{change.kept:7d} {change.removed or '':>8} {change.probability:9.4f}"
    lines.append(f"         {change.transform:20s} {numbers}{took}")
  return lines


def _effective(step: Explanation) -> list[Any]:
  """The changes that changed anything; the last one, if none did."""
  found, before = [], step.before
  for change in step.changes:
    if change.removed or not math.isclose(change.probability, before, rel_tol=1e-5):
      found.append(change)
    before = change.probability
  return found or list(step.changes[-1:])
