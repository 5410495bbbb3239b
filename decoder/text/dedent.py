"""Where does a block of code end? Where a line begins left of it.

Text comes in deltas. Only line breaks and the space before a line's first character are held back, and only as long as
that line may still begin left of the block; lines without a character tell nothing.
"""

_TAB = 8  # columns, as in Python's own grammar


def indentation(text: str) -> int | None:
  """Columns before the first character of the text's last line; None where that line is empty."""
  line = text[text.rfind("\n") + 1 :]
  return _columns(line[: len(line) - len(line.lstrip())]) if line else None


class Dedent:
  """Cuts a stream of text before the first line that begins left of column `indent`; nothing of the line breaks before
  it is left. indent: None takes that of the first line that is written. One object per stream."""

  def __init__(self, indent: int | None):
    self._indent = indent
    self._held = "" if indent is not None else "\n"  # as if the line before had just ended
    self._shown = indent is not None
    self._fired = False

  def feed(self, delta: str, *, match: bool = True) -> tuple[str, bool]:
    """(text now safe to emit, whether the block has ended). Afterwards there is no more text.

    match: False lets lines that begin left of the block in `delta` pass.
    """
    if self._fired:
      return "", True
    parts = []
    for char in delta:
      if not self._held and char not in "\r\n":
        parts.append(char)
        continue
      self._held += char
      if char.isspace() and not self._is_inside():
        continue
      if not self._is_inside(char) and match:
        self._held, self._fired = "", True
        break
      parts.append(self._take())
    return "".join(parts), self._fired

  def finish(self) -> str:
    """The text held back; the stream is over."""
    return self._take()

  def _is_inside(self, char: str = " ") -> bool:
    """Whether the line that is held begins inside the block, as far as is known from its space and first `char`."""
    line = self._held[self._held.rfind("\n") + 1 :]
    column = _columns(line[: len(line) - len(line.lstrip())])
    if self._indent is None:
      if char.isspace():
        return False
      self._indent = column
    return column >= self._indent

  def _take(self) -> str:
    text, self._held = self._held, ""
    if not self._shown:
      text, self._shown = text[1:], True  # the line break that was not written
    return text


def _columns(space: str) -> int:
  return len(space.replace("\r", "").expandtabs(_TAB))
