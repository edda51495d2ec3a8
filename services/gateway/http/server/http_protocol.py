"""Extends uvicorn's protocol: limits what surrounds the bodies of requests, and offers the application a way past ASGI.

Both rely on private parts of uvicorn, as :class:`.exchange.DirectWriter` does. What they need is checked at start-up.
"""

import array
import asyncio
import fcntl
import math
import termios
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..byte_budget import ByteBudget
from ..client_flow import ClientFlow
from ..http_exchange import DIRECT_WRITER, REQUEST_BODY, DirectWriter, Watchers
from ..request_body import RequestBody
from ..turn_share import TurnShare
from .connections import CONNECTION_LIMIT, NO_RESPONSE, Connections

MAX_HEAD_BYTES = 64 * 1024
"""Limit on the request line and headers of a request, and on its trailers; the parser itself has none."""
MAX_FIELDS = 100
"""Limit on the number of a request's headers, and of its trailers."""
MAX_CHUNK_OVERHEAD = 64 * 1024
"""Limit on the bytes of a chunked message beyond twice its body: each chunk of a byte costs as much as a large one."""
MAX_PIPELINED = 16
"""Limit on the requests of a connection that wait for the response to an earlier one."""
HEAD_SECONDS = 10.0
"""Limit on the time from the beginning of a connection, a head or trailers to the end of that head or those trailers.
"""
LINGER_SECONDS = 1.0
"""How long a connection still receives after its last response, so that its client can read that response."""
LINGER_BYTES = 32 * 1024 * 1024
"""How much it receives in this time if the rest of a body is still on its way."""
LINGER_BYTES_REFUSED = 1024 * 1024
"""How much it receives in this time if head, trailers or framing were refused."""
SLICE_BYTES = 16 * 1024
"""The parser gets so many bytes at once: it keeps unfinished fields, and limits are checked between two slices."""
EXACT_BYTES = MAX_HEAD_BYTES - SLICE_BYTES
"""Above so many bytes, those of a complete head are counted one by one, because slices count as a whole."""

EXPECTED_NAMES: dict[Callable[..., Any], str] = {
    HttpToolsProtocol.__init__: "app client cycle flow headers loop parser pipeline scope timeout_keep_alive "
    "timeout_keep_alive_task transport",
    HttpToolsProtocol.on_message_begin: "headers scope url",
    HttpToolsProtocol.on_header: "append headers",
    HttpToolsProtocol.on_headers_complete: "RequestResponseCycle cycle on_response_complete pipeline scope url",
    HttpToolsProtocol.on_message_complete: "cycle message_event more_body",
    HttpToolsProtocol.data_received: "_unset_keepalive_if_required feed_data parser",
    RequestResponseCycle.__init__: "body chunked_encoding default_headers disconnected flow keep_alive "
    "message_event more_body on_response response_complete response_started transport waiting_for_100_continue",
    HttpToolsProtocol.connection_made: "FlowControl flow",
    HttpToolsProtocol.on_response_complete: "flow pipeline resume_reading",
    FlowControl.__init__: "_transport read_paused write_paused",
}
"""Names that functions of uvicorn use, and that the gateway relies on."""

_TURN, _PIPELINE = "turn", "pipeline"
"""Why the protocol itself holds reading back: what was read waits for a turn of the event loop, or requests wait for
the responses to earlier ones."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 62\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n"
    b"The gateway has as many connections as it may have; try again."
)


def missing_names() -> list[str]:
    """Return what the gateway relies on and the installed uvicorn lacks; empty when everything is as expected."""
    return [
        f"{function.__qualname__}: {name}"
        for function, names in EXPECTED_NAMES.items()
        for name in names.split()
        if name not in cast(FunctionType, function).__code__.co_names
    ]


class _Refused(Exception):
    """Ends the parser's work on a slice: the connection is being closed."""


class GatewayProtocol(HttpToolsProtocol):
    """Reads requests within limits, and offers the application a :class:`DirectWriter` and a :class:`RequestBody`.

    Bytes count from the last byte of a body, or of a message, on: heads, chunk heads, trailers and empty lines. After a
    refusal nothing is parsed any more.
    """

    _is_leaving = False
    _ignorable_bytes = LINGER_BYTES
    """How much the connection may receive after its last response."""
    _in_head = False
    _framing_bytes = 0
    """Bytes since the last byte of a body or message; what follows that byte in the same slice is not counted."""
    _overhead_bytes = 0
    """Bytes of the message since its head, less twice those of its body."""
    _framing_timer: asyncio.TimerHandle | None = None
    _body: RequestBody | None = None
    """Of the request that is being received, or was received last."""
    _held = b""
    """What was read, but waits for another turn of the event loop."""
    _answered: RequestResponseCycle | None = None
    """Of the request that the application answers now, or answered last; with pipelining not the one received last."""

    def __init__(
        self,
        *args: Any,
        budget: ByteBudget,
        connections: Connections,
        turns: TurnShare,
        drain: asyncio.Event,
        **named: Any,
    ) -> None:
        """``budget``: for the bodies of all requests of the gateway. ``connections``: all of the gateway's.
        ``turns``: limits what all connections parse in one turn of the event loop. ``drain``: set when each connection
        shall end with its next response."""
        super().__init__(*args, **named)
        self._budget = budget
        self._admitted = connections
        self._turns = turns
        self._drain = drain
        self._watchers: Watchers = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: ClientFlow = ClientFlow(transport)
        if not self._admitted.admit(self, self.client[0] if self.client else ""):
            self._admitted.on_refused(503, CONNECTION_LIMIT)
            transport.write(_FULL)
            self._abandon()  # without lingering: the connection holds a descriptor that is not counted
            return
        self._start_framing_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admitted.remove(self)
        self._stop_framing_timer()
        self.flow.close()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn notifies the request received last only, and logs an error when another one is left unanswered.
            self._answered.disconnected = True
            self._answered.message_event.set()
        for cycle, _ in self.pipeline:  # their requests never reach the application
            cast(dict[str, Any], cycle.scope)["extensions"][REQUEST_BODY].close()
        for on_lost in tuple(self._watchers):
            on_lost()

    @property
    def idle_seconds(self) -> float | None:
        """For how long no request has been received or answered; infinity before the first; None while one is."""
        if self._in_head or self._framing_bytes or self.pipeline or self._is_leaving or self._held:
            return None
        if self._body is None:
            return math.inf
        if not self.cycle.response_complete or self.timeout_keep_alive_task is None:
            return None
        return self.loop.time() + self.timeout_keep_alive - self.timeout_keep_alive_task.when()

    @property
    def has_unread(self) -> bool:
        """Whether the kernel holds bytes of the client; the event loop may be late to read them."""
        # Bytes in the kernel count as a request: on a busy machine this process may be late to read them, and closing
        # now would lose a request that its client has sent in time.
        unread = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, unread)
        return unread[0] > 0

    def close_idle(self) -> None:
        """Close the connection without a response."""
        self._abandon()

    def _is_last(self) -> bool:
        """Return whether the response that begins now is the connection's last one."""
        return self._drain.is_set() and not self.pipeline

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held += data
        elif self._turns.take():
            self._receive(data)
        else:
            self._unset_keepalive_if_required()
            self.flow.hold(_TURN, is_brief=True)
            self._held = data
            # 2,600 requests that arrive while the gateway waits for a core were parsed in turns of 48 to 126 ms of CPU,
            # in which no stream got a token. At 8 reads a turn the longest turn had 8.8 to 22.2 ms.
            self._turns.call(self._receive_held)

    def _receive_held(self) -> None:
        data, self._held = self._held, b""
        if not self.transport.is_closing():
            self.flow.release(_TURN)
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        if self._is_leaving:
            self._ignorable_bytes -= len(data)
            if self._ignorable_bytes < 0:
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        if len(data) <= SLICE_BYTES:
            self._parse(data)
        else:
            view = memoryview(data)
            # httptools joins an unfinished field anew for each read, without a limit, before any key is checked: one
            # trailer of 60 MB took 4.3 s of CPU. Slices let the limit stop it at 64 KiB.
            for start in range(0, len(data), SLICE_BYTES):
                self._parse(view[start : start + SLICE_BYTES])
        if self._framing_bytes or self._in_head:
            if self._framing_timer is None and not self._is_leaving:
                self._start_framing_timer()
        elif self._framing_timer is not None:
            self._stop_framing_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        if self._framing_bytes > EXACT_BYTES or len(self.headers) > MAX_FIELDS:
            self._check_fields()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._admitted.on_refused(NO_RESPONSE, "PIPELINE_LIMIT")
            self._abandon()
            raise _Refused
        self._in_head = False
        self._framing_bytes = self._overhead_bytes = 0
        super().on_headers_complete()
        scope, cycle = cast(dict[str, Any], self.scope), self.cycle
        if self.pipeline:
            self.flow.hold(_PIPELINE)  # until the responses before it have ended
        else:
            self._answered = cycle
        self.headers = []  # trailers are counted, but never become headers of the request
        self._body = RequestBody(cycle, self._budget)
        # The application starts in the loop's next turn.
        scope["extensions"] = {
            DIRECT_WRITER: DirectWriter(cycle, self._watchers, self._leave, self._is_last),
            REQUEST_BODY: self._body,
        }

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._overhead_bytes -= 2 * len(body)
        assert self._body is not None
        self._body.arrive(body)

    def on_message_complete(self) -> None:
        if self._framing_bytes > EXACT_BYTES or len(self.headers) > MAX_FIELDS:
            self._check_fields()
        self._framing_bytes = self._overhead_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if not self.pipeline:
            self.flow.release(_PIPELINE)

    def _parse(self, data: "bytes | memoryview") -> None:
        if self._is_leaving:
            return
        self._framing_bytes += len(data)
        self._overhead_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # What follows belongs to a protocol that the gateway does not speak. It answers this request, and closes.
            self._is_leaving = True
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"Invalid HTTP request received.", "MALFORMED")
        else:
            if self._framing_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_FIELDS:
                self._refuse_fields()
            elif self._overhead_bytes > MAX_CHUNK_OVERHEAD:
                self._refuse(b"400 Bad Request", b"the chunks of the body are too small", "SMALL_CHUNKS")

    def _check_fields(self) -> None:
        """Refuse a complete head, or complete trailers, above the limits."""
        size = len(self.url) if self._in_head else 0
        size += sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_FIELDS:
            self._refuse_fields()
            raise _Refused

    def _refuse_fields(self) -> None:
        limits = b"headers and trailers may have %d bytes and %d fields each" % (MAX_HEAD_BYTES, MAX_FIELDS)
        self._refuse(b"431 Request Header Fields Too Large", limits, "FIELDS_TOO_LARGE")

    def _start_framing_timer(self) -> None:
        self._framing_timer = self.loop.call_later(HEAD_SECONDS, self._on_framing_timeout)

    def _stop_framing_timer(self) -> None:
        if self._framing_timer is not None:
            self._framing_timer.cancel()
            self._framing_timer = None

    def _on_framing_timeout(self) -> None:
        self._framing_timer = None
        if self._is_leaving:
            return
        cycle = self.cycle
        is_live = cycle is not None and not cycle.response_complete
        # What came waits for a turn of the event loop, or is pipelined behind a live request.
        if self._held or self.pipeline or (is_live and not cycle.more_body):
            self._start_framing_timer()
        elif self._in_head or is_live:
            text = b"the head or the trailers of the request did not arrive in time"
            self._refuse(b"408 Request Timeout", text, "HEAD_TIMEOUT")
        else:
            self._abandon()

    def _refuse(self, status: bytes, text: bytes, reason: str) -> None:
        """Close the connection, with a response if none has begun. ``reason``: for the metric."""
        if self._is_leaving:
            return
        cycle = self.cycle
        is_live = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_live and (cycle.response_started or not cycle.more_body)):
            self._admitted.on_refused(NO_RESPONSE, reason)
            self._abandon()
            return
        if is_live:  # the application must not respond any more; it counts the refusal, under its route
            assert self._body is not None
            cycle.disconnected = True
            cycle.message_event.set()
            self._body.refused_by_protocol = int(status[:3]), reason
            self._body.close()
        else:
            self._admitted.on_refused(int(status[:3]), reason)
        self._ignorable_bytes = LINGER_BYTES_REFUSED
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(text), text)
        )
        self._leave()

    def _abandon(self) -> None:
        """Close the connection without a response."""
        self._is_leaving = True
        self.transport.close()

    def _leave(self) -> None:
        """Close the connection as soon as the client does, or after a short time. What it sends is not parsed."""
        self._is_leaving = True
        self._stop_framing_timer()
        # Half-closed only: data that arrives at a closed socket makes the kernel reset the connection, and the client's
        # machine may then discard the response before the client has read it.
        if self.transport.can_write_eof():  # not over TLS, where the client closes after the response
            self.transport.write_eof()
        self.flow.release_all()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
