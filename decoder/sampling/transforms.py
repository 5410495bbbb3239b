"""Changes to one row's logits before the draw: "optax for logits".

A LogitTransform is a triple of pure functions for one row, vmapped by the strategy. Its numbers live in its state, so
changing a setting compiles nothing; the order of a chain is structure. A token is removed by giving it −inf. Logits
are float32; ids ≥ the tokenizer's size and whatever was masked before already stand at −inf. This file holds what all
transforms share: the protocol, `chain`, and how those that no row uses are skipped.
"""

import itertools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder.sampling.selection import FEW, head, only_if
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


class Skipped(NamedTuple):
  """An update that is skipped where no row's state makes it `active`.

  change: (logits_V, state, context) -> logits_V, on what is active. It must depend on the logits, the state or
  context.length: XLA would do the rest of its work in any case. tag: folded into the key of a random one; the others
  are given none.
  """

  active: Callable[[Any], Array]
  change: Callable[[Array, Any, Context], Array]
  tag: int | None = None

  def __call__(self, logits_V: Array, state: Any, context: Context) -> Array:
    words = None if self.tag is None else jax.random.key_data(context.key)

    def once(logits_V: Array, state: Any, length: Array, words: Array | None) -> Array:
      key = None if words is None else jax.random.fold_in(jax.random.wrap_key_data(words), np.uint32(self.tag))
      return self.change(logits_V, state, context._replace(length=length, key=key))

    return only_if(self.active(state), once, logits_V, state, context.length, words)

  @property
  def name(self) -> str:
    """What the transform is called."""
    return self.change.__name__


class Added(NamedTuple):
  """An update that adds to the logits of some ids, −inf to forbid them; skipped like `Skipped`. additions: (state,
  context) -> (ids_N, bias_N); an id of NONE is none. Several in a row are added at once."""

  active: Callable[[Any], Array]
  additions: Callable[[Any, Context], tuple[Array, Array]]

  def __call__(self, logits_V: Array, state: Any, context: Context) -> Array:
    return _add((self,), logits_V, (state,), context)

  @property
  def name(self) -> str:
    """What the transform is called."""
    return self.additions.__name__


def _add(links: Sequence[Added], logits_V: Array, states: tuple, context: Context) -> Array:
  def once(logits_V: Array, states: tuple, length: Array) -> Array:
    row = context._replace(length=length, key=None)
    added = [link.additions(state, row) for link, state in zip(links, states)]
    ids_N, bias_N = (jnp.concatenate(parts) for parts in zip(*added))
    return logits_V.at[jnp.where(ids_N < 0, logits_V.shape[0], ids_N)].add(bias_N, mode="drop")

  needed = jnp.stack([link.active(state) for link, state in zip(links, states)]).any()
  return only_if(needed, once, logits_V, states, context.length)


class _Update(NamedTuple):
  """Functions one after another. Equal and hashed by them, so that two chains of one order share a compilation."""

  links: tuple[Callable, ...]

  def __call__(self, logits_V: Array, state: tuple, context: Context) -> Array:
    for adds, run in itertools.groupby(zip(self.links, state), lambda pair: isinstance(pair[0], Added)):
      if adds:
        links, parts = zip(*run)
        logits_V = _add(links, logits_V, parts, context)
      else:
        for change, part in run:
          logits_V = _changed(change, logits_V, part, context)
    return logits_V

  def steps(self, logits_V: Array, state: tuple, context: Context) -> Iterator[Array]:
    """What each of `names` leaves, one after another."""
    for change, part in zip(self.links, state):
      if isinstance(change, _Together):
        *between, logits_V = change.inner.steps(logits_V, part, context)
        yield from between
      else:
        logits_V = _changed(change, logits_V, part, context)
      yield logits_V

  @property
  def names(self) -> tuple[str, ...]:
    """What the links are called, each of those that are skipped together too."""
    parts = ((change.inner.names if isinstance(change, _Together) else (_name(change),)) for change in self.links)
    return tuple(name for part in parts for name in part)

  def active(self, state: tuple) -> Array:
    """Whether any link is; all must be `Skipped` or `Added`."""
    return jnp.stack([link.active(part) for link, part in zip(self.links, state)]).any()


class _Together(NamedTuple):
  """A chain of updates, skipped as one where no row's state makes any of them active. run: how they are called."""

  inner: _Update
  run: Callable[[Callable, Array, Any, Context], Array]

  def __call__(self, logits_V: Array, state: tuple, context: Context) -> Array:
    words = None if context.key is None else jax.random.key_data(context.key)

    def once(logits_V: Array, state: tuple, length: Array, words: Array | None) -> Array:
      key = None if words is None else jax.random.wrap_key_data(words)
      return self.run(self.inner, logits_V, state, context._replace(length=length, key=key))

    return only_if(self.inner.active(state), once, logits_V, state, context.length, words)


class _Observe(NamedTuple):
  """Like `_Update`, for what is drawn."""

  links: tuple[Callable, ...]

  def __call__(self, state: tuple, token: Array, logits_V: Array) -> tuple:
    return tuple(note(part, token, logits_V) for note, part in zip(self.links, state))


def chain(*transforms: LogitTransform) -> LogitTransform:
  """The transforms one after another, each on what the one before it left."""
  update, observe = _Update(tuple(t.update for t in transforms)), _Observe(tuple(t.observe for t in transforms))
  return LogitTransform(lambda: tuple(t.init() for t in transforms), update, observe)


def skipped_together(*transforms: LogitTransform, by_id: bool = True) -> LogitTransform:
  """A chain of transforms that are rarely used: where none is, all are skipped at the price of one. by_id: whether any
  of them looks at what a token's id is; those that do not are spared the tokens that are no longer possible."""
  inner = chain(*transforms)
  return inner._replace(update=_Together(inner.update, _on_all if by_id else _on_few))


def _on_all(change: Callable, logits_V: Array, state: Any, context: Context) -> Array:
  return change(logits_V, state, context)


def _on_few(change: Callable, logits_V: Array, state: Any, context: Context) -> Array:
  """Changes only the possible tokens, in the order of their ids, where they are few enough."""
  if logits_V.shape[0] <= FEW:
    return change(logits_V, state, context)

  def changed(logits_V: Array, state: Any) -> Array:
    top_C, ids_C = head(logits_V)
    order_C = jnp.argsort(ids_C)
    ids_C, left_C = ids_C[order_C], change(top_C[order_C], state, context)
    # The largest: ids that fill up the head may come twice, with −inf.
    return jnp.full_like(logits_V, -jnp.inf).at[ids_C].max(left_C)

  few = jnp.sum((logits_V > -jnp.inf).astype(jnp.float32)) <= FEW
  left_V = only_if(few, changed, logits_V, state)
  return only_if(~few, lambda logits_V, state: change(logits_V, state, context), left_V, state)


def _changed(change: Callable, logits_V: Array, state: Any, context: Context) -> Array:
  changed_V = change(logits_V, state, context)
  if jnp.shape(changed_V) != logits_V.shape:
    got = jnp.shape(changed_V)
    raise ValueError(f"transform {_name(change)} must give logits of shape {logits_V.shape}, got {got}")
  return jnp.asarray(changed_V, logits_V.dtype)


def _name(change: Callable) -> str:
  name = change.name if isinstance(change, Skipped | Added) else getattr(change, "__name__", str(change))
  return name.strip("_")


def check(name: str, value: Any, good: Callable[[Any], bool], want: str) -> None:
  """ValueError that names the setting unless `value` is a finite number that is good."""
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number or not np.isfinite(value) or not good(value):
    raise ValueError(f"{name} must be {want}, got {value!r}")
