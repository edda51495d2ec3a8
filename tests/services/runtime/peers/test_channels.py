"""What gRPC's channels notice of a peer: its end, that it is stopped, and that the link to it is cut; a busy event loop
is none of these."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.services.runtime.peers.echo_part import METHOD
from tokenloom.services.runtime.peers.channels import open_channel

ROOT = Path(__file__).parents[4]
SOON = 30.0
"""Bound of every wait: a hang is a failure."""
BUSY_SECONDS = 3.5
"""Longer than the 2.6 s after which a peer that does not answer pings counts as dead."""


class EchoPart:
    """A process that serves the echo."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()


@asynccontextmanager
async def part(address: str) -> AsyncIterator[EchoPart]:
    command = (sys.executable, "-m", "tests.services.runtime.peers.echo_part", address)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    started = EchoPart(process, "")
    try:
        started.address = await started.line()
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test may have killed it
            process.kill()
        await process.communicate()


@asynccontextmanager
async def connected(address: str) -> "AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]":
    """A call that has been answered once."""
    async with open_channel(address) as channel:
        yield await answered_call(channel)


def open_call(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
    return call


async def answered_call(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
    """Return a call that has been answered once. On a busy machine the first attempts to connect may time out."""
    while True:
        call = open_call(channel)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(b"a")
            assert await call.read() == b"a"
            return call
        await asyncio.sleep(0.01)


async def is_lost(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class Cable:
    """Carries connections to an address until it is cut; then they stay open, and nothing passes."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._to_peer, self._from_peer = asyncio.Event(), asyncio.Event()
        self._to_peer.set()
        self._from_peer.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.num_connections = 0

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            for writer in self._writers:
                writer.close()

    def cut(self, *, one_way: bool = False) -> None:
        """``one_way``: what the peer sends still arrives."""
        self._to_peer.clear()
        if not one_way:
            self._from_peer.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += writer, far_writer
        self._tasks.append(asyncio.create_task(self._carry(reader, far_writer, self._to_peer)))
        self._tasks.append(asyncio.create_task(self._carry(far_reader, writer, self._from_peer)))

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_intact: asyncio.Event
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await is_intact.wait()
                writer.write(data)
            writer.write_eof()  # the other direction may be cut, and its end does not arrive then


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_killed_process_is_noticed_at_once(socket_dir: Path, transport: str) -> None:
    address = f"unix:{socket_dir}/s" if transport == "unix" else "127.0.0.1:0"
    seconds = []
    for _ in range(2):
        async with asyncio.timeout(SOON), part(address) as peer, connected(peer.address) as call:
            killed_at = asyncio.get_running_loop().time()
            peer.process.kill()
            await is_lost(call)
            seconds.append(asyncio.get_running_loop().time() - killed_at)
    assert min(seconds) < 0.5, "by a ping, which takes a second at least, not by the end of the connection"


async def test_a_stopped_process_ends_its_streams_on_both_sides_and_can_return(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), part("127.0.0.1:0") as peer, open_channel(peer.address) as channel:
        call = await answered_call(channel)
        peer.process.send_signal(signal.SIGSTOP)
        await is_lost(call)
        peer.process.send_signal(signal.SIGCONT)
        assert await peer.line() == "ended"
        again = await answered_call(channel)
        again.cancel()


async def test_a_cut_link_ends_the_stream_on_both_sides() -> None:
    async with asyncio.timeout(SOON), part("127.0.0.1:0") as peer:
        cable = Cable(peer.address)
        async with cable.laid() as address, connected(address) as call:
            cable.cut()
            await is_lost(call)
            assert await peer.line() == "ended"


async def test_a_call_over_a_cut_link_fails_with_its_connection_and_is_not_repeated_on_the_next_one() -> None:
    async with asyncio.timeout(SOON), part("127.0.0.1:0") as peer:
        cable = Cable(peer.address)
        async with cable.laid() as address, open_channel(address) as channel:
            first = await answered_call(channel)
            num_connections = cable.num_connections
            first.cancel()
            assert await peer.line() == "ended"
            cable.cut(one_way=True)
            call = open_call(channel)
            await call.write(b"a")
            await is_lost(call)
            assert cable.num_connections == num_connections


async def test_a_busy_event_loop_is_not_dead() -> None:
    async with asyncio.timeout(SOON), part("127.0.0.1:0") as peer, connected(peer.address) as call:
        message = f"busy {BUSY_SECONDS}".encode()
        await call.write(message)
        assert await call.read() == message
