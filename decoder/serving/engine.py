"""What turns prompts into rows, and rows into tokens? Two halves that share nothing but a `Row`.

`Prefill` reads one prompt at a time and draws its first token; `Slots` is a batch whose rows come and go between calls
of one compiled loop. In one process they are a colocated server, in two a disaggregated one (Zhong et al. 2024,
DistServe, arXiv:2401.09670): keys belong to requests, so a row draws the same wherever it is. When to call which is the
business of `apart`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from decoder.cache import Cache
from decoder.decoding import fields_of
from decoder.programs import SMALLEST_CAPACITY, Programs, bucket
from decoder.reader import Request
from decoder.serving.rows import SMALLEST, Row, across, held_by, shapes_of, slots_for
from decoder.settings import Settings
from decoder.strategies import State
from decoder.types import Emission


def fields_for(request: Request, programs: Programs) -> dict[str, Any]:
  """A request as plain arrays of one row, all that `Prefill` needs of it. ValueError for what is not served by rows
  that move: texts under a constraint, guidance, sources for an encoder, guesses, and told prompts."""
  unserved = {
    "json_schema, regex, grammar and choice": request.constraint is not None,
    "guidance_scale": request.guided,
    "prompt_logprobs": request.settings.prompt_logprobs,
    "a model with an encoder": bool(request.source_ids),
    "speculate": request.settings.speculate != "off",
    "beams": request.settings.searches,
  }
  for name, asked in unserved.items():
    if asked:
      raise ValueError(f"{name} cannot be served with prefill and decode as two halves; use LM.generate for it")
  return fields_of([request], programs, len(request.prompt_ids), 0)


class Prefill:
  """Reads prompts, on the devices of its programs. A prompt takes a cache of its own, from which its Row is cut."""

  def __init__(self, programs: Programs):
    if programs.cache_type is not Cache:
      raise ValueError(f"prefill wants plain programs, got {type(programs).__name__}; leave out guesses and guidance")
    if programs.rows(1) > 1:
      raise ValueError(
        f"prefill reads one prompt at a time, and this mesh divides rows by {programs.rows(1)}; leave out data"
      )
    self.programs = programs

  def begin(self, fields: dict[str, Any]) -> "Reading":
    """fields: of one request, as `fields_for` makes them."""
    length = int(fields["length_B"][0])
    capacity = bucket(length + 1, SMALLEST_CAPACITY)
    context_BL = np.zeros((1, capacity), np.int32)
    context_BL[:, :length] = fields["context_BL"][:, :length]
    return Reading(self.programs, self.programs.begin(capacity, {**fields, "context_BL": context_BL}), length)

  def read(self, fields: dict[str, Any]) -> Row:
    """The whole prompt at once."""
    reading = self.begin(fields)
    while (row := reading.advance()) is None:
      pass
    return row


class Reading:
  """A prompt that is being read, a chunk a call."""

  def __init__(self, programs: Programs, state: State, length: int):
    self._programs, self._state, self._length = programs, state, length
    self._chunks = iter(programs.chunks([length]))

  def advance(self) -> Row | None:
    """Reads a chunk; with the last one draws the first token, and gives the Row. Waits for the device."""
    chunk = next(self._chunks, None)
    if chunk is not None:
      self._state = self._programs.read_chunk(self._state, [self._length], 0, chunk)
      jax.block_until_ready(self._state.length_B)  # else chunks only queue up before whatever else the device does
      return None
    state, emission = self._programs.read(self._state, [self._length])
    return Row(self._programs.cut(state, slots_for(self._length)), self._programs.placement.fetch(emission))


class Slots:
  """A batch of `batch` rows for texts of up to `capacity` tokens, each a request's or free. Both are powers of two.

  settings: any of the requests'; all share the programs, and so the order of their transforms. One thread calls it.
  """

  def __init__(self, programs: Programs, batch: int, capacity: int, settings: Settings):
    for name, size in (("batch", batch), ("capacity", capacity)):
      least = SMALLEST if name == "capacity" else 1
      if size != bucket(size, least):
        raise ValueError(f"{name} must be a power of two from {least}, got {size}; take {bucket(size, least)}")
    if programs.rows(batch) != batch:
      raise ValueError(f"this mesh divides rows: batch must be {programs.rows(batch)} rather than {batch}")
    self.programs, self.capacity = programs, capacity
    self._nobody = Request((), settings, 0, 0, 0, (), None, None)
    self.state: State = self._empty(batch, capacity)
    self.owners: list[Any] = [None] * batch  # whose each row is
    self._shapes: dict[int, Row] = {}

  def prepare(self, lengths: Sequence[int]) -> None:
    """Compiles what rows of prompts of these lengths will need, before a peer waits for it."""
    self.programs.prepare_loop(self.state)
    self.state = self.programs.vacate(self.state, np.zeros(len(self.owners), bool))
    for slots in sorted({slots_for(length) for length in lengths}):
      state = self.programs.cut(self._empty(1, bucket(slots + 1, SMALLEST_CAPACITY)), slots)
      row = self._placed(Row(state, self.emitted))
      nowhere = np.full(len(state.length_B), len(self.owners), np.int32)  # rows beyond the batch are dropped
      self.state = self.programs.insert(self.state, nowhere, row.state)
      self.shapes(slots)

  @functools.cached_property
  def emitted(self) -> Emission:
    """The shapes of what reading a prompt emits for this batch."""
    return self.programs.emitted(self.state)

  @property
  def free(self) -> bool:
    return None in self.owners

  @property
  def busy(self) -> bool:
    return any(owner is not None for owner in self.owners)

  def shapes(self, tokens: int) -> Row:
    """The shapes of a Row of so many tokens for this batch."""
    slots = slots_for(tokens)
    if slots not in self._shapes:  # tracing them takes as long as a step
      self._shapes[slots] = shapes_of(self.state, self.emitted, slots)
    return self._shapes[slots]

  def insert(self, row: Row, owner: Any) -> int:
    """Gives a free slot to a Row, from any device or from numpy, for its `owner` (anything but None); which slot.
    ValueError where there is none, or for a row that does not fit or has ended."""
    if not self.free:
      raise ValueError(f"all {len(self.owners)} slots are taken; wait until a row ends, or release one")
    limit = int(row.state.limit_B[0])
    if limit > self.capacity:
      raise ValueError(f"the row may grow to {limit} tokens, there is room for {self.capacity}; raise the capacity")
    if not held_by(row.state):
      raise ValueError("the row has ended with its first token; there is nothing to decode")
    slot = self.owners.index(None)
    row = self._placed(row)
    self.state = self.programs.insert(self.state, np.array([slot], np.int32), row.state)
    self.owners[slot] = owner
    return slot

  def step(self, steps: int = 1) -> tuple[Emission, list[tuple[int, Any]]]:
    """Up to `steps` tokens for each row: the emission, in numpy, and (slot, owner) of the rows it is of. Rows that end
    free their slots."""
    self.state, emission = self.programs.loop(self.state, steps)
    emission = self.programs.placement.fetch(emission)
    rows = [(slot, owner) for slot, owner in enumerate(self.owners) if owner is not None]
    ended = [slot for slot, _ in rows if emission.info.finish_B[slot] != 0]
    if ended:
      self.release(ended)
    return emission, rows

  def release(self, slots: Sequence[int]) -> None:
    """Frees slots: their rows emit nothing more, and others need not read past what they held."""
    rows_B = np.zeros(len(self.owners), bool)
    rows_B[list(slots)] = True
    self.state = self.programs.vacate(self.state, rows_B)
    for slot in slots:
      self.owners[slot] = None

  def _placed(self, row: Row) -> Row:
    """The Row beside this batch, its context no longer than this one's."""
    context_BL = row.state.context_BL[:, : self.capacity]
    return across(row._replace(state=row.state.replace(context_BL=context_BL)), self.programs.placement)

  def _empty(self, batch: int, capacity: int) -> State:
    return self.programs.begin(capacity, fields_of([self._nobody] * batch, self.programs, capacity, 0))
