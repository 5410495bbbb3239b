"""A message arrives as it was sent or not at all; and no peer, dead, silent or foreign, is waited for without bound."""

import contextlib
import json
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from decoder.processes import code
from decoder.serving import transfer
from decoder.serving.transfer import Connection, TransferError

HEADER = {"kind": "row", "number": 7}
SIZES = (5, 0, 300_000)


def buffers():
  return [np.random.default_rng(n).integers(0, 255, n, np.uint8).data for n in SIZES]


def room(header):
  memory = [np.empty(n, np.uint8) for n in SIZES]
  return memory, [[memoryview(x[: x.size // 2]), memoryview(x[x.size // 2 :])] for x in memory]


def pair(**more):
  near, far = socket.socketpair()
  return Connection(near, **more), Connection(far, prepare=room, **more)


def sent(*messages) -> bytes:
  """The bytes of messages on the wire."""
  near, far = socket.socketpair()
  taken = []

  def take():
    while piece := far.recv(1 << 16):
      taken.append(piece)

  reader = threading.Thread(target=take)
  reader.start()
  with Connection(near) as connection:
    for header, parts in messages:
      connection.send(header, parts)
  reader.join()
  return b"".join(taken)


def fed(data: bytes, patience=5.0, close=True):
  """What a connection makes of these bytes: its messages, until the stream ends or breaks."""
  near, far = socket.socketpair()

  def write():
    with contextlib.suppress(BrokenPipeError):  # who is sent nonsense hangs up
      near.sendall(data)
    if close:
      near.close()

  writer = threading.Thread(target=write)
  writer.start()
  found = []
  try:
    with Connection(far, prepare=room, patience=patience) as connection:
      while (message := connection.receive()) is not None:
        found.append(message)
  except TransferError as error:
    return found, str(error)
  finally:
    near.close() if not close else None
    writer.join()
  return found, ""


@pytest.mark.parametrize("budget", [1, 1000, 1 << 30])
def test_a_message_is_what_was_sent_whatever_is_taken_at_once(budget):
  here, there = pair()
  small = [bytes([n]) * n for n in SIZES[:2]]
  there.prepare = lambda header: (box := [bytearray(n) for n in SIZES[:2]], [[memoryview(x)] for x in box])
  count = here.send(HEADER, small)
  here.send({"kind": "other"})
  polls = 0
  while (message := there.poll(budget)) is None:
    polls += 1
  assert message == (HEADER, [bytearray(x) for x in small])
  assert polls >= count // budget - 1
  assert there.poll() == ({"kind": "other"}, None)
  assert there.poll() is None, "nothing more, and no waiting for it"
  assert there.received >= count


def test_large_buffers_arrive_while_the_sender_waits():
  here, there = pair()
  sender = threading.Thread(target=here.send, args=(HEADER, buffers()))
  sender.start()
  message = there.receive(10)
  sender.join()
  assert message.header == HEADER
  assert [x.tobytes() for x in message.payload] == [bytes(x) for x in buffers()]


PLACES = {"magic": 0, "length": 6, "checksum": 9, "header": 20, "first buffer": None, "last byte": -1}


@pytest.mark.parametrize("place", PLACES)
def test_a_damaged_byte_is_refused(place):
  data = bytearray(sent((HEADER, buffers())))
  at = PLACES[place] if PLACES[place] is not None else len(data) - sum(SIZES)
  data[at] ^= 1
  found, error = fed(bytes(data))
  assert found == []
  assert any(word in error for word in ("damaged", "speaks something else", "closed the stream", "wanted buffers"))


def test_it_is_the_checksum_that_finds_damage(monkeypatch):
  """Negative control: without one, a damaged buffer passes."""
  monkeypatch.setattr(transfer.zlib, "crc32", lambda data, start=0: 0)
  data = bytearray(sent((HEADER, buffers())))
  data[-1] ^= 1
  (message, *_), _ = fed(bytes(data))
  assert message.payload[2].tobytes() != bytes(buffers()[2])


@pytest.mark.parametrize("kept", [1, 11, 12, 60, -1])
def test_a_truncated_stream_is_refused(kept):
  found, error = fed(sent((HEADER, buffers()))[:kept])
  assert found == []
  assert "in the middle of a message" in error


def test_what_came_whole_before_the_end_counts():
  found, error = fed(sent((HEADER, buffers()), ({"kind": "bye"}, [])))
  assert [message.header for message in found] == [HEADER, {"kind": "bye"}]
  assert error == "the peer is gone"


def test_a_peer_that_goes_silent_within_a_message_is_given_up():
  start = time.monotonic()
  found, error = fed(sent((HEADER, buffers()))[:-1], patience=0.3, close=False)
  assert found == []
  assert "silent for 0." in error
  assert time.monotonic() - start < 3


def test_a_peer_that_takes_nothing_is_given_up():
  here, _there = pair(patience=0.3)
  with pytest.raises(TransferError, match="took nothing"):
    here.send(HEADER, [memoryview(bytes(50_000_000))])


def test_buffers_that_nobody_expects_cost_no_memory():
  def message(sums):
    text = json.dumps({"header": HEADER, "buffers": sums}).encode()
    return b"DECR" + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text

  assert "wanted buffers of" in fed(message([[10**15, 0]] * 3))[1]
  here, there = pair()
  there.prepare = None
  here.send(HEADER, [memoryview(b"x")])
  with pytest.raises(TransferError, match="none are expected"):
    there.receive(5)
  assert "speaks something else" in fed(b"GET / HTTP/1.1\r\n\r\n")[1]
  assert "speaks something else" in fed(b"DECR" + b"\xff" * 8)[1]


def greeted(mine, theirs):
  """What each side says of the other."""
  here, there = pair(patience=2.0)
  said = {}

  def greet(name, connection, identity):
    try:
      transfer.greet(connection, identity)
      said[name] = "welcome"
    except TransferError as error:
      said[name] = str(error)

  other = threading.Thread(target=greet, args=("there", there, theirs))
  other.start()
  greet("here", here, mine)
  other.join()
  return said


def test_peers_of_one_model_greet_and_others_are_refused_on_both_sides(lm):
  mine = transfer.identity(lm.params, "form")
  assert greeted(mine, dict(mine)) == {"here": "welcome", "there": "welcome"}
  other = {**lm.params, "norm": {"weight": lm.params["norm"]["weight"] + 1}}
  assert transfer.identity(other, "form")["model"] != mine["model"]
  for theirs in (transfer.identity(other, "form"), transfer.identity(lm.params, "another form"), {**mine, "code": "0"}):
    (name,) = [name for name in mine if mine[name] != theirs[name]]
    said = greeted(mine, theirs)
    assert all(f"another {name}" in each for each in said.values()), said


def test_a_peer_that_says_nothing_is_not_waited_for():
  """A half-open connection: accepted, and then nothing."""
  with transfer.listen() as listener:
    assert listener.getsockname()[0] == "127.0.0.1"
    assert transfer.accept(listener, 0.05) is None
    mute = socket.create_connection(listener.getsockname())
    start = time.monotonic()
    with transfer.accept(listener, 5, patience=0.3) as connection, pytest.raises(TransferError, match="said nothing"):
      transfer.greet(connection, {"model": "m"})
    assert time.monotonic() - start < 3
    mute.close()


def test_nobody_there_is_said_in_time():
  with transfer.listen() as listener:
    host, port = listener.getsockname()
  start = time.monotonic()
  with pytest.raises(TransferError, match=f"nobody answers at 127.0.0.1:{port} for 0.4 s"):
    transfer.connect(host, port, wait=0.4)
  assert time.monotonic() - start < 3


def test_the_code_is_known_by_its_sources():
  assert len(code()) == 64
  assert isinstance(transfer.direct(), bool)
