"""The edge where pure functions are jitted: which programs exist, for which shapes, compiled when.

Shapes come in few sizes, so that nothing compiles after the first requests: prompts are read in chunks of a power of
two, caches have a power of two of slots, batches a power of two of rows. Everything else is data.
"""

import contextlib
import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoder.cache import Cache, Raw, allocate
from decoder.models.registry import Network
from decoder.ops.kernels.channel import over
from decoder.sampling import request_key
from decoder.settings import Settings
from decoder.sharding import Placement
from decoder.strategies import (
  State,
  Told,
  asking,
  autoregressive,
  cut,
  forward_telling,
  init,
  insert,
  pending,
  run,
  vacate,
)
from decoder.strategies.loop import Run
from decoder.types import Array, Emission, Strategy

CHUNK = 512  # most prompt tokens read at once: longer ones gain nothing and their scores take memory
SMALLEST_CHUNK = 16
SMALLEST_CAPACITY = 512
LOOP = 64  # most steps in one device call: bounds how late a Ctrl-C or a stop string is noticed
_MOMENT = 3.0  # seconds; longer than reading a program back from the compilation cache


def bucket(size: int, smallest: int = 1) -> int:
  """The power of two ≥ size and ≥ smallest."""
  return max(smallest, 1 << max(size - 1, 0).bit_length())


class Compiler:
  """Compiles programs for the devices of a placement. seconds: spent at it so far. `announce` is told of each
  compilation that takes longer than a moment; one that JAX's compilation cache answers takes less."""

  def __init__(self, placement: Placement, announce: Callable[[str], None] | None = None):
    self.placement, self.seconds = placement, 0.0
    self._announce = announce or (lambda what: None)

  def compile(self, program: Callable, what: str, donated: int | None, *arguments: Any) -> Callable:
    """The program compiled for arguments like these; `what` it is in words."""
    with self.counting():
      lowered = self.placement.jit(program, donate_argnums=donated).lower(*arguments)
      with self.announcing(what):
        return lowered.compile()

  @contextlib.contextmanager
  def counting(self) -> Iterator[None]:
    """Adds the time of the block to `seconds`."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self.seconds += time.perf_counter() - start

  @contextlib.contextmanager
  def announcing(self, what: str) -> Iterator[None]:
    """Announces `what` if the block takes longer than a moment."""
    timer = threading.Timer(_MOMENT, self._announce, (what,))
    timer.daemon = True
    timer.start()
    try:
      yield
    finally:
      timer.cancel()


class Programs:
  """The compiled programs of one model under one order of transforms, that of `settings`; their numbers are data.
  `_strategy` reads prompts and draws what comes first, `_further` goes on; block: most tokens that a step of it draws.

  full: whether for the full chain of that order or the short one. inspect: what is told of each draw. Each program
  takes the State and gives a new one; the old one is donated, so its cache is updated in place.
  """

  cache_type: type = Cache  # what they go on from
  block = 1
  chunk = CHUNK  # most prompt tokens read at once
  runs_ahead = True  # a next call needs nothing of what the host reads from the last

  def __init__(
    self, network: Network, params: Any, settings: Settings, full: bool, inspect: Callable, vocab_size: int | None,
    compiler: Compiler,
  ):  # fmt: skip
    self._network, self._params, self._full, self._compiler = network, params, full, compiler
    chain = settings.chain(full)
    self.links = chain.update.names  # what an explanation calls them
    self._strategy = self._further = autoregressive(network.model, chain, vocab_size, inspect)
    self._compiled: dict[tuple, Callable] = {}

  @property
  def placement(self) -> Placement:
    """Where they run."""
    return self._compiler.placement

  def rows(self, number: int) -> int:
    """Rows of a batch that holds so many: few sizes, and as many for each device."""
    return -(-bucket(number) // self.placement.rows) * self.placement.rows

  def numbers(self, settings: Settings) -> Any:
    """The state of the chain for one row with these settings."""
    return settings.chain(self._full).init()

  def takes(self, cache: Any) -> bool:
    """Whether they can go on from this cache."""
    return isinstance(cache, self.cache_type)

  def speculated(self, state: State) -> list[Any]:
    """What guessing ahead came to in each row; None where nothing was guessed ahead."""
    return [None] * state.length_B.shape[0]

  def in_chunks(self, size: int) -> "Programs":
    """The same programs, but prompts are read `size` tokens at a time. ValueError unless it is a power of two."""
    if size != bucket(size, SMALLEST_CHUNK):
      raise ValueError(f"prompts are read in chunks of a power of two of tokens, {SMALLEST_CHUNK} or more, got {size}")
    other = copy.copy(self)
    other.chunk = size
    return other

  def emitted(self, state: State) -> Emission:
    """The shapes of what `read` emits for such a State."""
    return jax.eval_shape(self._strategy.step, self._params, state)[1]

  def begin(self, capacity: int, fields: dict[str, Any], cache: Any = None) -> Any:
    """A State for the requests in `fields` (numpy, see `_begin`), on a new cache or on `cache`, which is given away."""
    rows = fields["length_B"].shape[0]

    def program(cache: Any, fields: dict[str, Any]) -> Any:
      return _begin(self._allocate(rows, capacity, fields) if cache is None else cache, fields)

    key = ("begin", capacity, None if cache is None else cache.form, signature(fields))
    return self._compile(key, f"a cache for {rows} × {capacity} tokens", program, 0, cache, fields)(cache, fields)

  def grow(self, cache: Any, capacity: int) -> Any:
    """The same rows in a larger cache."""

    def program(cache: Any) -> Any:
      return self._allocate(cache.batch, capacity, {}).insert(jnp.arange(cache.batch), cache)

    key = ("grow", cache.batch, cache.capacity, capacity)
    return self._compile(key, f"a cache for {capacity} tokens", program, None, cache)(cache)

  def prepare(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    """Compiles what `read` and `loop` will need, so that neither stops to do so."""
    start_B = np.zeros(state.length_B.shape, np.int32)
    last, before = _chunks(lengths, held, self.chunk)
    if before:
      self._chunk(self.chunk, state, start_B)
    self._last(last, state, start_B)
    if loop:
      self._loop(state)

  def chunks(self, lengths: Sequence[int], held: int = 0) -> range:
    """What to call `read_chunk` with, in order, before `read`: prompts of `lengths` tokens, `held` of them in the
    cache already, of every row. Chunks are aligned to the prompts' ends, so that the last holds every row's last token.
    """
    return range(_chunks(lengths, held, self.chunk)[1], 0, -1)

  def read_chunk(self, state: State, lengths: Sequence[int], held: int, chunk: int) -> State:
    """Reads one chunk of the prompts into the cache."""
    start_B = self._start_of_last(state, lengths, held) - np.int32(chunk * self.chunk)
    return self._chunk(self.chunk, state, start_B)(state, start_B)

  def read(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Emission]:
    """Reads the prompts' last chunk, after the others, and draws the first token of each row."""
    last, start_B = _chunks(lengths, held, self.chunk)[0], self._start_of_last(state, lengths, held)
    return self._last(last, state, start_B)(state, start_B)

  def loop(self, state: State, limit: int) -> Run:
    """Up to `limit` ≤ LOOP further steps."""
    return self._loop(state)(state, np.int32(limit))

  def loop_asking(self, state: State, limit: int, number: int) -> Run:
    """`loop`, each draw of which asks at channel `number` what may be drawn. It returns when the steps are done, or
    before; in either case something else must answer."""
    return self._loop_asking(state)(state, np.int32(limit), np.int32(number))

  def prepare_loop_asking(self, state: State) -> None:
    """Compiles what `loop_asking` will need."""
    self._loop_asking(state)

  def prepare_halves(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    """Compiles what `read_half`, `draw`, `forward` and `draw_further` will need."""
    self.prepare_draw(state, self.prepare_reading(state, lengths, held))
    if loop:
      self.prepare_further(state)

  def prepare_asking(self, state: State, lengths: Sequence[int], held: int = 0, *, loop: bool = True) -> None:
    """Compiles what `read_half`, `draw` and `loop_asking` will need."""
    self.prepare_halves(state, lengths, held, loop=False)
    if loop:
      self.prepare_loop_asking(state)

  def read_half(self, state: State, lengths: Sequence[int], held: int = 0) -> tuple[State, Array]:
    """Like `read`, up to the draw: gives the logits that `draw` takes."""
    last, start_B = _chunks(lengths, held, self.chunk)[0], self._start_of_last(state, lengths, held)
    return self._forward(last, state, start_B)(state, start_B)

  def tell_chunk(self, state: State, lengths: Sequence[int], number: int, chunk: int) -> tuple[State, Array, Told]:
    """Reads one chunk of the prompts from an empty cache, as `read_chunk` (0: the last, as `read_half`), and tells of
    the tokens after those it reads, with `number` alternatives."""
    size = self.chunk if chunk else _chunks(lengths, 0, self.chunk)[0]
    start_B = self._start_of_last(state, lengths, 0) - np.int32(chunk * self.chunk)
    return self._telling(size, number, state, start_B)(state, start_B)

  def prepare_reading(self, state: State, lengths: Sequence[int], held: int = 0, number: int | None = None) -> Any:
    """Compiles what `read_chunk` and `read_half` will need, or `tell_chunk` where `number` is given; the shape of the
    logits that come of it."""
    start_B = np.zeros(state.length_B.shape, np.int32)
    last, before = _chunks(lengths, held, self.chunk)
    if number is not None:
      for size in {self.chunk, last} if before else {last}:
        self._telling(size, number, state, start_B)
    else:
      if before:
        self._chunk(self.chunk, state, start_B)
      self._forward(last, state, start_B)
    return jax.eval_shape(lambda params, state: self._strategy.forward(params, state)[1], self._params, state)

  def prepare_draw(self, state: State, logits_BV: Any) -> None:
    """Compiles what `draw` will need."""
    self._draw(state.replace(cache=None), logits_BV, self.open_masks(state.length_B.shape[0]))

  def prepare_loop(self, state: State) -> None:
    """Compiles what `loop` will need."""
    self._loop(state)

  def prepare_further(self, state: State) -> None:
    """Compiles what `forward` and `draw_further` will need, after what `draw` does."""
    self._forward_further(state)

  def fork(self, *arguments: Any) -> tuple[State, Array]:
    """(state, logits_BV, rows_R, fields): a State for the requests in `fields`, request r going on from what row
    rows_R[r] has read, and their logits."""
    return self._fork(*arguments)(*arguments)

  def prepare_fork(self, *arguments: Any) -> tuple[State, Array]:
    """Compiles what `fork` will need; the shapes that come of it."""
    self._fork(*arguments)
    return jax.eval_shape(_forked, *arguments)

  def cut(self, state: State, slots: int) -> State:
    """`strategies.cut`: a State in so few slots, to be moved."""
    key, what = ("cut", slots, signature(state)), f"a cut to {slots} slots"
    return self._compile(key, what, lambda state: cut(state, slots), None, state)(state)

  def insert(self, state: State, rows_R: np.ndarray, other: State) -> State:
    """`strategies.insert`: rows of `other`, which is on the same devices, go on as rows of `state`."""
    key, what = ("insert", signature(state), signature(other)), f"rows put into a batch of {len(state.length_B)}"
    return self._compile(key, what, insert, 0, state, rows_R, other)(state, rows_R, other)

  def vacate(self, state: State, rows_B: np.ndarray) -> State:
    """`strategies.vacate`: ends rows, and forgets them."""
    return self._compile(("vacate", signature(state)), "rows that end", vacate, 0, state, rows_B)(state, rows_B)

  def forward(self, state: State) -> tuple[State, Array]:
    """Reads each row's last token, and guesses of what follows; gives the logits that `draw_further` takes. Returns
    before the device is done."""
    return self._forward_further(state)(state.cache, state.replace(cache=None))

  def guesses(self, state: State) -> list[Sequence[int]]:
    """What `forward` has guessed to follow in each row."""
    return [()] * state.length_B.shape[0]

  def open_masks(self, *shape: int) -> np.ndarray:
    """Masks of this shape that forbid nothing, to be changed: a bit an id, uint32 words, lowest bit first. For `draw`
    one a row; for the draws of a loop, (rows, block) of them."""
    return np.full((*shape, -(-self._network.vocab_size // 32)), 2**32 - 1, np.uint32)

  def draw(self, state: State, logits_BV: Array, masks_BW: np.ndarray) -> tuple[State, Emission]:
    """Draws a token a row among those that its mask allows."""
    rest = state.replace(cache=None)  # many arrays, which cost time to pass and which a draw does not touch
    after, emission = self._draw(rest, logits_BV, masks_BW)(rest, logits_BV, masks_BW)
    return after.replace(cache=state.cache), emission

  def draw_further(self, state: State, logits_BV: Array, masks_BJW: np.ndarray) -> tuple[State, Emission]:
    """Draws after `forward`: masks for what comes next, and after each of the guesses."""
    return self.draw(state, logits_BV, masks_BJW[:, 0])

  def _allocate(self, rows: int, capacity: int, fields: dict[str, Any], **more: Any) -> Any:
    codec, layout = Raw(self._network.dtype, bits=True), self.placement.layout
    return allocate(self._network.cache_spec, rows, capacity, codec=codec, layout=layout, **more)

  def _start_of_last(self, state: State, lengths: Sequence[int], held: int) -> np.ndarray:
    """Where the last chunk starts in each row; negative where it is longer than the row."""
    start_B = np.zeros(state.length_B.shape, np.int32)  # rows that pad the batch keep length 0
    start_B[: len(lengths)] = lengths
    return start_B - np.int32(_chunks(lengths, held, self.chunk)[0])

  def _chunk(self, size: int, state: State, start_B: np.ndarray) -> Callable:
    def program(params: Any, state: State, start_B: Array) -> State:
      after, _ = self._strategy.forward(params, pending(state, start_B, size))
      return after.replace(tokens_BT=state.tokens_BT, positions_BT=state.positions_BT)

    key = ("chunk", size, state.cache.capacity, signature(state))
    return self._compile_with_params(key, f"prompt chunks of {size} tokens", program, state, start_B)

  def _last(self, size: int, state: State, start_B: np.ndarray) -> Callable:
    def program(params: Any, state: State, start_B: Array) -> tuple[State, Emission]:
      return self._strategy.step(params, pending(state, start_B, size))

    key = ("last", size, signature(state))
    return self._compile_with_params(key, f"prompts up to {size} tokens", program, state, start_B)

  def _forward(self, size: int, state: State, start_B: np.ndarray) -> Callable:
    """start_B: where the `size` tokens to read start."""

    def program(params: Any, state: State, start_B: Array) -> tuple[State, Array]:
      after, logits_BV = self._strategy.forward(params, pending(state, start_B, size))
      return after.replace(tokens_BT=state.tokens_BT, positions_BT=state.positions_BT), logits_BV

    key = ("forward", size, signature(state))
    return self._compile_with_params(key, f"forward of {size} tokens", program, state, start_B)

  def _forward_further(self, state: State) -> Callable:
    def program(params: Any, cache: Any, rest: State) -> tuple[State, Array]:
      return self._further.forward(params, rest.replace(cache=cache))

    # Only the cache is donated: with guesses, what is pending comes back in another shape.
    key, arguments = ("forward further", signature(state)), (state.cache, state.replace(cache=None))
    return self._compile_with_params(key, "forward of what was drawn last", program, *arguments)

  def _telling(self, size: int, number: int, state: State, start_B: np.ndarray) -> Callable:
    forward = forward_telling(self._network.model, number)

    def program(params: Any, state: State, start_B: Array) -> tuple[State, Array, Told]:
      after, logits_BV, told = forward(params, pending(state, start_B, size))
      return after.replace(tokens_BT=state.tokens_BT, positions_BT=state.positions_BT), logits_BV, told

    key = ("telling", size, number, signature(state))
    return self._compile_with_params(key, f"log-probs of {size} prompt tokens", program, state, start_B)

  def _fork(self, state: State, logits_BV: Any, rows_R: np.ndarray, fields: dict[str, Any]) -> Callable:
    key, what = ("fork", signature(state), signature(fields)), f"a fork to {len(rows_R)} rows"
    return self._compile(key, what, _forked, None, state, logits_BV, rows_R, fields)

  def _draw(self, state: State, logits_BV: Any, masks_BW: np.ndarray) -> Callable:
    def program(state: State, logits_BV: Array, masks_BW: Array) -> tuple[State, Emission]:
      return self._strategy.draw(state, logits_BV, self._allowed(masks_BW))

    return self._compile(("draw", signature(state)), "the masked draw", program, 0, state, logits_BV, masks_BW)

  def _loop(self, state: State) -> Callable:
    def program(params: Any, state: State, limit: Array) -> Run:
      return run(self._further, params, state, limit, LOOP * self.block)

    return self._compile_with_params(("loop", signature(state)), "the decode loop", program, state, np.int32(0))

  def _loop_asking(self, state: State) -> Callable:
    def program(params: Any, state: State, limit: Array, number: Array) -> Run:
      done, emission = run(self._asking(number), params, state, limit, LOOP * self.block)
      return Run(done, emission._replace(count_B=over(number, emission.count_B)))

    zero, key = np.int32(0), ("loop asking", signature(state))
    return self._compile_with_params(key, "the decode loop under a constraint", program, state, zero, zero)

  def _asking(self, number: Array) -> Strategy:
    """What goes on, asking at channel `number`."""
    return asking(self._further, number, self._allowed)

  def _allowed(self, masks: Array) -> Array:
    return _unpack(masks)[..., : self._network.vocab_size]

  def _compile_with_params(self, key: tuple, what: str, program: Callable, *arguments: Any) -> Callable:
    """The program with its first argument given, the parameters; it donates the second, a State or a cache. Parameters
    are passed as a flat list: taking a tree of quantised weights apart would cost more than the call."""
    if key not in self._compiled:
      leaves, tree = jax.tree.flatten(self._params)

      def flat(leaves: list[Array], *arguments: Any) -> Any:
        return program(tree.unflatten(leaves), *arguments)

      self._compiled[key] = functools.partial(self._compile(("flat", *key), what, flat, 1, leaves, *arguments), leaves)
    return self._compiled[key]

  def _compile(self, key: tuple, what: str, program: Callable, donated: int | None, *arguments: Any) -> Callable:
    if key not in self._compiled:
      self._compiled[key] = self._compiler.compile(program, what, donated, *arguments)
    return self._compiled[key]


def _chunks(lengths: Sequence[int], held: int, most: int) -> tuple[int, int]:
  """Tokens of the last chunk, and how many chunks of `most` come before it."""
  rest = max(max(lengths) - held, 1)
  last = bucket(min(rest, most), SMALLEST_CHUNK)
  return last, -(-max(rest - last, 0) // most)


def _begin(cache: Any, fields: dict[str, Any]) -> State:
  """fields: context_BL, length_B, limit_B, ends_BE as in State; seed_B (uint32), sample_B (int32), settings; held_B:
  tokens of the cache to keep."""
  cache = cache.truncate(fields["held_B"])
  key_B = jax.vmap(request_key)(fields["seed_B"], fields["sample_B"])
  rest = {name: fields[name] for name in ("context_BL", "length_B", "limit_B", "ends_BE", "settings")}
  return init(cache, key_B=key_B, **rest)


def _forked(state: State, logits_BV: Array, rows_R: Array, fields: dict[str, Any]) -> tuple[State, Array]:
  return _begin(state.cache.select(rows_R), fields), logits_BV[rows_R]


def _unpack(words: Array) -> Array:
  """Bits of the last axis, lowest first, as bool."""
  bits = words[..., None] >> lax.broadcasted_iota(jnp.uint32, (*words.shape, 32), words.ndim)
  return (bits & 1).astype(bool).reshape(*words.shape[:-1], -1)


def signature(tree: Any) -> tuple:
  """The shapes that tell two compilations of a program apart, and the format of the cache where there is one."""
  form = ()
  if isinstance(tree, State):
    form, tree = (tree.cache and tree.cache.form,), (tree.context_BL, tree.ends_BE, tree.settings)
  return form + tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(tree))
