"""Extends uvicorn's protocol: limits request heads, and offers the application a way past ASGI to the connection.

Both rely on private parts of uvicorn, as :class:`.exchange.DirectWriter` does. What they need is checked at start-up.
"""

import asyncio
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .exchange import DIRECT_WRITER, DirectWriter, Watchers

MAX_HEAD_BYTES = 64 * 1024
"""Limit on the request line and headers; the parser itself has none."""
HEAD_SECONDS = 60.0
"""Limit on the time from the beginning of a connection, or of a head, to the end of that head."""

EXPECTED_NAMES: dict[Callable[..., Any], str] = {
    HttpToolsProtocol.__init__: "app cycle flow loop scope transport",
    HttpToolsProtocol.on_message_begin: "scope",
    HttpToolsProtocol.on_headers_complete: "RequestResponseCycle cycle",
    RequestResponseCycle.__init__: "body chunked_encoding disconnected flow more_body response_complete transport",
    FlowControl.__init__: "write_paused",
    FlowControl.resume_reading: "read_paused",
}
"""Names that functions of uvicorn use, and that the gateway relies on."""


def missing_names() -> list[str]:
    """Return what the gateway relies on and the installed uvicorn lacks; empty when everything is as expected."""
    return [
        f"{function.__qualname__}: {name}"
        for function, names in EXPECTED_NAMES.items()
        for name in names.split()
        if name not in cast(FunctionType, function).__code__.co_names
    ]


class GatewayProtocol(HttpToolsProtocol):
    """Limits the size and duration of request heads, and offers the application a :class:`DirectWriter`."""

    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watchers: Watchers = set()
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)
        for on_lost in tuple(self._watchers):
            on_lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # the application starts in the loop's next turn
            scope = cast(dict[str, Any], self.scope)
            scope["extensions"] = {DIRECT_WRITER: DirectWriter(self.cycle, self._watchers)}

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
            elif self._head_timer is None:
                self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the head is pipelined behind a live request
            self._start_head_timer()
        elif self._in_head:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()
