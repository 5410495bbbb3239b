"""Which of two ways a program takes, where it is known: C++ on CPU, XLA on what else it is compiled for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def native_or_plain(native: Callable, plain: Callable) -> Callable:
  """A function (task, *operands) of two that compute the same of them: `native` on CPU, `plain` elsewhere and for
  derivatives. task: hashable, what is fixed when a program is made; operands: pytrees of arrays."""

  @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
  def chosen(task: Any, *operands: Any) -> Any:
    return lax.platform_dependent(
      *operands, cpu=functools.partial(native, task), default=functools.partial(plain, task)
    )

  @chosen.defjvp
  def _(task: Any, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return chosen(task, *primals), jax.jvp(functools.partial(plain, task), primals, tangents)[1]

  return chosen


def traced_once(chosen: Callable) -> Callable:
  """The same, traced once for each task and shapes, of which many layers have few; inlined, so that programs are as if
  this were not there. Operands are known only when they run, also outside of programs."""
  return jax.jit(chosen, static_argnums=0, inline=True)
