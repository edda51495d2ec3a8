"""A call from its caller's side: gRPC's semantics over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.services.runtime.local_streams.conftest import LIMIT, METHOD, SOON, calling, echo, end_of, serving, stream
from tokenloom.services.runtime.local_streams import socket_end
from tokenloom.services.runtime.local_streams.socket_end import JOINED_BYTES
from tokenloom.v1 import coordinator_pb2 as pb


async def test_both_ways_and_to_the_end(socket_dir: Path) -> None:
    async with stream(echo, socket_dir) as call:
        messages = (b"a", b"", b"b" * LIMIT, b"c", b"d" * JOINED_BYTES, b"e" * (JOINED_BYTES + 1))
        for message in messages:
            await call.write(message)
            assert await call.read() == message
        for message in messages:
            await call.write(message)
        for message in messages:
            assert await call.read() == message
        assert not call.done()
        await call.done_writing()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.read() is grpc.aio.EOF
        assert (await end_of(call)).code() is grpc.StatusCode.OK
        assert call.done()
        assert not call.cancel()


async def test_messages_in_a_loop(socket_dir: Path) -> None:
    async def count(requests: Any, context: Any) -> AsyncIterator[bytes]:
        for number in range(1000):
            yield b"%d" % number

    async with stream(count, socket_dir) as call:
        assert [int(await call.read()) for _ in range(1000)] == list(range(1000))


async def test_what_waits_is_read_without_a_turn_of_the_loop(socket_dir: Path) -> None:
    async def three(requests: Any, context: Any) -> None:
        for _ in range(3):
            await context.write(b"x")

    async with stream(three, socket_dir) as call:
        assert (await end_of(call)).code() is grpc.StatusCode.OK  # all three have come
        turns: list[None] = []
        asyncio.get_running_loop().call_soon(turns.append, None)
        assert [await call.read() for _ in range(3)] == [b"x"] * 3
        assert not turns


async def test_messages_before_a_failure_are_read_before_it(socket_dir: Path) -> None:
    async def fail(requests: Any, context: Any) -> None:
        await context.write(b"a")
        await context.write(b"b")
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing", (("x-bin", b"\xff"), ("plain", "p")))

    async with stream(fail, socket_dir) as call:
        assert (await end_of(call)).code() is grpc.StatusCode.NOT_FOUND
        assert [await call.read(), await call.read()] == [b"a", b"b"]
        with pytest.raises(grpc.aio.AioRpcError, match="no such thing") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert tuple(caught.value.trailing_metadata()) == (("x-bin", b"\xff"), ("plain", "p"))


async def test_nothing_is_written_to_a_call_that_is_over(socket_dir: Path) -> None:
    async def fail(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.ABORTED, "overtaken")

    async with stream(fail, socket_dir) as call:
        assert (await end_of(call)).code() is grpc.StatusCode.ABORTED
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"a")
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="overtaken"):
            await call.read()


async def test_a_status_outlives_what_its_receiver_is_writing(socket_dir: Path) -> None:
    """The server ends while messages that it will never read are on their way."""

    async def fail_at_once(requests: Any, context: Any) -> None:
        await anext(requests)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not you")

    async with stream(fail_at_once, socket_dir) as call:
        with pytest.raises((asyncio.InvalidStateError, grpc.aio.AioRpcError)):
            await flood(call)
        assert (await end_of(call)).code() is grpc.StatusCode.FAILED_PRECONDITION


async def flood(call: Any) -> None:
    while True:
        await call.write(bytes(LIMIT))


async def test_nothing_is_written_after_the_last_message(socket_dir: Path) -> None:
    async with stream(echo, socket_dir) as call:
        await call.write(b"a")
        await call.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"b")
        assert await call.read() == b"a"


async def test_cancelling_a_call_ends_its_reader(socket_dir: Path) -> None:
    async with stream(echo, socket_dir) as call:
        await call.write(b"a")
        assert await call.read() == b"a"
        reading = asyncio.create_task(call.read())
        notified: list[Any] = []
        call.add_done_callback(notified.append)
        await asyncio.sleep(0)
        assert call.cancel()
        assert not call.cancel()
        assert (call.done(), notified) == (True, [call])
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert (await end_of(call)).code() is grpc.StatusCode.CANCELLED
        call.add_done_callback(notified.append)
        assert notified == [call, call]


async def test_a_call_cancelled_before_it_is_connected(socket_dir: Path) -> None:
    async with stream(echo, socket_dir) as call:
        assert call.cancel()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"a")


async def test_a_reader_that_gives_up_leaves_the_call_and_its_messages(socket_dir: Path) -> None:
    async with stream(echo, socket_dir) as call:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await call.read()
        await call.write(b"a")
        assert await call.read() == b"a"


async def test_a_message_that_is_too_long_to_send(socket_dir: Path) -> None:
    async with stream(echo, socket_dir) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.write(bytes(LIMIT + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await end_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_message_that_cannot_be_read(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), serving(echo, socket_dir / "s"), calling(socket_dir / "s") as channel:
        call = channel.stream_stream(METHOD, None, pb.PickResults.FromString)()
        await call.write(b"\xff" * 9)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_caller_that_does_not_read_holds_up_the_handler(socket_dir: Path) -> None:
    written = 0

    async def write_on(requests: Any, context: Any) -> None:
        nonlocal written
        while True:
            await context.write(bytes(LIMIT))
            written += 1

    async with stream(write_on, socket_dir) as call:
        assert await call.read() == bytes(LIMIT)
        before = -1
        while written != before:  # until nothing moves any more
            before = written
            for _ in range(100):
                await asyncio.sleep(0)
        assert written * LIMIT < 16 * socket_end.MAX_BYTES
        for _ in range(written + 8):
            assert await call.read() == bytes(LIMIT)
        assert written > before


async def test_an_unknown_method(socket_dir: Path) -> None:
    async with stream(echo, socket_dir, "/test.Test/Other") as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
