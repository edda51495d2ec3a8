"""Connections that waited in a held socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from tokenloom.services.runtime.host.held_port import HeldPort
from tokenloom.services.runtime.peers.certificate_files import dns_name
from tokenloom.supervisor.certificates import make_certificates

LIMIT = 30.0
SIZE = 3 << 20
"""Bytes of a message that fills the sockets on its way."""


class Echo(grpc.GenericRpcHandler):
    """Answers with the request after ``release`` was set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.peers: list[str] = []

    def service(self, _: Any) -> Any:
        async def echo(request: bytes, context: Any) -> bytes:
            self.peers.append(context.peer())
            await self.release.wait()
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Echo, HeldPort, socket.socket, str]]:
    """A port that is not open yet."""
    echo = Echo()
    with socket.create_server(("127.0.0.1", 0)) as held:
        held.setblocking(False)
        port = HeldPort(held.dup(), echo, [("grpc.max_receive_message_length", -1)], 100, None)  # type: ignore[arg-type]
        try:
            yield echo, port, held, f"127.0.0.1:{held.getsockname()[1]}"
        finally:
            await port.close(0)


def channel_to(address: str) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(address, options)


async def waits_and_is_answered() -> None:
    async with relayed() as (echo, port, _, address), channel_to(address) as channel, asyncio.timeout(LIMIT):
        call = channel.unary_unary("/a/b")(b"x" * SIZE)
        echo.release.set()
        await port.open()
        assert await call == b"x" * SIZE


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_waiting_connection_is_served(new_loop: Any) -> None:
    """uvloop reads a connection's first bytes earlier than asyncio does."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(waits_and_is_answered())


async def test_clients_leave_the_relay_after_their_call() -> None:
    """The client is asked to connect anew while its call runs; the call ends, and the next one makes a connection."""
    async with relayed() as (echo, port, held, address), channel_to(address) as channel, asyncio.timeout(LIMIT):
        await port.open()
        call = channel.unary_unary("/a/b")(b"x")
        while not echo.peers:  # noqa: ASYNC110
            await asyncio.sleep(0)
        port.leave()
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(loop.sock_accept(held))
        again = channel.unary_unary("/a/b")(b"y")
        while not accepting.done():
            again.cancel()
            again = channel.unary_unary("/a/b")(b"y")
            await asyncio.wait([accepting], timeout=0.1)
        again.cancel()
        echo.release.set()
        assert await call == b"x"
        accepting.result()[0].close()


async def test_a_client_that_leaves_is_forgotten() -> None:
    async with relayed() as (_, port, _, address), asyncio.timeout(LIMIT):
        await port.open()
        host, _, number = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        assert (await reader.readexactly(9))[3] == 4  # SETTINGS: the server behind the relay has answered
        writer.close()
        while port._relays:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_closing_before_opening() -> None:
    async with relayed():
        pass


class Counting(grpc.GenericRpcHandler):
    """Streams numbers; the last ones after ``release`` was set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    def service(self, _: Any) -> Any:
        async def count(request: bytes, context: Any) -> None:
            for number in range(4):
                if number == 2:
                    await self.release.wait()
                await context.write(request + bytes([number]))

        return grpc.unary_stream_rpc_method_handler(count)


async def test_a_stream_over_tls_passes_the_relay(tmp_path: Path) -> None:
    """It continues while the client is asked to connect anew, and after the port was left to the next process."""
    make_certificates(tmp_path, days=30)
    files = [(tmp_path / f"gateway.{end}").read_bytes() for end in ("key", "crt")]
    counting = Counting()
    with socket.create_server(("127.0.0.1", 0)) as held:
        held.setblocking(False)
        credentials = grpc.ssl_server_credentials([(files[0], files[1])])
        port = HeldPort(held.dup(), counting, [], 100, credentials)  # type: ignore[arg-type]
        trusted = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
        address = f"localhost:{held.getsockname()[1]}"
        options = [("grpc.ssl_target_name_override", dns_name("gateway"))]
        async with grpc.aio.secure_channel(address, trusted, options) as channel, asyncio.timeout(LIMIT):
            call = channel.unary_stream("/a/b")(b"x")
            await port.open()
            assert [await call.read(), await call.read()] == [b"x\0", b"x\1"]
            assert port._relays
            port.leave()
            closing = asyncio.create_task(port.close(LIMIT))
            counting.release.set()
            assert [await call.read(), await call.read()] == [b"x\2", b"x\3"]
            await closing
