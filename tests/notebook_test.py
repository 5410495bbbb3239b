"""The notebook for Colab: a clean file of cells that compile; run top to bottom on a CPU, it shows what it promises."""

import ast
import copy
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import default_model
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "scripts" / "decoder_on_tpu.ipynb"
KNOWN = {*sys.stdlib_module_names, "IPython", "decoder", "ipywidgets", "jax"}
SECONDS = 300  # on two cores that do nothing else
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(work|home|root|tmp|content|Users|opt|usr)\b|\b[A-Z]:\\")

# What a reader must find, by what it is: a pattern in the outputs of one type.
PROMISED = {
  "devices": ("text/plain", r"6 × cpu"),
  "model": ("text/plain", r"135 million parameters"),
  "streamed text": ("text/plain", r"Paris[\s\S]*tokens a second"),
  "sliders": ("application/vnd.jupyter.widget-view+json", r"model_id"),
  "heat-map": ("text/html", r'class="decoder-view"[\s\S]*<table>'),
  "guesses": ("text/plain", r"the same text: True"),
  "refusal": ("text/plain", r"tensor=6,data=1 is refused: [\s\S]*tensor=3,data=2 is possible"),
  "parts": ("text/plain", r"query +576 × 576 +of which each device holds +192 × 576"),
  "rows alike": ("text/plain", r"the same text in 16 of 16 rows"),
  "roof": ("text/plain", r"% of the roof"),
  "plot": ("image/png", r"^iVBOR"),
}


def read() -> nbformat.NotebookNode:
  return nbformat.read(NOTEBOOK, as_version=4)


def faults(book: nbformat.NotebookNode) -> list[str]:
  """What is wrong with a notebook as a file."""
  try:
    nbformat.validate(book)
  except nbformat.ValidationError as error:
    return [f"no notebook: {error.message}"]
  wrong = []
  for number, cell in enumerate(book.cells):
    if MACHINE_PATH.search(cell.source):
      wrong.append(f"cell {number} names a path of some machine")
    if cell.cell_type != "code":
      continue
    if cell.outputs or cell.execution_count is not None:
      wrong.append(f"cell {number} holds outputs")
    try:
      tree = ast.parse(cell.source)
    except SyntaxError as error:
      wrong.append(f"cell {number} does not compile: {error}")
      continue
    wrong += [f"cell {number} imports {name}" for name in sorted(imported(tree) - KNOWN)]
  return wrong


def imported(tree: ast.AST) -> set[str]:
  """The packages that a source imports."""
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names.append(node.module)
  return {name.split(".")[0] for name in names}


def missing(book: nbformat.NotebookNode) -> list[str]:
  """What of PROMISED no output holds."""
  shown: dict[str, str] = {}
  for cell in book.cells:
    for output in cell.get("outputs", ()):
      data = {"text/plain": output.text} if output.output_type == "stream" else output.get("data", {})
      for kind, value in data.items():
        shown[kind] = shown.get(kind, "") + str(value)
  return [name for name, (kind, pattern) in PROMISED.items() if not re.search(pattern, shown.get(kind, ""))]


def test_the_file_is_clean():
  book = read()
  assert faults(book) == []
  assert sum(cell.cell_type == "code" for cell in book.cells) > 8
  assert missing(book) == list(PROMISED)  # control: what is not run shows nothing


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ({"source": "import torch"}, "imports torch"),
    ({"source": "from tensorflow import io"}, "imports tensorflow"),
    ({"source": "%pip install x"}, "does not compile"),
    ({"source": "open('/home/me/x')"}, "names a path"),
    ({"execution_count": 3}, "holds outputs"),
    ({"outputs": [nbformat.v4.new_output("stream", text="x")]}, "holds outputs"),
    ({"outputs": None}, "no notebook"),
  ],
)
def test_a_fault_is_found(change, says):
  """Negative control."""
  book = copy.deepcopy(read())
  next(cell for cell in book.cells if cell.cell_type == "code").update(change)
  (fault,) = faults(book)
  assert says in fault


def test_without_sliders_there_are_numbers_to_change(monkeypatch, capsys):
  (cell,) = (cell for cell in read().cells if cell.cell_type == "code" and "ipywidgets" in cell.source)
  monkeypatch.setitem(sys.modules, "ipywidgets", None)
  asked = []

  def generate(prompt, **settings):
    asked.append(settings)
    return SimpleNamespace(text=" walked away.")

  exec(compile(cell.source, NOTEBOOK.name, "exec"), {"lm": SimpleNamespace(generate=generate)})
  printed = capsys.readouterr().out
  assert "ipywidgets is not installed" in printed
  assert "robot walked away." in printed
  assert {"temperature", "top_p", "seed"} < set(asked[0])


@pytest.mark.slow
def test_it_runs_top_to_bottom_and_shows_what_it_promises(monkeypatch, tmp_path):
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.delenv("XLA_FLAGS", raising=False)  # compiled as users do
  book, start = read(), time.monotonic()
  client = NotebookClient(book, timeout=2 * SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
  try:
    client.execute()
  except CellExecutionError as error:
    if "cannot download" in str(error):
      default_model.load_or_skip()  # skips only where there is no network
    raise
  seconds = time.monotonic() - start
  assert missing(book) == []
  assert "Once upon a time, a small robot" in str(book.metadata.widgets)  # what the sliders wrote, below them
  warned = [o.text for cell in book.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"]
  assert [text for text in warned if not text.startswith("fetching smollm2-135m-instruct")] == []  # said the first time
  assert list(tmp_path.iterdir()) == []  # it leaves nothing behind where it runs
  assert seconds <= SECONDS
