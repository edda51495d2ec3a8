"""Everything that uses private parts of uvicorn: limits on request heads, and writing to a connection past ASGI.

A streamed token written through ASGI costs a wake-up of the request's task, a coroutine and a message; written here it
costs one call (docs/decisions.md has the figures).
"""

import asyncio
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Limit on the request line and headers; the parser itself has none."""
HEAD_SECONDS = 60.0
"""Limit on the time from the beginning of a connection, or of a head, to the end of that head."""
EXTENSION = "tokenloom.direct_writer"
"""Name of the ASGI extension under which a scope offers its :class:`DirectWriter`."""

Watchers: TypeAlias = set[Callable[[], None]]
"""Called when a connection is lost; one for each of its requests in work, so one unless the client pipelines."""

EXPECTED_NAMES: dict[Callable[..., Any], str] = {
    HttpToolsProtocol.__init__: "app cycle flow loop scope transport",
    HttpToolsProtocol.on_message_begin: "scope",
    HttpToolsProtocol.on_headers_complete: "RequestResponseCycle cycle",
    RequestResponseCycle.__init__: "body chunked_encoding disconnected flow more_body response_complete transport",
    FlowControl.__init__: "write_paused",
    FlowControl.resume_reading: "read_paused",
}
"""Names that functions of uvicorn use and that this module relies on."""


def missing_names() -> list[str]:
    """Return what this module relies on and the installed uvicorn lacks; empty when everything is as expected."""
    return [
        f"{function.__qualname__}: {name}"
        for function, names in EXPECTED_NAMES.items()
        for name in names.split()
        if name not in cast(FunctionType, function).__code__.co_names
    ]


class DirectWriter:
    """Does what uvicorn's ``receive`` and ``send`` would do, for one request, without a task or a message.

    Attributes:
        cycle: uvicorn's state of the request; its ``disconnected`` says whether the client has left.
    """

    def __init__(self, cycle: RequestResponseCycle, watchers: Watchers) -> None:
        self.cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._watchers = watchers

    def take_body(self) -> bytes | None:
        """Return the request's body, once; None while it is incomplete or when the client has left."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` when the client leaves, until :meth:`unwatch`."""
        self._flow.resume_reading()  # a paused connection does not notice that the client has left
        self._watchers.add(on_lost)

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        self._watchers.discard(on_lost)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` may be called: a chunked response has begun and its client keeps up."""
        cycle = self.cycle
        return not self._flow.write_paused and not cycle.disconnected and bool(cycle.chunked_encoding)

    def write(self, body: bytes) -> None:
        """Send a piece of the response's body. ``body`` must not be empty: an empty chunk would end the response."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


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
            scope["extensions"] = {EXTENSION: DirectWriter(self.cycle, self._watchers)}

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
