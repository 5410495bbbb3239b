"""Where a step's time goes: each moment belongs to one part, and the parts of a real trace add up."""

import jax
import pytest

from decoder.measure import breakdown
from decoder.measure.breakdown import Span, part_of, shares
from decoder.measure.grid import Point


def test_each_moment_belongs_to_what_began_last():
  spans = [
    Span(10, 90, "other"),  # the execution around all
    Span(20, 40, "attention"),
    Span(25, 30, "mlp"),  # within it
    Span(50, 60, "mlp"),
    Span(55, 70, "head"),  # on another thread
    Span(80, 95, "sampling"),  # outlasts what it began in
    Span(200, 300, "mlp"),  # of another call
  ]
  got = shares(spans, 0, 100)
  assert got == {"attention": 15, "mlp": 10, "head": 15, "sampling": 15, "other": 30, "host": 15}
  assert sum(got.values()) == 100
  assert shares(spans[::-1], 0, 100) == got
  assert shares([], 5, 8)["host"] == 3


@pytest.mark.parametrize(
  ("scope", "part"),
  [
    ("jit(program)/while/body/Llama/layers_0/attention/attention/q/dot_general", "attention"),
    ("jit(program)/while/body/Llama/layers_0/mlp/mlp/gate/dot_general", "mlp"),
    ("jit(program)/while/body/sampling/head/Llama.head/dot_general", "head"),
    ("jit(program)/while/body/sampling/vmap()/while/body/add", "sampling"),
    ("jit(program)/while/body/Llama/headless/mul", "other"),
    ("", "other"),
  ],
)
def test_scopes_name_their_part(scope, part):
  assert part_of(scope) == part


def test_a_traced_step_is_told_apart_and_adds_up(lm):
  got = breakdown.measure(lm, Point("float", "float32", 2, 8, 32, 128))
  parts = got["parts_ms"]
  assert set(parts) == set(breakdown.PARTS)
  assert all(ms >= 0 for ms in parts.values())
  for part in ("attention", "mlp", "sampling", "host"):
    assert parts[part] > 0, part
  assert got["whole_ms"] == pytest.approx(sum(parts.values()))
  assert got["untraced_ms"] > 0
  assert got["stored"] == "float32"


def test_the_program_names_its_parts(lm):
  """What the trace is read by: XLA keeps the scopes. Negative control: an unnamed model has none of them."""
  from decoder.types import Model

  def text(model):
    def program(params, x):
      return model.head(params, x)

    return jax.jit(program).lower(lm.params, jax.numpy.ones((2, 32))).compile().as_text()

  named = breakdown.scopes(text(breakdown._named(lm.model)))
  assert "head" in named.values()
  plain = breakdown.scopes(text(Model(lm.model.forward, lambda params, x: x @ params["head"]["weight"].T)))
  assert "head" not in plain.values()
