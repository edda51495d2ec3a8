"""Connections in TLS come through a relay to gateways, in both directions and with bounds."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tokenloom.services.relay import http_relay as module
from tokenloom.services.relay.http_relay import HttpRelay
from tokenloom.supervisor.certificates import make_certificates

LIMIT = 30.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, days=30)
    return folder


def trusting(certificates: Path) -> ssl.SSLContext:
    """Return what a client knows."""
    theirs = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    theirs.check_hostname = False
    return theirs


@asynccontextmanager
async def https(
    certificates: Path, *ports: int, max_connections: int = 8, max_per_peer: int = 8
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, HttpRelay]]:
    """A connection through a relay to one of several ports of this machine, of which the second one is tried first."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificates / "gateway.crt", certificates / "gateway.key")
    http_relay = HttpRelay([("127.0.0.1", port) for port in ports], ours, max_connections, max_per_peer)
    server = await http_relay.serve("127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*address, ssl=trusting(certificates), server_hostname="")
    try:
        yield reader, writer, http_relay
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        server.close()
        http_relay.close()


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@asynccontextmanager
async def behind(answer: Answer, port: int = 0) -> AsyncIterator[int]:
    """The port of what a relay connects to. All its connections have ended at the end."""
    live: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        live.add(task := cast("asyncio.Task[Any]", asyncio.current_task()))
        try:
            await answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            live.discard(task)

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        yield server.sockets[0].getsockname()[1]
        while live:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def test_bytes_come_through_in_both_directions_however_slowly_they_are_read(certificates: Path) -> None:
    sent = bytes(range(256)) * (16 << 10)
    async with asyncio.timeout(LIMIT), behind(echo) as port, https(certificates, port) as (reader, writer, _):
        writer.write(sent)
        await asyncio.sleep(0)
        assert await reader.readexactly(len(sent)) == sent


async def test_a_connection_waits_for_a_gateway_that_starts(certificates: Path) -> None:
    async with asyncio.timeout(LIMIT):
        async with behind(echo) as port:
            pass
        async with https(certificates, port) as (reader, writer, _):
            writer.write(b"wait")
            async with behind(echo, port):
                assert await reader.readexactly(4) == b"wait"
                writer.close()


async def test_a_client_that_leaves_ends_its_connection_to_the_gateway(certificates: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        assert not await reader.read()
        ended.set()

    async with asyncio.timeout(LIMIT), behind(wait) as port, https(certificates, port) as (_, writer, _):
        await begun.wait()
        writer.transport.abort()
        await ended.wait()


async def test_the_end_of_a_gateways_connection_is_that_of_the_clients(certificates: Path) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all of it" * 10_000)

    async with asyncio.timeout(LIMIT), behind(say) as port, https(certificates, port) as (reader, _, _):
        assert await reader.read() == b"all of it" * 10_000


async def test_an_ending_relay_waits_for_answers_and_not_for_connections(certificates: Path) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        asked.set()
        await may_answer.wait()
        writer.write(b"the answer")
        await writer.drain()
        await reader.read()

    async with (
        asyncio.timeout(LIMIT),
        behind(answer) as port,
        https(certificates, port) as (reader, writer, http_relay),
    ):
        writer.write(b"?")
        await asked.wait()
        draining = asyncio.create_task(http_relay.drain(LIMIT))
        await asyncio.wait([draining], timeout=1.5)
        assert not draining.done()
        may_answer.set()
        assert await reader.readexactly(10) == b"the answer"
        await draining
        assert not reader.at_eof()


@pytest.mark.parametrize(("limit", "flag"), [("max_connections", "connections"), ("max_per_peer", "per-peer")])
async def test_connections_beyond_a_limit_are_closed(
    certificates: Path, limit: str, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        asyncio.timeout(LIMIT),
        behind(echo) as port,
        https(certificates, port, **{limit: 1}) as (reader, writer, _),
    ):
        address = writer.get_extra_info("peername")
        with pytest.raises(OSError, match=r".*"):
            await asyncio.open_connection(*address, ssl=trusting(certificates), server_hostname="")
        assert f"{flag})" in caplog.text
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        assert not await reader.read()
        while True:  # the relay has yet to read the end of the first one
            try:
                _, another = await asyncio.open_connection(*address, ssl=trusting(certificates), server_hostname="")
            except OSError:
                continue
            another.close()
            break


async def test_failed_handshakes_do_not_count_for_an_address(certificates: Path) -> None:
    async with (
        asyncio.timeout(LIMIT),
        behind(echo) as port,
        https(certificates, port, max_per_peer=2) as (_, writer, http_relay),
    ):
        for _ in range(3):
            reader, wrong = await asyncio.open_connection(*writer.get_extra_info("peername"))
            wrong.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            wrong.close()
            while http_relay._of_peer["127.0.0.1"] > 1:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_gateway_whose_machine_is_gone_does_not_hide_the_next_one(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRY_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as waiting:
        for _ in range(3):  # the kernel drops further attempts to connect
            filler = waiting.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        async with (
            asyncio.timeout(3),
            behind(echo) as port,
            https(certificates, port, silent.getsockname()[1]) as (reader, writer, _),
        ):
            writer.write(b"a word")
            assert await reader.readexactly(6) == b"a word"


async def test_connections_that_never_become_encrypted_make_room_for_others(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that begin no handshake could take every descriptor."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 10 * LIMIT)
    async with (
        asyncio.timeout(LIMIT),
        behind(echo) as port,
        https(certificates, port, max_connections=3) as (reader, writer, http_relay),
    ):
        address = writer.get_extra_info("peername")
        silent = [await asyncio.open_connection(*address) for _ in range(4)]
        for early, _ in silent[:2]:
            with contextlib.suppress(ConnectionError):
                assert not await early.read()
        another = await asyncio.open_connection(*address, ssl=trusting(certificates), server_hostname="")
        for each_reader, each_writer in ((reader, writer), another):
            each_writer.write(b"a word")
            assert await each_reader.readexactly(6) == b"a word"
        assert http_relay.num_connections == 2
        for _, each_writer in (*silent, another):
            each_writer.close()
