"""The proxy copies, holds, delays and resets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.chaos.faults.proxy import Proxy
from tests.loop_clock import pass_time, settle


class Ends:
    """Both ends of one connection through a proxy."""

    def __init__(self, proxy: Proxy, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.proxy = proxy
        self.from_server, self.to_server = client
        self.server: tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def ends(socket_dir: Path) -> AsyncIterator[Ends]:
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda *pair: accepted.put_nowait(pair), str(socket_dir / "real"))
    proxy = Proxy(lambda: asyncio.open_unix_connection(str(socket_dir / "real")))
    await proxy.listen_unix(str(socket_dir / "front"))
    found = Ends(proxy, await asyncio.open_unix_connection(str(socket_dir / "front")))
    found.server = await accepted.get()
    yield found
    await proxy.close()
    for writer in (found.to_server, found.server[1]):
        writer.close()
    server.close()
    await settle()


async def test_bytes_and_their_end_pass_both_ways(ends: Ends) -> None:
    reader, writer = ends.server
    ends.to_server.write(b"question")
    ends.to_server.write_eof()
    assert await reader.read() == b"question"
    writer.write(b"answer")
    writer.close()
    assert await ends.from_server.read() == b"answer"


async def test_a_cut_in_one_direction_holds_what_is_sent(ends: Ends) -> None:
    reader, writer = ends.server
    ends.proxy.to_server.close()
    ends.to_server.write(b"held")
    writer.write(b"passes")
    assert await ends.from_server.readexactly(6) == b"passes"
    while not ends.proxy.to_server.held_bytes:  # noqa: ASYNC110  # of bytes on their way there is no event
        await asyncio.sleep(0)
    assert ends.proxy.to_server.held_bytes == 4
    assert ends.proxy.from_server.held_bytes == 0
    ends.proxy.to_server.open()
    assert await reader.readexactly(4) == b"held"


async def test_a_delay(ends: Ends) -> None:
    reader, _ = ends.server
    ends.proxy.to_server.delay = 1000.0
    ends.to_server.write(b"late")
    while not ends.proxy.to_server.delayed_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await settle()
    pass_time(1001.0)
    assert await reader.readexactly(4) == b"late"


async def test_a_reset_ends_every_connection(ends: Ends) -> None:
    assert ends.proxy.reset() == 1
    assert await ends.from_server.read() == b""
    assert await ends.server[0].read() == b""
    while ends.proxy.num_connections:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_server_that_is_not_there(socket_dir: Path) -> None:
    proxy = Proxy(lambda: asyncio.open_unix_connection(str(socket_dir / "nothing")))
    await proxy.listen_unix(str(socket_dir / "front"))
    reader, writer = await asyncio.open_unix_connection(str(socket_dir / "front"))
    assert await reader.read() == b""
    writer.close()
    await proxy.close()
    await settle()
