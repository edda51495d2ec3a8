"""Messages of a data-parallel group over a socket, and what is none."""

import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from tokenloom.engine_core.data_parallel.frames import Frames, decoder_of
from tokenloom.engine_core.data_parallel.messages import GroupHello, ToHub

HELLO = GroupHello("experts", 3, {"dtype": "bfloat16"})
BODY = msgspec.msgpack.encode(HELLO)

Pair = tuple[Frames[ToHub], socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    near.settimeout(30)
    with near, far:
        yield Frames(near, decoder_of(ToHub)), far


def test_messages_arrive_however_they_are_split(pair: Pair) -> None:
    frames, far = pair
    for byte in struct.pack("<I", len(BODY)) + BODY:
        far.sendall(bytes([byte]))
    assert frames.receive() == HELLO


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
    ],
)
def test_what_is_no_message_is_the_end_of_the_connection(pair: Pair, stream: bytes, error: str) -> None:
    frames, far = pair
    far.sendall(stream)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match=error):
        frames.receive()
