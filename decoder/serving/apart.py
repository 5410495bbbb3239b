"""Who reads prompts for a batch that is decoding? This process between two steps (`Here`), or another one (`There`).

A `Desk` takes requests, and turns: in each it lets the reading go on for a bounded piece, gives arrived rows a slot,
and decodes one step. Reading here, the piece is a chunk of a prompt, which delays every row (colocated; Sarathi-Serve's
chunked prefill, arXiv:2403.02310); reading there, it is a number of bytes, which hardly does. `serve` is the other end.
"""

import collections
import concurrent.futures
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from decoder.reader import Request
from decoder.serving.engine import Prefill, Reading, Slots, fields_for
from decoder.serving.rows import Leaf, Row, buffer_of, held_by, pack, pack_row, room_for
from decoder.serving.transfer import Connection, Message, PeerGone

_MOMENT = 0.02  # seconds that an idle turn waits for the stream
BUDGET = 1 << 20  # bytes taken from the stream a turn: about 1 ms of a core, checksum and all


class Written(NamedTuple):
  """What a turn wrote for one request. finish: as `strategies.Finish`; details: of each token, numpy leaves [N, …]."""

  number: int
  tokens: Sequence[int]
  finish: int
  details: Any


class Source(Protocol):
  """Where rows come from. idle: no row waits for the turn's end, so it may take longer."""

  def submit(self, number: int, fields: dict[str, Any]) -> None: ...
  def turn(self, idle: bool) -> list[tuple[int, Row]]: ...


class Here:
  """Reads prompts in this process, first come first served, one chunk a turn."""

  def __init__(self, prefill: Prefill):
    self._prefill = prefill
    self._waiting: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
    self._reading: tuple[int, Reading] | None = None

  def submit(self, number: int, fields: dict[str, Any]) -> None:
    self._waiting.append((number, fields))

  def turn(self, idle: bool) -> list[tuple[int, Row]]:
    if self._reading is None:
      if not self._waiting:
        return []
      number, fields = self._waiting.popleft()
      self._reading = number, self._prefill.begin(fields)
    number, reading = self._reading
    row = reading.advance()
    if row is None:
      return []
    self._reading = None
    return [(number, row)]


class There:
  """Has another process read prompts, which runs `serve` at the other end of a greeted connection. budget: bytes that a
  turn takes at most. TransferError where the stream breaks."""

  def __init__(self, connection: Connection, slots: Slots, budget: int = BUDGET):
    self._connection, self._slots, self._budget = connection, slots, budget
    connection.prepare = self._room

  def submit(self, number: int, fields: dict[str, Any]) -> None:
    leaves, arrays = pack(fields)
    self._connection.send({"kind": "read", "number": number, "leaves": leaves}, [buffer_of(x) for x in arrays])

  def turn(self, idle: bool) -> list[tuple[int, Row]]:
    message = self._connection.receive(_MOMENT) if idle else self._connection.poll(self._budget)
    if message is None:
      return []
    return [(message.header["number"], message.payload.whole())]

  def _room(self, header: dict[str, Any]) -> tuple[Any, Any]:
    if header["kind"] != "row" or not 0 <= header["tokens"] <= self._slots.capacity:
      raise ValueError(f"wanted a row of up to {self._slots.capacity} tokens, got {str(header)[:80]}")
    room = room_for([Leaf(*leaf) for leaf in header["leaves"]], self._slots.shapes(header["tokens"]))
    return room, room.parts


def serve(connection: Connection, prefill: Prefill, like: dict[str, Any]) -> int:
  """Reads prompts for a `There` at the other end of a greeted connection until it is gone; returns how many.

  like: the fields of any request. A row is sent while the next prompt is read. TransferError where the stream breaks.
  """

  def room(header: dict[str, Any]) -> tuple[Any, Any]:
    made = room_for([Leaf(*leaf) for leaf in header["leaves"]], like)
    return made, made.parts

  connection.prepare, done = room, 0
  waiting: collections.deque[Message] = collections.deque()
  with concurrent.futures.ThreadPoolExecutor(1) as sender:
    sending: concurrent.futures.Future | None = None
    while True:
      try:
        while (message := connection.poll() if waiting else connection.receive()) is not None:
          waiting.append(message)  # all that has come, or a peer with many would wait until it gives this one up
      except PeerGone:
        return done
      message = waiting.popleft()
      row = prefill.read(message.payload.whole())
      if sending is not None:
        sending.result()
      sending = sender.submit(send_row, connection, message.header["number"], row)
      done += 1


def send_row(connection: Connection, number: int, row: Row) -> int:
  """Sends a Row; returns the bytes of the message."""
  leaves, arrays = pack_row(row)
  header = {"kind": "row", "number": number, "tokens": held_by(row.state), "leaves": leaves}
  return connection.send(header, [buffer_of(x) for x in arrays])


class Desk:
  """Requests from their prompts to their last tokens."""

  def __init__(self, source: Source, slots: Slots):
    self._source, self._slots = source, slots
    self._arrived: collections.deque[tuple[int, Row]] = collections.deque()
    self._open: set[int] = set()
    self._next = 0

  @property
  def done(self) -> bool:
    return not self._open

  def submit(self, request: Request) -> int:
    """Takes a request; its number. ValueError for what cannot be served."""
    if request.limit > self._slots.capacity:
      raise ValueError(
        f"the text may grow to {request.limit} tokens, a slot holds {self._slots.capacity}; lower max_new_tokens"
      )
    number, self._next = self._next, self._next + 1
    self._source.submit(number, fields_for(request, self._slots.programs))
    self._open.add(number)
    return number

  def turn(self) -> list[Written]:
    """Lets prompts be read for a bounded piece, then decodes a token of every row that has a slot."""
    written = []
    for number, row in self._source.turn(not self._slots.busy):
      written.append(_first(number, row))
      if written[-1].finish == 0:
        self._arrived.append((number, row))
    while self._arrived and self._slots.free:
      number, row = self._arrived.popleft()
      self._slots.insert(row, number)
    if self._slots.busy:
      emission, rows = self._slots.step()
      written += [_written(number, slot, emission) for slot, number in rows]
    self._open -= {one.number for one in written if one.finish != 0}
    return written


def _first(number: int, row: Row) -> Written:
  return _written(number, 0, row.emission)


def _written(number: int, slot: int, emission: Any) -> Written:
  count = int(emission.count_B[slot])
  details = jax.tree.map(lambda leaf: np.asarray(leaf)[slot, :count], emission.info.details)
  return Written(number, emission.tokens_BN[slot, :count].tolist(), int(emission.info.finish_B[slot]), details)
