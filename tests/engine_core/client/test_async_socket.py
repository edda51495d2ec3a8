"""A socket in an event loop: order, bounds, cancellation, failure."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tokenloom.engine_core.client.async_core_client import AsyncSocket
from tokenloom.engine_core.data.errors import EngineDeadError, NotSentError
from tokenloom.engine_core.wire.frames import IOV_MAX, MAX_FRAMES, FrameReceiver, FrameSender


class Broken(Exception):
    pass


Pair = tuple[AsyncSocket, socket.socket]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """One of ours, and a blocking one at its other end; both hold little."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours = AsyncSocket(near)
    yield ours, far
    ours.fail(Broken("the test has ended"))
    near.close()
    far.close()


async def test_what_comes_in_is_received_in_order(pair: Pair) -> None:
    near, far = pair
    sender = FrameSender(far)
    sending = asyncio.create_task(
        asyncio.to_thread(lambda: [sender.send_frames([b"%d" % i, b"x"]) for i in range(500)])
    )
    assert [await near.receive() for _ in range(500)] == [[b"%d" % i, b"x"] for i in range(500)]
    await sending


async def test_a_message_without_a_waiting_receiver_is_not_missed(pair: Pair) -> None:
    near, far = pair
    sender = FrameSender(far)
    for round_ in range(20):  # each begins with a socket that had nothing
        waiting = asyncio.create_task(near.receive())
        await asyncio.sleep(0)
        sender.send_frames([b"%d" % round_])
        assert await waiting == [b"%d" % round_]
        sender.send_frames([b"alone"])
        for _ in range(3):
            await asyncio.sleep(0)
        assert await near.receive() == [b"alone"]


async def test_a_sender_waits_for_its_receiver(pair: Pair) -> None:
    near, far = pair
    sender = FrameSender(far)
    sending = asyncio.create_task(
        asyncio.to_thread(lambda: [sender.send_frames([b"%d" % i, bytes(2048)]) for i in range(500)])
    )
    assert (await near.receive())[0] == b"0"
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not sending.done(), "the socket read all messages although none was received"
    assert [(await near.receive())[0] for _ in range(499)] == [b"%d" % i for i in range(1, 500)]
    await sending


async def test_senders_wait_for_room_and_keep_their_order(pair: Pair) -> None:
    near, far = pair
    body = bytes(2048)
    senders = [asyncio.create_task(near.send([b"%d" % i, body])) for i in range(300)]
    await asyncio.sleep(0)
    assert not all(sender.done() for sender in senders), "there was room for all of them"
    senders[-1].cancel()
    receiver = FrameReceiver(far)
    read = await asyncio.to_thread(lambda: [receiver.receive()[0] for _ in range(299)])
    assert read == [b"%d" % i for i in range(299)]
    assert (await asyncio.gather(*senders, return_exceptions=True))[:-1] == [None] * 299


async def test_a_message_whose_sender_was_cancelled_in_its_middle_is_completed(pair: Pair) -> None:
    near, far = pair
    large = bytes(1 << 20)
    cancelled = asyncio.create_task(near.send([b"large", large]))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    receiver = FrameReceiver(far)
    reading = asyncio.create_task(asyncio.to_thread(lambda: [receiver.receive(), receiver.receive()]))
    await near.send([b"next"])
    assert await reading == [[b"large", large], [b"next"]]


async def test_the_begin_of_a_message_is_reported_once_and_before_its_sender_can_be_cancelled(pair: Pair) -> None:
    near, far = pair
    begun: list[str] = []
    large = bytes(1 << 20)
    first = asyncio.create_task(near.send([large], lambda: begun.append("first")))
    second = asyncio.create_task(near.send([b"second"], lambda: begun.append("second")))
    await asyncio.sleep(0)
    assert begun == ["first"]
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    receiver = FrameReceiver(far)
    reading = asyncio.create_task(asyncio.to_thread(lambda: [receiver.receive(), receiver.receive()]))
    await near.send([b"third"], lambda: begun.append("third"))
    assert await reading == [[large], [b"third"]]
    assert begun == ["first", "third"]


async def test_more_frames_than_one_call_of_the_system_takes_go_both_ways(pair: Pair) -> None:
    near, far = pair
    frames = [b"%d" % index for index in range(3 * IOV_MAX)]
    receiver, sender = FrameReceiver(far), FrameSender(far)
    reading = asyncio.create_task(asyncio.to_thread(receiver.receive))
    await near.send(frames)
    assert await reading == frames
    sending = asyncio.create_task(asyncio.to_thread(sender.send_frames, frames))
    assert await near.receive() == frames
    await sending


async def test_a_message_that_cannot_be_sent_leaves_the_queue(pair: Pair) -> None:
    near, far = pair
    with pytest.raises(NotSentError, match="frames; it has 1 to"):
        await near.send([b""] * (MAX_FRAMES + 1))
    await near.send([b"next"])
    assert FrameReceiver(far).receive() == [b"next"]


class FaultyConnection:
    """A socket whose sends fail with some errors, one after the other, and then work."""

    def __init__(self, connection: socket.socket, *errors: int | None) -> None:
        self._connection = connection
        self._errors = list(errors)

    def sendmsg(self, buffers: list[bytes]) -> int:
        if self._errors and (number := self._errors.pop(0)) is not None:
            raise OSError(number, os.strerror(number))
        return self._connection.send(b"".join(buffers)[:10])

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


@pytest.mark.parametrize("faults", [(errno.EMSGSIZE,), (errno.ENOBUFS, errno.EMSGSIZE)])
async def test_an_error_of_the_system_fails_the_message_that_was_not_begun(faults: tuple[int, ...]) -> None:
    near, far = socket.socketpair()
    with near, far:
        ours = AsyncSocket(cast(socket.socket, FaultyConnection(near, *faults)))
        begun: list[int] = []
        with pytest.raises(NotSentError, match="Message too long"):
            await ours.send([b"refused"], lambda: begun.append(1))
        await ours.send([b"next"])
        assert FrameReceiver(far).receive() == [b"next"]
        assert not begun


async def test_an_error_within_a_message_is_the_end_of_the_connection() -> None:
    near, far = socket.socketpair()
    with near, far:
        ours = AsyncSocket(cast(socket.socket, FaultyConnection(near, None, errno.ENOMEM, None, errno.EMSGSIZE)))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="ended in its middle"):
                await ours.send([bytes(100)])


async def test_bytes_that_are_no_message_are_the_end_of_the_connection(pair: Pair) -> None:
    near, far = pair
    far.sendall(bytes(64))
    with pytest.raises(EngineDeadError, match="something else than messages"):
        await near.receive()


async def test_a_message_of_which_nothing_was_sent_is_dropped_with_its_sender(pair: Pair) -> None:
    near, far = pair
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    first = [asyncio.create_task(near.send([b"%d" % i, bytes(512)])) for i in range(300)]
    for _ in range(3):
        await asyncio.sleep(0)
    waiting = next(i for i, sender in enumerate(first) if not sender.done())
    first[waiting].cancel()
    receiver = FrameReceiver(far)
    read = await asyncio.to_thread(lambda: [int(receiver.receive()[0]) for _ in range(299)])
    assert read == [i for i in range(300) if i != waiting]
    await asyncio.gather(*first, return_exceptions=True)


async def test_a_cancelled_receive_has_taken_nothing(pair: Pair) -> None:
    near, far = pair
    waiting = asyncio.create_task(near.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    FrameSender(far).send_frames([b"kept"])
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await near.receive() == [b"kept"]


async def test_a_failure_ends_what_waits_and_what_comes(pair: Pair) -> None:
    near, _ = pair
    waiting = asyncio.create_task(near.receive())
    await asyncio.sleep(0)
    near.fail(Broken("first"))
    near.fail(Broken("second"))
    with pytest.raises(Broken, match="first"):
        await waiting
    with pytest.raises(Broken, match="first"):
        await near.receive()


async def test_a_connection_may_be_closed_at_once_although_a_sender_waits_for_room() -> None:
    """Its number is soon that of another connection, which the event loop must not take for this one."""
    near, far = socket.socketpair()
    ours = AsyncSocket(near)
    waiting = asyncio.create_task(ours.send([bytes(8 << 20)]))
    await asyncio.sleep(0)
    number = near.fileno()
    ours.fail(Broken("it was closed"))
    near.close()
    with pytest.raises(Broken, match="closed"):
        await waiting
    far.close()
    another, end = socket.socketpair()
    with another, end:
        assert number in (another.fileno(), end.fileno())
        for each in (another, end):
            asyncio.get_running_loop().add_reader(each.fileno(), print)
            asyncio.get_running_loop().remove_reader(each.fileno())


async def test_after_the_end_of_the_connection_operations_wait_for_its_reason(pair: Pair) -> None:
    near, far = pair
    FrameSender(far).send_frames([b"last"])
    far.close()
    assert await near.receive() == [b"last"]
    operations = [asyncio.create_task(near.receive()), asyncio.create_task(near.send([b"late"]))]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(operation.done() for operation in operations)
    near.fail(Broken("it was killed"))
    for operation in operations:
        with pytest.raises(Broken, match="killed"):
            await operation
