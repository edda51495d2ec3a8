"""Stands in front of a socket and holds, delays or resets what passes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_CHUNK = 64 * 1024
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Opens a connection to the server. Raises ``OSError``."""


@dataclass
class Gate:
    """Decides about the bytes of one direction, for all connections of a proxy."""

    delay: float = 0.0
    """Seconds that each piece waits."""
    held_bytes: int = 0
    """Bytes that were held since :meth:`close`."""
    delayed_bytes: int = 0

    def __post_init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Hold all bytes from now on."""
        self.held_bytes = 0
        self._open.clear()

    def open(self) -> None:
        """Let the held bytes and all others pass, as a network does that repeats lost packets."""
        self._open.set()

    async def pass_on(self, size: int) -> None:
        """Wait until a piece of so many bytes may pass."""
        if not self._open.is_set():
            self.held_bytes += size
            await self._open.wait()
        if self.delay:
            self.delayed_bytes += size
            await asyncio.sleep(self.delay)


class Proxy:
    """Copies bytes between its clients and one server.

    Attributes:
        to_server, from_server: The gates of the two directions.
    """

    def __init__(self, connect: Connect) -> None:
        self.to_server = Gate()
        self.from_server = Gate()
        self._connect = connect
        self._connections: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def listen_unix(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._accept, path, limit=_CHUNK)

    async def listen_tcp(self, host: str, port: int) -> int:
        """Return the port, which is a free one for 0."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=_CHUNK)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def reset(self) -> int:
        """Close every connection on both sides at once; return how many there were."""
        pairs = list(self._connections.items())
        for pair in pairs:
            for writer in pair:
                writer.transport.abort()
        return len(pairs)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await self._connect()
        except OSError:  # the server is gone: as without a proxy, the client finds the connection closed
            return
        self._connections[writer] = server_writer
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, server_writer, self.to_server))
                group.create_task(_copy(server_reader, writer, self.from_server))
        finally:
            del self._connections[writer]
            server_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: Gate) -> None:
    """Copy until the end of the stream, which is passed on in its turn; a reset is passed on at once."""
    try:
        while data := await reader.read(_CHUNK):
            await gate.pass_on(len(data))
            writer.write(data)
            await writer.drain()
        await gate.pass_on(0)
        writer.write_eof()
    except OSError:
        writer.transport.abort()
