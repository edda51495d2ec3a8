"""Opening and closing the server."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.services.runtime.local_streams.conftest import LIMIT, METHOD, OPEN, SOON, calling, echo, serving
from tests.services.runtime.local_streams.test_handlers import Watched
from tokenloom.services.runtime.local_streams.server import LocalServer
from tokenloom.services.runtime.local_streams.socket_end import Kind, encode_frame


async def test_nothing_is_left_behind(socket_dir: Path) -> None:
    async with serving(echo, socket_dir / "s"):
        assert os.listdir(socket_dir) == ["s"]
    assert not os.listdir(socket_dir)


async def test_a_server_that_was_never_opened(socket_dir: Path) -> None:
    await LocalServer(str(socket_dir / "s"), Any, 1).close(0)  # type: ignore[arg-type]


async def test_it_takes_over_what_a_killed_one_left(socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(socket_dir / "s"))
    async with asyncio.timeout(SOON), serving(echo, socket_dir / "s"), calling(socket_dir / "s") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"a")
        assert await call.read() == b"a"


async def test_it_takes_nothing_over_from_one_that_serves(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), serving(echo, socket_dir / "s"), calling(socket_dir / "s") as channel:
        with pytest.raises(OSError, match="a process listens there"):
            async with serving(echo, socket_dir / "s"):
                pass
        call = channel.stream_stream(METHOD)()
        await call.write(b"a")
        assert await call.read() == b"a"


async def test_closing_waits_for_handlers_within_the_grace(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), serving(echo, socket_dir / "s") as server, calling(socket_dir / "s") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"a")
        assert await call.read() == b"a"
        closing = asyncio.create_task(server.close(SOON))
        while (socket_dir / "s").exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert channel.open_call(OPEN, None, None) is None, "no new ones"
        await call.write(b"b")
        await call.done_writing()
        assert [await call.read(), await call.read()] == [b"b", grpc.aio.EOF]
        await closing
        await server.close(SOON)


async def test_closing_waits_for_the_rest_of_a_request(socket_dir: Path) -> None:
    async def respond(request: bytes, context: Any) -> bytes:
        return request

    server = LocalServer(str(socket_dir / "s"), lambda _: grpc.unary_unary_rpc_method_handler(respond), LIMIT)
    await server.open()
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_unix_connection(socket_dir / "s")
        message = encode_frame(Kind.MESSAGE, bytes(1000))
        writer.write(OPEN + message[:500])
        while not any(call.is_arriving for call in server._calls):  # noqa: ASYNC110
            await asyncio.sleep(0)
        closing = asyncio.create_task(server.close(SOON))
        while (socket_dir / "s").exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        writer.write(message[500:])
        assert await reader.readexactly(len(message)) == message
        writer.close()
        await closing


async def test_after_the_grace_calls_are_unavailable(socket_dir: Path) -> None:
    watched = Watched()
    async with (
        asyncio.timeout(SOON),
        serving(watched.wait, socket_dir / "s") as server,
        calling(socket_dir / "s") as channel,
    ):
        call = channel.stream_stream(METHOD)()
        await watched.runs.wait()
        await server.close(0)
        with pytest.raises(grpc.aio.AioRpcError, match="the server is stopping") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(watched.how, asyncio.CancelledError)


async def test_a_caller_that_reads_nothing_does_not_delay_closing(socket_dir: Path) -> None:
    watched = Watched()
    async with (
        asyncio.timeout(SOON),
        serving(watched.generate, socket_dir / "s") as server,
        calling(socket_dir / "s") as channel,
    ):
        channel.stream_stream(METHOD)()
        await watched.runs.wait()
        await server.close(0)
        assert watched.ended.is_set()


async def test_a_socket_that_the_event_loop_accepted_before_it_closed(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), serving(echo, socket_dir / "s") as server:
        await server.close(0)
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(server._accept, theirs)
            assert await asyncio.get_running_loop().sock_recv(ours, 1) == b"", "it is closed at once"


async def test_connections_are_cut_when_it_has_closed(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), serving(echo, socket_dir / "s") as server:
        with socket.socket(socket.AF_UNIX) as ours:
            ours.setblocking(False)
            ours.connect(str(socket_dir / "s"))
            while not server._calls:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await server.close(0)
            assert not server._calls
