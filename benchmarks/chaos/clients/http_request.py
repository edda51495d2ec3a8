"""Sends one HTTP request on a connection of its own, so that a refused connection is seen as one."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httptools

_CHUNK = 64 * 1024
_NO_HEADERS: Mapping[str, str] = {}


class ConnectionRefused(Exception):
    """Raised when no process accepts connections at the address."""


class ConnectionLost(Exception):
    """Raised when the connection ends before the response is complete."""


class Response:
    """Holds a response whose head has arrived. Iterate over it for the pieces of the body."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reader = reader
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = self._is_complete = False

    async def read_head(self) -> None:
        """Read until the headers are complete. Raises ``ConnectionLost``."""
        while not self._has_head:
            await self._feed()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive. Raises ``ConnectionLost``."""
        while True:
            while self._pieces:
                yield self._pieces.pop(0)
            if self._is_complete:
                return
            await self._feed()

    async def body(self) -> bytes:
        """Return the rest of the body. Raises ``ConnectionLost``."""
        return b"".join([piece async for piece in self])

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(_CHUNK)
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost("the server closed the connection")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionLost(f"the response is not HTTP: {error}") from None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


@asynccontextmanager
async def send(
    method: str, address: str, path: str, body: bytes = b"", headers: Mapping[str, str] = _NO_HEADERS
) -> AsyncIterator[Response]:
    """Send a request to ``host:port`` and yield the response once its head has arrived; then close the connection.

    Raises ``ConnectionRefused`` or ``ConnectionLost``.
    """
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:
        raise ConnectionRefused(str(error)) from None
    try:
        fields = {"Host": address, "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode("latin-1") + body)
        response = Response(reader)
        await response.read_head()
        yield response
    finally:
        writer.transport.abort()
