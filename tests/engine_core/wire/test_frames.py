import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import cycle
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.engine_core.wire.frames import (
    IOV_MAX,
    MAX_BYTES,
    MAX_FRAMES,
    READ_BYTES,
    Decoder,
    Frame,
    FrameReader,
    FrameReceiver,
    FrameSender,
    head,
)

LARGE = 1 << 20

Messages = list[list[bytes]]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


class FakeConnection:
    """A socket of which each read returns at most the next of some numbers of bytes."""

    def __init__(self, stream: bytes, sizes: Iterator[int]) -> None:
        self._stream = stream
        self._sizes = sizes

    def recv(self, most: int) -> bytes:
        count = min(most, next(self._sizes))
        data, self._stream = self._stream[:count], self._stream[count:]
        return data

    def recvmsg_into(self, buffers: list[memoryview]) -> tuple[int]:
        left = data = self.recv(sum(map(len, buffers)))
        for buffer in map(memoryview, buffers):
            part = left[: len(buffer)]
            buffer[: len(part)] = part
            left = left[len(part) :]
        return (len(data),)


FRAMES = st.one_of(st.binary(max_size=40), st.integers(0, 3).map(lambda n: bytes([n]) * (READ_BYTES - 20 + 10 * n)))


@given(st.lists(st.lists(FRAMES, min_size=1, max_size=4), max_size=6), st.data())
def test_messages_are_found_however_the_stream_is_split(messages: Messages, data: st.DataObject) -> None:
    stream = b"".join(head(frames) + b"".join(frames) for frames in messages)
    sizes = data.draw(st.lists(st.sampled_from([1, 3, 4, 5, 11, 60, 1000, READ_BYTES]), min_size=1, max_size=8))
    connection = cast(socket.socket, FakeConnection(stream, cycle([*sizes, READ_BYTES])))
    reader = FrameReader()
    found: list[list[Frame]] = []
    while (complete := reader.read(connection)) is not None:
        found += complete
    assert found == messages


@pytest.mark.parametrize("count", [1, IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 3 * IOV_MAX])
@pytest.mark.parametrize("size", [0, 300])
def test_more_frames_arrive_than_one_call_of_the_system_takes(
    sockets: tuple[socket.socket, socket.socket], count: int, size: int
) -> None:
    near, far = sockets
    frames = [b"body", *(index.to_bytes(2, "little") * (size // 2) for index in range(count))]
    thread = threading.Thread(target=FrameSender(near).send_frames, args=(frames,))
    thread.start()
    receiver = FrameReceiver(far)
    assert receiver.receive() == frames
    thread.join()
    thread = threading.Thread(target=FrameSender(near).send_frames, args=([b"after"],))
    thread.start()
    assert receiver.receive() == [b"after"]
    thread.join()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (struct.pack("<I", 0), "of 0 frames; it has 1 to"),
        (struct.pack("<I", MAX_FRAMES + 1), f"of {MAX_FRAMES + 1} frames"),
        (struct.pack("<I", 2**32 - 1), f"of {2**32 - 1} frames"),
        (struct.pack("<IQ", 1, MAX_BYTES + 1), f"of {MAX_BYTES + 1} bytes; it has at most"),
        (struct.pack("<IQ", 1, 2**63), f"of {2**63} bytes"),
        (struct.pack("<IQ", 1, 2**64 - 1), f"of {2**64 - 1} bytes"),
        (struct.pack("<IQQ", 2, 2**64 - 1, 2), f"of {2**64 + 1} bytes"),
    ],
)
def test_sizes_that_no_sender_writes_are_refused_before_memory_is_taken(stream: bytes, error: str) -> None:
    connection = cast(socket.socket, FakeConnection(stream, cycle([READ_BYTES])))
    with pytest.raises(ValueError, match=error):
        FrameReader().read(connection)


def test_a_sender_refuses_more_frames_than_a_receiver_takes() -> None:
    assert len(head([b""] * MAX_FRAMES)) == 4 + 8 * MAX_FRAMES
    with pytest.raises(ValueError, match="frames; it has 1 to"):
        head([b""] * (MAX_FRAMES + 1))
    with pytest.raises(ValueError, match="of 0 frames"):
        head([])


def test_messages_and_arrays_of_any_size_arrive(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    receiver, decoder = FrameReceiver(far), Decoder(tuple[bytes, np.ndarray])
    sender = FrameSender(near)
    sizes = (10, LARGE, 10, 3 * LARGE)

    def send() -> None:
        for size in sizes:
            sender.send([b"a" * size, np.arange(size)], b"head")

    thread = threading.Thread(target=send)
    thread.start()
    for size in sizes:
        leading, *frames = receiver.receive()
        assert leading == b"head"
        text, array = decoder.decode(frames)
        assert text == b"a" * size
        np.testing.assert_array_equal(array, np.arange(size))
    thread.join()


class ScarceConnection:
    """A socket whose sends find no memory each second time, and otherwise take a few bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._errors = cycle([errno.ENOBUFS, None, errno.ENOMEM, None])

    def sendmsg(self, buffers: list[Frame]) -> int:
        if (number := next(self._errors)) is not None:
            raise OSError(number, os.strerror(number))
        return self._connection.send(b"".join(buffers)[:10])


def test_a_message_waits_for_memory_of_the_system(sockets: tuple[socket.socket, socket.socket]) -> None:
    sender = FrameSender(cast(socket.socket, ScarceConnection(sockets[0])))
    sender.send_frames([b"first", bytes(20)])
    assert FrameReceiver(sockets[1]).receive() == [b"first", bytes(20)]


def test_the_end_of_the_connection_comes_after_the_last_message(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    FrameSender(near).send_frames([b"last"])
    near.close()
    receiver = FrameReceiver(far)
    assert receiver.receive() == [b"last"]
    with pytest.raises(EOFError):
        receiver.receive()
