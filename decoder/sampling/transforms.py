"""Changes to one row's logits before the draw: "optax for logits".

A LogitTransform is a triple of pure functions for one row, vmapped by the strategy. Its numbers live in its state, so
changing a setting compiles nothing; the order of a chain is structure. A token is removed by giving it −inf. Logits
are float32; ids ≥ the tokenizer's size and whatever was masked before already stand at −inf. This file holds what all
transforms share: the protocol, `chain`, and how those that no row uses are skipped.
"""

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder.sampling.law import Change, Law, Part, closed, opened, widened
from decoder.sampling.selection import only_if
from decoder.types import Array, Key


class Context(NamedTuple):
  """What a row has seen, and where it ends.

  tokens_L: prompt and output, valid before `length`, which is also the position of the token to be drawn. prompt:
  tokens of the prompt. ends_E: ids that end the row, NONE where there are fewer. limit: the length at which it ends.
  key: of this position. The draw itself uses it with every token id, so a transform that is random folds a number of
  its own ≥ 2³¹ into it.
  """

  tokens_L: Array
  length: Array
  prompt: Array
  ends_E: Array | None = None
  limit: Array | None = None
  key: Key | None = None


def _nothing_to_note(state: Any, token: Array, logits_V: Array) -> Any:
  return state


class LogitTransform(NamedTuple):
  """init: () -> state, a pytree of scalars or arrays for one row. Arrays of one row that are shorter than another's
    are padded at their ends with NONE.
  update: (logits_V, state, context) -> logits_V.
  observe: (state, token, logits_V) -> state, once a token was drawn from logits_V, the chain's last.
  """

  init: Callable[[], Any]
  update: Callable[[Array, Any, Context], Array]
  observe: Callable[[Any, Array, Array], Any] = _nothing_to_note


@dataclasses.dataclass(frozen=True)
class Skipped:
  """An update that is skipped where no row's state makes it `active`. change: (logits_V, state, context) -> logits_V,
  on what is active; its context has no key."""

  active: Callable[[Any], Array]
  change: Callable[[Array, Any, Context], Array]

  def __call__(self, logits_V: Array, state: Any, context: Context) -> Array:
    return only_if(self.active(state), self.change, logits_V, state, context._replace(key=None))

  @property
  def name(self) -> str:
    """What the transform is called."""
    return self.change.__name__


@dataclasses.dataclass(frozen=True)
class Added:
  """An update that adds to the logits of some ids, −inf to forbid them; skipped like `Skipped`. additions: (state,
  context) -> (ids_N, bias_N); an id of NONE is none. Several in a row are added at once."""

  active: Callable[[Any], Array]
  additions: Callable[[Any, Context], tuple[Array, Array]]

  def __call__(self, logits_V: Array, state: Any, context: Context) -> Array:
    return _add((self,), (state,), logits_V, context)

  @property
  def name(self) -> str:
    """What the transform is called."""
    return self.additions.__name__


def _add(links: Sequence[Added], states: tuple, logits_V: Array, context: Context) -> Array:
  def once(logits_V: Array, states: tuple, row: Context) -> Array:
    added = [link.additions(state, row) for link, state in zip(links, states)]
    ids_N, bias_N = (jnp.concatenate(parts) for parts in zip(*added))
    return logits_V.at[jnp.where(ids_N < 0, logits_V.shape[0], ids_N)].add(bias_N, mode="drop")

  return only_if(_any_active(links, states), once, logits_V, states, context._replace(key=None))


@dataclasses.dataclass(frozen=True)
class Filter:
  """An update that removes tokens, knowing them by their logits alone; skipped like `Skipped`. Several in a row share
  one `Law`.

  change: what it does to logits of any number, see `law.Change`; chance: a random number in [0, 1) where it has a tag,
  which is folded into the key. narrow: (law, state, chance) -> Part, what it leaves of the law's list, and whether that
  is everything; None: the change, which says nothing of laws that have more than the list.
  """

  active: Callable[[Any], Array]
  change: Change
  narrow: Callable[[Law, Any, Array], Part] | None = None
  tag: int | None = None

  def __call__(self, logits_V: Array, state: Any, context: Context) -> Array:
    return _filter((self,), (state,), logits_V, context)

  @property
  def name(self) -> str:
    """What the transform is called."""
    return self.change.__name__

  def on(self, law: Law, state: Any, words: Array | None) -> Law:
    """The law that it leaves. words: of the row's key."""
    active, chance = self.active(state), jnp.float32(0)
    if self.tag is not None:
      chance = only_if(active, self._drawn, chance, words)
    left = only_if(active, self._narrowed, Part(law.top_C, law.few), law, state, chance)
    return widened(law._replace(top_C=left.top_C, few=left.few), active, self.change, state, chance)

  def _narrowed(self, part: Part, law: Law, state: Any, chance: Array) -> Part:
    if self.narrow is not None:
      return self.narrow(law, state, chance)
    return part._replace(top_C=self.change(law.top_C, law.ids_C, state, chance))

  def _drawn(self, _: Array, words: Array) -> Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(words), np.uint32(self.tag)))


def _filter(links: Sequence[Filter], states: tuple, logits_V: Array, context: Context) -> Array:
  def run(logits_V: Array, states: tuple, words: Array | None) -> Array:
    law = opened(logits_V)
    for link, state in zip(links, states):
      law = link.on(law, state, words)
    return closed(law)

  return only_if(_any_active(links, states), run, logits_V, states, _words(context))


def _words(context: Context) -> Array | None:
  return None if context.key is None else jax.random.key_data(context.key)


def _any_active(links: Sequence[Any], states: Sequence[Any]) -> Array:
  return jnp.stack([link.active(state) for link, state in zip(links, states)]).any()


@dataclasses.dataclass(frozen=True)
class _Update:
  """Functions one after another. Equal and hashed by them, so that two chains of one order share a compilation."""

  links: tuple[Callable, ...]

  def __call__(self, logits_V: Array, state: tuple, context: Context) -> Array:
    for together, run in self._runs(state):
      if together is not None:
        logits_V = together(*zip(*run), logits_V, context)
      else:
        for change, part in run:
          logits_V = _changed(change, logits_V, part, context)
    return logits_V

  def steps(self, logits_V: Array, state: tuple, context: Context) -> Iterator[Array]:
    """What each of `names` leaves, one after another."""
    for together, run in self._runs(state):
      law = opened(logits_V) if together is _filter else None
      for change, part in run:
        if law is not None:
          law = change.on(law, part, _words(context))
          logits_V = closed(law)
        elif isinstance(change, _Together):
          *between, logits_V = change.inner.steps(logits_V, part, context)
          yield from between
        else:
          logits_V = _changed(change, logits_V, part, context)
        yield logits_V

  def _runs(self, state: tuple) -> Iterator[tuple]:
    """Links with their states; those of a kind that works together as one, with what does."""
    for kind, run in itertools.groupby(zip(self.links, state), lambda pair: type(pair[0])):
      yield {Added: _add, Filter: _filter}.get(kind), list(run)

  @property
  def names(self) -> tuple[str, ...]:
    """What the links are called, each of those that are skipped together too."""
    parts = ((change.inner.names if isinstance(change, _Together) else (_name(change),)) for change in self.links)
    return tuple(name for part in parts for name in part)

  def active(self, state: tuple) -> Array:
    """Whether any link is; all must be `Skipped` or `Added`."""
    return _any_active(self.links, state)


@dataclasses.dataclass(frozen=True)
class _Together:
  """A chain of updates, skipped as one where no row's state makes any of them active."""

  inner: _Update

  def __call__(self, logits_V: Array, state: tuple, context: Context) -> Array:
    return only_if(self.inner.active(state), self.inner, logits_V, state, context._replace(key=None))


@dataclasses.dataclass(frozen=True)
class _Observe:
  """Like `_Update`, for what is drawn."""

  links: tuple[Callable, ...]

  def __call__(self, state: tuple, token: Array, logits_V: Array) -> tuple:
    return tuple(note(part, token, logits_V) for note, part in zip(self.links, state))


def chain(*transforms: LogitTransform) -> LogitTransform:
  """The transforms one after another, each on what the one before it left."""
  update, observe = _Update(tuple(t.update for t in transforms)), _Observe(tuple(t.observe for t in transforms))
  return LogitTransform(lambda: tuple(t.init() for t in transforms), update, observe)


def skipped_together(*transforms: LogitTransform) -> LogitTransform:
  """A chain of transforms that are rarely used: where none is, all are skipped at the price of one. All must be
  `Skipped` or `Added`."""
  inner = chain(*transforms)
  return inner._replace(update=_Together(inner.update))


def _changed(change: Callable, logits_V: Array, state: Any, context: Context) -> Array:
  changed_V = change(logits_V, state, context)
  if jnp.shape(changed_V) != logits_V.shape:
    got = jnp.shape(changed_V)
    raise ValueError(f"transform {_name(change)} must give logits of shape {logits_V.shape}, got {got}")
  return jnp.asarray(changed_V, logits_V.dtype)


def _name(change: Callable) -> str:
  name = change.name if isinstance(change, Skipped | Added | Filter) else getattr(change, "__name__", str(change))
  return name.strip("_")


def check(name: str, value: Any, good: Callable[[Any], bool], want: str) -> None:
  """ValueError that names the setting unless `value` is a finite number that is good."""
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number or not np.isfinite(value) or not good(value):
    raise ValueError(f"{name} must be {want}, got {value!r}")
