"""A server of local streams with the handlers of a test, and a channel to it; on both event loops."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from tokenloom.services.runtime.host.servicer_edge import writing
from tokenloom.services.runtime.local_streams import socket_end
from tokenloom.services.runtime.local_streams.channel import LocalChannel
from tokenloom.services.runtime.local_streams.server import CallDetails, LocalServer
from tokenloom.services.runtime.local_streams.socket_end import Kind, encode_frame
from tokenloom.services.runtime.peers.channels import open_channel

METHOD = "/test.Test/Stream"
SOON = 30.0
"""Bound of every wait: a hang is a failure."""
LIMIT = 1 << 20
"""Bytes of a message."""

Handler = Callable[[Any, Any], Any]
Serve = Callable[[Handler], Awaitable[LocalChannel]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services run on uvloop, their tests on asyncio's own loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the seconds of a tick in this test."""
    monkeypatch.setattr(socket_end, "TICK_SECONDS", 0.01)
    return 0.01


@asynccontextmanager
async def serving(handler: Handler, path: Path) -> AsyncIterator[LocalServer]:
    """Serve one method whose messages are bytes."""
    handler = writing(handler) if inspect.isasyncgenfunction(handler) else handler

    def find(call: CallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        return grpc.stream_stream_rpc_method_handler(handler) if call.method == METHOD else None

    server = LocalServer(str(path), find, LIMIT)
    await server.open()
    try:
        yield server
    finally:
        await server.close(0)


@asynccontextmanager
async def calling(path: Path) -> AsyncIterator[LocalChannel]:
    """Open a channel to a process that serves local streams at ``path`` and no gRPC."""
    async with LocalChannel(open_channel("unix:/nowhere"), str(path), LIMIT) as channel:
        yield channel


@asynccontextmanager
async def stream(
    handler: Handler, folder: Path, method: str = METHOD
) -> "AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]":
    """Call ``handler``."""
    async with asyncio.timeout(SOON), serving(handler, folder / "s"), calling(folder / "s") as channel:
        yield channel.stream_stream(method)()


OPEN = encode_frame(Kind.OPEN, METHOD.encode())


async def end_of(call: Any) -> grpc.aio.AioRpcError:
    """Return how a call ended, once it has."""
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    await ended.wait()
    status: grpc.aio.AioRpcError = call._status
    return status


async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def write_for(seconds: float, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> int:
    """Write long messages; return how many the other side took."""
    written = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                await call.write(bytes(LIMIT))
                written += 1
    except TimeoutError:
        return written
