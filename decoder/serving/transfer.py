"""How do bytes get from one process to another? As messages over one TCP stream, each part with a checksum.

A message is a header of plain data, then buffers. Both ends first tell what they are (`greet`), and part where they are
not the same model and code. Nothing waits without bound: a peer that goes silent within a message, or never greets, is
given up after `patience` seconds; one that is gone without a word is noticed by TCP's keepalive.

This moves through host memory. Where devices of two processes can reach each other directly, JAX's own
`jax.experimental.transfer` (`direct()` tells whether it is there) may carry the same Rows under the same messages; the
stream is what works everywhere.
"""

import hashlib
import importlib.util
import json
import select
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from decoder.processes import code

HOST = "127.0.0.1"  # nobody else's machine: whoever can connect can read prompts and fill memory
PATIENCE = 20.0  # seconds
_MAGIC = b"DECR"
_LONGEST = 16 << 20  # bytes of a header; a longer one is no header of ours
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


class TransferError(ConnectionError):
  """The stream broke off, is damaged, or the peer is not what it should be; it is closed."""


class PeerGone(TransferError):
  """The peer closed the stream between two messages, as one that has no more to say does."""


class Message(NamedTuple):
  """header: plain data. payload: what `room` made of the header, its memory filled; None for a message without."""

  header: dict[str, Any]
  payload: Any = None


Prepare = Callable[[dict[str, Any]], tuple[Any, Sequence[Sequence[memoryview]]]]
"""header -> (payload, for each buffer the memory it goes to). ValueError for a header that is not to be followed."""


class Connection:
  """Messages both ways over a connected socket. A thread may send while another receives.

  prepare: makes room for the buffers of what comes; without it, messages with buffers are refused. patience: seconds
  that a peer may be silent within a message.
  """

  def __init__(self, stream: socket.socket, *, prepare: Prepare | None = None, patience: float = PATIENCE):
    stream.setblocking(False)
    _watch(stream)
    self.prepare, self.patience, self.received = prepare, patience, 0  # bytes
    self._socket, self._incoming = stream, self._messages()
    self._wanted: Message | memoryview = next(self._incoming)
    self._within, self._heard = False, time.monotonic()

  def send(self, header: Mapping[str, Any], buffers: Sequence[memoryview] = ()) -> int:
    """Sends a message and returns its bytes. TransferError where the peer takes nothing for `patience` seconds."""
    sums = [[len(buffer), zlib.crc32(buffer)] for buffer in buffers]
    text = json.dumps({"header": header, "buffers": sums}).encode()
    start = _MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
    parts = [memoryview(start + text), *buffers]
    for part in parts:
      self._send(part)
    return sum(map(len, parts))

  def poll(self, budget: int = 1 << 62) -> Message | None:
    """The next message, if it is whole after up to `budget` further bytes; never waits for any."""
    while budget > 0:
      if isinstance(self._wanted, Message):
        return self._take()
      try:
        count = self._socket.recv_into(self._wanted[:budget])
      except BlockingIOError:
        self._check_silence()
        return None
      except OSError as error:
        raise self._broken(f"the connection broke: {error}") from error
      if count == 0:
        self.close()
        raise (
          TransferError("the peer closed the stream in the middle of a message")
          if self._within
          else PeerGone("the peer is gone")
        )
      budget -= count
      self._fill(count)
    return self._take() if isinstance(self._wanted, Message) else None

  def receive(self, wait: float | None = None) -> Message | None:
    """Waits for the next message: up to `wait` seconds, then None; without, as long as the peer is there."""
    until = None if wait is None else time.monotonic() + wait
    while (message := self.poll()) is None:
      left = self.patience if until is None else min(self.patience, until - time.monotonic())
      if left <= 0:
        return None
      select.select([self._socket], [], [], left)
    return message

  def close(self) -> None:
    self._socket.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()

  def _messages(self) -> Iterator[Message | memoryview]:
    """Gives the memory that the next bytes belong in, until it is full, and each message when it is whole."""
    while True:
      start, self._within = bytearray(12), False
      yield memoryview(start)
      size = int.from_bytes(start[4:8], "little")
      if start[:4] != _MAGIC or not 0 < size <= _LONGEST:
        raise self._broken(f"wanted a message, got {bytes(start)!r}: the peer speaks something else")
      text = bytearray(size)
      yield memoryview(text)
      if zlib.crc32(text) != int.from_bytes(start[8:], "little"):
        raise self._broken("a header is damaged: its checksum is another")
      told = json.loads(text)
      payload, parts = self._room(told["header"], told["buffers"])
      for number, (memory, (_, checksum)) in enumerate(zip(parts, told["buffers"])):
        got = 0
        for part in memory:
          for begin in range(0, len(part), 1 << 18):  # as it comes, so that no long buffer is summed at once
            piece = part[begin : begin + (1 << 18)]
            yield piece
            got = zlib.crc32(piece, got)
        if got != checksum:
          raise self._broken(f"buffer {number} of {len(parts)} is damaged: its checksum is another")
      yield Message(told["header"], payload)

  def _room(self, header: dict[str, Any], sums: list) -> tuple[Any, Sequence[Sequence[memoryview]]]:
    if not sums:
      return None, []
    if self.prepare is None:
      raise self._broken(f"the peer sent {len(sums)} buffers where none are expected")
    try:
      payload, parts = self.prepare(header)
    except (ValueError, KeyError, TypeError) as error:
      raise self._broken(str(error)) from error
    sizes, wanted = [size for size, _ in sums], [sum(map(len, memory)) for memory in parts]
    if sizes != wanted:
      raise self._broken(f"wanted buffers of {wanted} bytes, got {sizes}")
    return payload, parts

  def _take(self) -> Message:
    message = self._wanted
    self._wanted = next(self._incoming)
    return message

  def _fill(self, count: int) -> None:
    self.received += count
    self._within, self._heard = True, time.monotonic()
    self._wanted = self._wanted[count:]
    while isinstance(self._wanted, memoryview) and not len(self._wanted):
      self._wanted = next(self._incoming)

  def _check_silence(self) -> None:
    silent = time.monotonic() - self._heard
    if self._within and silent > self.patience:
      raise self._broken(f"the peer went silent for {silent:.1f} s in the middle of a message")

  def _send(self, part: memoryview) -> None:
    while len(part):
      try:
        part = part[self._socket.send(part) :]
      except BlockingIOError:
        if not select.select([], [self._socket], [], self.patience)[1]:
          raise self._broken(f"the peer took nothing for {self.patience:g} s") from None
      except (OSError, ValueError) as error:  # ValueError: closed by another thread
        raise self._broken(f"the connection broke: {error}") from error

  def _broken(self, why: str) -> TransferError:
    self.close()
    return TransferError(why)


def listen(host: str = HOST, port: int = 0) -> socket.socket:
  """A listening socket; port 0 takes a free one, `.getsockname()[1]`. OSError where it is taken."""
  return socket.create_server((host, port))


def accept(listener: socket.socket, wait: float | None = None, **more: Any) -> Connection | None:
  """The next peer's Connection, not yet greeted; None after `wait` seconds."""
  listener.settimeout(wait)
  try:
    return Connection(listener.accept()[0], **more)
  except TimeoutError:
    return None


def connect(host: str, port: int, wait: float = PATIENCE, **more: Any) -> Connection:
  """Connects, trying again for up to `wait` seconds, for a peer that is still starting. TransferError after that."""
  until = time.monotonic() + wait
  while True:
    try:
      return Connection(socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)), **more)
    except OSError as error:
      if time.monotonic() >= until:
        raise TransferError(
          f"nobody answers at {host}:{port} for {wait:g} s ({error}); start that process first"
        ) from error
      time.sleep(0.05)


def greet(connection: Connection, identity: Mapping[str, str]) -> None:
  """Tells the peer what this process is and hears what it is. TransferError, on both sides, where they differ in
  anything or it says nothing for `patience` seconds."""
  connection.send({"kind": "hello", **identity})
  message = connection.receive(connection.patience)
  if message is None:
    connection.close()
    raise TransferError(f"the peer said nothing for {connection.patience:g} s after connecting")
  theirs = message.header
  for name in ("kind", *identity):
    mine = {"kind": "hello", **identity}[name]
    if theirs.get(name) != mine:
      connection.close()
      raise TransferError(
        f"the peer has another {name}: {theirs.get(name)}, here {mine}; start both with the same checkout, model, flags"
      )


def identity(params: Any, form: Any) -> dict[str, str]:
  """What two processes must have in common to write one text. form: whatever else counts, by its repr: cache, chain."""
  from decoder.checkpoint.fingerprint import fingerprint
  from decoder.checkpoint.mapping import flatten

  weights = hashlib.sha256()
  for path, weight in sorted(flatten(params).items()):
    kind = getattr(weight, "kind", None) or str(weight.dtype)
    weights.update(f"{path} {tuple(weight.shape)} {kind}\n".encode())
  return {
    "model": fingerprint(params),
    "weights": weights.hexdigest(),
    "form": hashlib.sha256(repr(form).encode()).hexdigest(),
    "code": code(),
    "byteorder": sys.byteorder,
  }


def direct() -> bool:
  """Whether this JAX can move arrays between the devices of two processes by itself."""
  return importlib.util.find_spec("jax.experimental.transfer") is not None


def _watch(stream: socket.socket) -> None:
  """Lets the system find out that a peer is gone, within half a minute, and send small messages at once."""
  if stream.family not in (socket.AF_INET, socket.AF_INET6):
    return
  stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _KEEPALIVE.items():
    if hasattr(socket, name):
      stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
