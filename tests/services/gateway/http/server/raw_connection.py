"""A connection to the gateway's protocol whose bytes a test delivers itself."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from tests.services.gateway.fakes import HEADERS
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.client_flow import TurnShare
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.http.server.connections import Connections
from tokenloom.services.gateway.http.server.http_protocol import HttpContext, HttpProtocol
from tokenloom.services.gateway.http.server.http_server import KEEP_ALIVE_SECONDS

MIB = 1 << 20
READ_BYTES = 256 * 1024
"""What an event loop reads at once."""
CHUNKED = b"POST / HTTP/1.1\r\n" + HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = CHUNKED + b"2\r\n{}\r\n"


def head(fields: bytes, path: bytes = b"/") -> bytes:
    return b"POST %b HTTP/1.1\r\n%bContent-Length: 0\r\n%b\r\n" % (path, HEADERS, fields)


class Transport:
    """The gateway's side of a connection."""

    def __init__(self) -> None:
        self.sent = b""
        self.has_ended = self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> None:
        """Nothing is known."""

    def pause_reading(self) -> None:
        """The test sends anyhow."""

    def resume_reading(self) -> None:
        """The test sends anyhow."""


class CountingParser:
    """Counts what the parser gets to see."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.num_bytes = 0

    def feed_data(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class Connection:
    """A connection whose requests are answered once :attr:`answers` is set. ``reads``: their bodies are read first.
    ``turns``: None if all of them may be read in one turn of the event loop."""

    def __init__(self, *, reads: bool = True, turns: TurnShare | None = None) -> None:
        self.transport = Transport()
        self.budget = AdmissionLimit(MIB)
        self.answers = asyncio.Event()
        self.answers.set()
        self.exchanges: list[HttpExchange] = []
        self.reads = reads
        self.app: Callable[[HttpExchange], Coroutine[Any, Any, None]] = self._app
        config = uvicorn.Config(
            cast(Any, self._app), interface="asgi3", log_config=None, timeout_keep_alive=KEEP_ALIVE_SECONDS
        )
        self.drain = asyncio.Event()
        context = HttpContext(
            app=lambda exchange: self.app(exchange),
            budget=self.budget,
            connections=Connections(1, 1),
            turns=turns or TurnShare(1 << 30),
            drain=self.drain,
        )
        self.protocol = HttpProtocol(config, ServerState(), {}, context=context)
        self.protocol.connection_made(cast(Any, self.transport))
        self.parser = CountingParser(self.protocol.parser)
        self.protocol.parser = cast(Any, self.parser)

    async def _app(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)
        try:
            if self.reads:
                await exchange.read_body(MIB)
            await self.answers.wait()
            await exchange.respond(200, b"ok")
        finally:
            exchange.body.close()

    def send(self, data: bytes) -> int:
        """Deliver the data as reads of the event loop, while the connection is open. Returns how many bytes it took."""
        for start in range(0, len(data), READ_BYTES):
            if self.transport.is_closed or self.transport.has_ended:
                return start
            self.protocol.data_received(data[start : start + READ_BYTES])
        return len(data)

    @property
    def statuses(self) -> list[int]:
        return [int(answer.split(maxsplit=1)[0]) for answer in self.transport.sent.split(b"HTTP/1.1 ")[1:]]
