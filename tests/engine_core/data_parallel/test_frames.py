"""Messages of a data-parallel group over a socket, and what is none."""

import itertools
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from tokenloom.engine_core.data_parallel import messages as frames
from tokenloom.engine_core.data_parallel.messages import Frames, GroupHello, ToHub, decoder_of

HELLO = GroupHello("experts", 3, {"dtype": "bfloat16"})
BODY = msgspec.msgpack.encode(HELLO)
NESTED = b"\x82\xa4type\xa4VOTE\xa1x" + b"\x91" * 20_000 + b"\x00"
"""A field that no message has, whose value is a list within 20,000 lists."""

Pair = tuple[Frames[ToHub], socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    near.settimeout(30)
    with near, far:
        yield Frames(near, decoder_of(ToHub)), far


def test_messages_arrive_however_they_are_split(pair: Pair) -> None:
    reader, far = pair
    for byte in struct.pack("<I", len(BODY)) + BODY:
        far.sendall(bytes([byte]))
    assert reader.receive() == HELLO


def test_a_peer_that_sends_byte_by_byte_gets_no_more_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, far = pair
    clock = itertools.count(0.0, 3.0)  # each read begins three seconds after the one before
    monkeypatch.setattr(frames.time, "monotonic", lambda: next(clock))
    reader.limit(5.0)
    far.sendall(struct.pack("<I", len(BODY)) + BODY)
    with pytest.raises(TimeoutError):
        reader.receive()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"", "was closed"),
        (b"\x01\x00", "was closed"),
        (struct.pack("<I", len(BODY)) + BODY[:-1], "was closed"),
        (struct.pack("<I", 0), "none of a data-parallel group"),
        (struct.pack("<I", (1 << 20) + 1), "a message of 1048577 bytes"),
        (struct.pack("<I", 2**32 - 1), "a message of 4294967295 bytes"),
        (struct.pack("<I", len(BODY)) + BODY.replace(b"experts", b"\xff" * 7), "none of a data-parallel group"),
        (struct.pack("<I", len(BODY)) + BODY.replace(b"HELLO", b"\xc3\x28LLO"), "none of a data-parallel group"),
        (struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff", "none of a data-parallel group"),
        (struct.pack("<I", len(NESTED)) + NESTED, "none of a data-parallel group"),
    ],
)
def test_what_is_no_message_is_the_end_of_the_connection(pair: Pair, stream: bytes, error: str) -> None:
    reader, far = pair
    far.sendall(stream)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match=error):
        reader.receive()
