"""Streams requests to an HTTP API at little cost: one protocol object per connection and no HTTP library above
the parser, so that a mesh can be loaded from the cores that it runs on."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httptools
import msgspec

from .datasets import Prompt
from .events import AnswerReader, Outcome

_encode = msgspec.json.Encoder().encode
_ERROR_BYTES = 500
"""How many bytes of a refusal are kept."""
_REFUSALS = (429, 503)


class ConnectionLost(Exception):
    """Raised when the server closes the connection before its answer is complete."""


@dataclass(frozen=True)
class Endpoint:
    """Says where requests go."""

    host: str
    port: int
    tls: bool
    path: str
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent in addition."""

    @classmethod
    def of(cls, base_url: str, path: str, api_key: str = "") -> "Endpoint":
        """Parse a base URL of the form ``http://host:port``, with or without ``/v1``. Raises ``ValueError``
        otherwise."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base URL {base_url!r} must be http://host:port or https://host:port")
        prefix = url.path.rstrip("/").removesuffix("/v1")
        port = url.port or (443 if url.scheme == "https" else 80)
        return cls(url.hostname, port, url.scheme == "https", prefix + path, api_key)

    def head(self, length: int) -> bytes:
        """Return the request line and headers of a POST."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        more = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        more += "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nAccept: text/event-stream\r\n{more}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


class Body(Protocol):
    """Makes the JSON body of a request."""

    def __call__(self, prompt: Prompt) -> Mapping[str, Any]:
        """Return the body for one prompt."""


class Sender:
    """Posts bodies over reused connections to one server. Use it as ``async with``."""

    def __init__(self, *, tls: bool = False) -> None:
        self._idle: list[_Connection] = []  # at most as many as requests were in flight at once
        self._tls = ssl.create_default_context() if tls else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def send(self, endpoint: Endpoint, body: Mapping[str, Any], outcome: Outcome, run_started: float) -> None:
        """Post a body and read its answer to the end into ``outcome``, which holds a failure; none is raised."""
        encoded = _encode(body)
        request = endpoint.head(len(encoded)) + encoded
        sent = time.perf_counter()
        outcome.start = sent - run_started
        reader = AnswerReader(outcome, sent)
        try:
            await self._exchange(endpoint, request, reader)
        except (OSError, ConnectionLost, httptools.HttpParserError, msgspec.MsgspecError) as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        reader.end()

    async def _exchange(self, endpoint: Endpoint, request: bytes, reader: AnswerReader) -> None:
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange_on(connection, request, reader)
            except ConnectionLost:
                if connection.answered:
                    raise
                # The server closed the idle connection at that moment, so the request was not seen.
        await self._exchange_on(await self._connect(endpoint), request, reader)

    async def _exchange_on(self, connection: "_Connection", request: bytes, reader: AnswerReader) -> None:
        try:
            await connection.exchange(request, reader)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self, endpoint: Endpoint) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, endpoint.host, endpoint.port, ssl=self._tls)
        return connection


class Client(Sender):
    """Streams prompts to one endpoint."""

    def __init__(self, endpoint: Endpoint, body: Body) -> None:
        super().__init__(tls=endpoint.tls)
        self._endpoint = endpoint
        self._body = body

    async def stream(self, prompt: Prompt, run_started: float) -> Outcome:
        """Send one request and read its answer to the end. The outcome holds a failure; none is raised."""
        outcome = Outcome(start=0.0, kind=prompt.kind, input_tokens=len(prompt.token_ids))
        await self.send(self._endpoint, self._body(prompt), outcome, run_started)
        return outcome


class _Connection(asyncio.Protocol):
    """Handles one request at a time; httptools calls the ``on_…`` methods from within :meth:`data_received`."""

    def __init__(self) -> None:
        self.answered = False
        """Whether any part of the current answer has arrived."""
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._reader: AnswerReader | None = None
        self._done: asyncio.Future[None] | None = None
        self._status = 0
        self._refusal = b""
        self._now = 0.0

    async def exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Send the request and return when the answer is complete. Raises ``ConnectionLost``."""
        assert self._transport is not None
        self.answered = self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._reader, self._refusal = reader, b""
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise ConnectionLost("the server closed the connection")
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        self._now = time.perf_counter()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except Exception as error:  # the parser wraps what a callback raises
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(ConnectionLost("the server closed the connection"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._reader is not None
        if self._status == 200:
            self._reader.feed(body, self._now)
        else:
            self._refusal = (self._refusal + body)[:_ERROR_BYTES]

    def on_message_complete(self) -> None:
        assert self._reader is not None
        if self._status != 200:
            self._reader.outcome.refused = self._status in _REFUSALS
            self._reader.outcome.error = f"HTTP {self._status}: {self._refusal.decode(errors='replace')}"
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
