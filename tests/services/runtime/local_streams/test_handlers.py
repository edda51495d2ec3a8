"""The handler's side of a call."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.services.runtime.local_streams.conftest import (
    LIMIT,
    METHOD,
    OPEN,
    SOON,
    calling,
    echo,
    end_of,
    serving,
    stream,
    write_for,
)
from tokenloom.request.errors import ResourceExhausted
from tokenloom.services.runtime.local_streams.server import LocalServer
from tokenloom.services.runtime.local_streams.socket_end import JOINED_BYTES, Kind, decode_status, encode_frame
from tokenloom.v1.coordinator_pb2 import PickRequest


class Caller:
    """A raw connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def say(self, data: bytes) -> tuple[grpc.StatusCode, str]:
        """Send bytes and return the status of the answer, skipping other frames."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        writer.write(data)
        try:
            while True:
                head = await reader.readexactly(5)
                payload = await reader.readexactly(int.from_bytes(head[:4], "little"))
                if head[4] == Kind.STATUS:
                    status = decode_status(payload)
                    return status.code(), status.details() or ""
        finally:
            writer.close()


class Watched:
    """A handler that records how it ended."""

    def __init__(self) -> None:
        self.runs = asyncio.Event()
        self.ended = asyncio.Event()
        self.how: BaseException | None = None

    async def wait(self, requests: Any, context: Any) -> None:
        self.runs.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            self.how = error
            raise
        finally:
            self.ended.set()

    async def generate(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(LIMIT)
                self.runs.set()
        except BaseException as error:
            self.how = error
            raise
        finally:
            self.ended.set()


async def test_a_cancelled_handler_sees_it_where_it_waits(socket_dir: Path) -> None:
    watched = Watched()
    async with stream(watched.wait, socket_dir) as call:
        await watched.runs.wait()
        call.cancel()
        await watched.ended.wait()
        assert isinstance(watched.how, asyncio.CancelledError)


async def test_a_cancelled_generator_is_closed(socket_dir: Path) -> None:
    watched = Watched()
    async with stream(watched.generate, socket_dir) as call:
        await watched.runs.wait()
        call.cancel()
        await watched.ended.wait()
        assert isinstance(watched.how, GeneratorExit)


async def test_a_half_closed_stream_stays_open_in_the_other_direction(socket_dir: Path) -> None:
    async def count(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"%d" % len([each async for each in requests])

    async with stream(count, socket_dir) as call:
        for _ in range(3):
            await call.write(b"")
        await call.done_writing()
        assert await call.read() == b"3"
        assert await call.read() is grpc.aio.EOF


async def test_a_handler_that_does_not_read_holds_up_its_caller(socket_dir: Path) -> None:
    may_read = asyncio.Event()

    async def slow(requests: Any, context: Any) -> None:
        await may_read.wait()
        await context.write(b"%d" % len([each async for each in requests]))

    async with stream(slow, socket_dir) as call:
        written = await write_for(0.1, call)
        assert written < 16
        may_read.set()
        await call.write(b"")
        await call.done_writing()
        assert await call.read() == b"%d" % (written + 1)


async def test_a_handler_that_raises(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The edge lets none pass; if one did, the caller would get a status without its text."""

    async def fail(requests: Any, context: Any) -> None:
        raise ValueError("/etc/passwd")

    async with stream(fail, socket_dir) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert "/etc/passwd" in caplog.text


async def test_a_handler_that_cancels_itself(socket_dir: Path) -> None:
    async def leave(requests: Any, context: Any) -> None:
        raise asyncio.CancelledError

    async with stream(leave, socket_dir) as call:
        assert (await end_of(call)).code() is grpc.StatusCode.CANCELLED


async def test_a_message_that_is_too_long_to_answer(socket_dir: Path) -> None:
    seen: list[Exception] = []

    async def answer(requests: Any, context: Any) -> None:
        try:
            await context.write(bytes(LIMIT + 1))
        except ResourceExhausted as error:
            seen.append(error)
        await context.write(b"short")

    async with stream(answer, socket_dir) as call:
        assert await call.read() == b"short"
        assert len(seen) == 1


async def test_writing_to_a_caller_that_is_gone(socket_dir: Path) -> None:
    """A handler's child task may do so before the handler's cancellation reaches it."""
    watched, told = Watched(), asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        try:
            await watched.wait(requests, context)
        finally:
            with pytest.raises(asyncio.CancelledError, match="ended"):
                await context.write(b"x")
            told.set()

    async with stream(handle, socket_dir) as call:
        await watched.runs.wait()
        call.cancel()
        await told.wait()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (OPEN + encode_frame(Kind.MESSAGE, b"x")[:-1] + b"\0\0\0\0\0\x63", grpc.StatusCode.INTERNAL),
        (OPEN + encode_frame(Kind.MESSAGE, bytes(LIMIT + 1))[:5], grpc.StatusCode.RESOURCE_EXHAUSTED),
        (OPEN + OPEN, grpc.StatusCode.INTERNAL),
        (OPEN + encode_frame(Kind.STATUS), grpc.StatusCode.INTERNAL),
        (encode_frame(Kind.MESSAGE), grpc.StatusCode.INTERNAL),
        (encode_frame(Kind.OPEN, b"\xff\xfe"), grpc.StatusCode.UNIMPLEMENTED),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", grpc.StatusCode.INTERNAL),
    ],
    ids=["no-kind", "too-long", "twice", "status", "not-opened", "no-text", "http2"],
)
async def test_broken_frames_end_their_connection_only(
    data: bytes, code: grpc.StatusCode, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stream(echo, socket_dir) as other:
        await other.write(b"before")
        assert (await Caller(socket_dir / "s").say(data))[0] is code
        await other.write(b"after")
        assert [await other.read(), await other.read()] == [b"before", b"after"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "it is the caller's mistake"


async def test_broken_frames_cancel_the_handler(socket_dir: Path) -> None:
    watched = Watched()
    async with asyncio.timeout(SOON), serving(watched.wait, socket_dir / "s"):
        code, details = await Caller(socket_dir / "s").say(OPEN + encode_frame(Kind.STATUS))
        assert (code, details) == (grpc.StatusCode.INTERNAL, "a STATUS frame came out of turn")
        assert not watched.how or isinstance(watched.how, asyncio.CancelledError)


@pytest.mark.parametrize(
    ("response", "code"),
    [(bytes(LIMIT + 1), grpc.StatusCode.RESOURCE_EXHAUSTED), ("no bytes", grpc.StatusCode.INTERNAL)],
)
async def test_a_unary_response_that_cannot_be_sent(response: Any, code: grpc.StatusCode, socket_dir: Path) -> None:
    async def respond(request: bytes, context: Any) -> Any:
        return response

    server = LocalServer(str(socket_dir / "s"), lambda _: grpc.unary_unary_rpc_method_handler(respond), LIMIT)
    await server.open()
    try:
        async with asyncio.timeout(SOON), calling(socket_dir / "s") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(METHOD)(b"x")
            assert caught.value.code() is code
    finally:
        await server.close(0)


@pytest.mark.parametrize("num_bytes", [0, JOINED_BYTES, JOINED_BYTES + 1, LIMIT])
async def test_a_unary_response_of_any_length_arrives_whole(num_bytes: int, socket_dir: Path) -> None:
    async def respond(request: bytes, context: Any) -> bytes:
        return request[::-1]

    server = LocalServer(str(socket_dir / "s"), lambda _: grpc.unary_unary_rpc_method_handler(respond), LIMIT)
    await server.open()
    try:
        async with asyncio.timeout(SOON), calling(socket_dir / "s") as channel:
            request = os.urandom(num_bytes)
            assert await channel.unary_unary(METHOD)(request) == request[::-1]
    finally:
        await server.close(0)


async def test_a_unary_response_that_cannot_be_decoded(socket_dir: Path) -> None:
    async def respond(request: bytes, context: Any) -> bytes:
        return request

    server = LocalServer(str(socket_dir / "s"), lambda _: grpc.unary_unary_rpc_method_handler(respond), LIMIT)
    await server.open()
    try:
        async with asyncio.timeout(SOON), calling(socket_dir / "s") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(METHOD, None, PickRequest.FromString)(b"\xff")
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert caught.value.details() == "a message could not be decoded"
    finally:
        await server.close(0)
