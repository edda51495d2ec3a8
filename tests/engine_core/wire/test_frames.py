import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from tokenloom.engine_core.wire.frames import FrameSender, receive_frames
from tokenloom.engine_core.wire.serialization import Decoder

LARGE = 1 << 20


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """PUSH and PULL, the message being in ZMQ's hands until it is received."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pull.bind("inproc://frames")
    push.connect("inproc://frames")
    yield push, pull
    context.destroy(linger=0)


def test_a_buffer_is_used_again_only_after_it_was_sent(sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    push, pull = sockets
    sender, decoder = FrameSender(push), Decoder(list[bytes])
    for content in (b"a", b"b"):
        sender.send([content * LARGE])
    assert sender.num_sending == 2, "each message lies in a buffer of its own"
    for content in (b"a", b"b"):
        frames = receive_frames(pull, num_small=1)
        assert decoder.decode(frames) == [content * LARGE]
    deadline = time.monotonic() + 30
    while sender.num_sending:  # ZMQ tells of it from a thread of its own
        sender.send([b"c"])
        assert decoder.decode(receive_frames(pull, num_small=1)) == [b"c"]
        assert time.monotonic() < deadline


def test_a_small_array_behind_a_large_body_does_not_free_the_body(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    push, pull = sockets
    sender = FrameSender(push)
    sender.send([b"a" * LARGE, np.arange(100)], b"head")
    sender.send([b"b" * LARGE])
    assert sender.num_sending == 2
    head, *frames = receive_frames(pull, num_small=2)
    assert head == b"head"
    text, array = Decoder(tuple[bytes, np.ndarray]).decode(frames)
    assert text == b"a" * LARGE
    np.testing.assert_array_equal(array, np.arange(100))


def test_arrays_are_neither_copied_when_sent_nor_when_received(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    push, pull = sockets
    array = np.arange(LARGE)
    FrameSender(push).send([array])
    (found,) = Decoder(list[np.ndarray]).decode(receive_frames(pull, num_small=1))
    assert np.shares_memory(found, array), "within one process even the memory is the same"
