"""A plain ZMQ socket in an event loop: order, bounds, cancellation, failure."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.engine_core.client.async_socket import AsyncSocket

HWM = 4


class Broken(Exception):
    pass


MakePair = Callable[[int, int], tuple[AsyncSocket, zmq.Socket[bytes]]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[MakePair]:
    """One of ours, and a blocking one at its other end; both hold little."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def make(ours: int, theirs: int) -> tuple[AsyncSocket, zmq.Socket[bytes]]:
        near, far = context.socket(ours), context.socket(theirs)
        for socket in (near, far):
            socket.sndhwm = socket.rcvhwm = HWM
            socket.sndbuf = socket.rcvbuf = 4096
            sockets.append(socket)
        near.bind(f"ipc://{tmp_path}/socket")
        far.connect(f"ipc://{tmp_path}/socket")
        return AsyncSocket(near), far

    yield make
    context.destroy(linger=0)


async def test_what_comes_in_is_received_in_order(pair: MakePair) -> None:
    near, far = pair(zmq.PULL, zmq.PUSH)
    sending = asyncio.create_task(
        asyncio.to_thread(lambda: [far.send_multipart([b"%d" % i, b"x"]) for i in range(500)])
    )
    assert [await near.receive() for _ in range(500)] == [[b"%d" % i, b"x"] for i in range(500)]
    await sending


async def test_a_message_that_comes_while_nobody_waits_is_not_missed(pair: MakePair) -> None:
    near, far = pair(zmq.PULL, zmq.PUSH)
    for round_ in range(20):  # each begins with a socket that had nothing
        waiting = asyncio.create_task(near.receive())
        await asyncio.sleep(0)
        await asyncio.to_thread(far.send, b"%d" % round_)
        assert await waiting == [b"%d" % round_]
        await asyncio.to_thread(far.send, b"alone")
        for _ in range(3):
            await asyncio.sleep(0)
        assert await near.receive() == [b"alone"]


async def test_senders_wait_for_room_and_keep_their_order(pair: MakePair) -> None:
    near, far = pair(zmq.PUSH, zmq.PULL)
    body = bytes(2048)
    senders = [asyncio.create_task(near.send([b"%d" % i, body], copy=True)) for i in range(300)]
    await asyncio.sleep(0)
    assert not all(sender.done() for sender in senders), "there was room for all of them"
    senders[-1].cancel()
    read = await asyncio.to_thread(lambda: [far.recv_multipart()[0] for _ in range(299)])
    assert read == [b"%d" % i for i in range(299)]
    assert (await asyncio.gather(*senders, return_exceptions=True))[:-1] == [None] * 299


async def test_a_cancelled_receive_has_taken_nothing(pair: MakePair) -> None:
    near, far = pair(zmq.PULL, zmq.PUSH)
    waiting = asyncio.create_task(near.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.to_thread(far.send, b"kept")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await near.receive() == [b"kept"]


async def test_a_failure_ends_what_waits_and_what_comes(pair: MakePair) -> None:
    near, _ = pair(zmq.PULL, zmq.PUSH)
    waiting = asyncio.create_task(near.receive())
    await asyncio.sleep(0)
    near.fail(Broken("first"))
    near.fail(Broken("second"))
    with pytest.raises(Broken, match="first"):
        await waiting
    with pytest.raises(Broken, match="first"):
        await near.receive()
