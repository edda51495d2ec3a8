"""Reads the requests of a connection within limits, and gives each to the application when its turn has come."""

import array
import asyncio
import fcntl
import logging
import math
import termios
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.server import ServerState

from tokenloom.request.limits import AdmissionLimit

from ..client_flow import ClientFlow, Headers, ResponseWriter, TurnShare
from ..http_exchange import HttpExchange
from ..request_body import RequestBody, parser_behind
from .connections import CONNECTION_LIMIT, NO_RESPONSE, Connections

log = logging.getLogger(__name__)

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

_TURN, _PIPELINE = "turn", "pipeline"
"""Why the protocol itself holds reading back: what was read waits for a turn of the event loop, or requests wait for
the responses to earlier ones."""
_MALFORMED = (b"400 Bad Request", b"Invalid HTTP request received.", "MALFORMED")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 62\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n"
    b"The gateway has as many connections as it may have; try again."
)


class _Refused(Exception):
    """Ends the parser's work on a slice: the connection is being closed."""


@dataclass(frozen=True, slots=True)
class HttpContext:
    """Holds what all connections of a gateway share."""

    app: Callable[[HttpExchange], Coroutine[Any, Any, None]]
    """Answers a request; it is called as a task of its own."""
    budget: AdmissionLimit
    """For the bytes of the bodies of all requests."""
    connections: Connections
    """Counts and limits them."""
    turns: TurnShare
    """Limits what all connections parse in one turn of the event loop."""
    drain: asyncio.Event
    """Set when each connection shall end with its next response."""


class HttpProtocol(asyncio.BaseProtocol):
    """Serves one connection, for uvicorn's argument ``http``.

    The parser calls the methods ``on_...``. Requests that a client sends before it has the response to an earlier one
    wait in a pipeline. Bytes count from the last byte of a body, or of a message, on: heads, chunk heads, trailers and
    empty lines. After a refusal nothing is parsed any more.
    """

    refusal = _FULL  # of a connection

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        context: HttpContext,
    ) -> None:
        """The first four are what uvicorn passes."""
        self._context = context
        self._state = server_state
        self._keep_alive_seconds = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        # Otherwise a request behind one with `Connection: close` would be an error, and end the connection before that
        # one is answered.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_leaving = False
        self._ignorable_bytes = LINGER_BYTES  # that the connection may receive after its last response
        self._held = b""  # what was read, but waits for another turn of the event loop
        # Of the message that is being received:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = self._in_head = False
        self._upgrading: list[tuple[bytes, bytes]] | None = None  # headers of a request that asks for another protocol
        self._body: RequestBody | None = None  # or that was received last
        # Bytes since the last byte of a body or message; what follows that byte in the same slice is not counted.
        self._framing_bytes = 0
        self._overhead_bytes = 0  # bytes of the message since its head, less twice those of its body
        self._framing_timer: asyncio.TimerHandle | None = None
        # Of the responses:
        self._answered: HttpExchange | None = None  # whose response the application makes now
        self._pipeline: deque[HttpExchange] = deque()  # at most MAX_PIPELINED
        self._idle_since: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._state.connections.add(cast(Any, self))
        self.flow = ClientFlow(self.transport)
        peer = transport.get_extra_info("peername")
        if not self._context.connections.admit(self, str(peer[0]) if isinstance(peer, tuple) else ""):
            self._context.connections.on_refused(503, CONNECTION_LIMIT)
            self.transport.write(self.refusal)
            self.close_idle()  # without lingering: the connection holds a descriptor that is not counted
            return
        self._start_framing_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._context.connections.remove(self)
        self._stop_framing_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for exchange in self._pipeline:  # they never reach the application
            exchange.body.close()
        self.flow.lose()
        # What refers to this object would keep it, and itself, until the garbage collector runs.
        self._pipeline.clear()
        self._answered = self._body = self._idle_timer = None
        del self.parser

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def eof_received(self) -> None:
        """Let the transport close: a client that sends nothing more has left."""

    def shutdown(self) -> None:
        """Close the connection if no request is in work; uvicorn calls it when the server ends."""
        if self._answered is None:
            self.transport.close()

    @property
    def idle_seconds(self) -> float | None:
        """For how long no request has been received or answered; infinity before the first; None while one is."""
        if self._in_head or self._framing_bytes or self._pipeline or self._is_leaving or self._held:
            return None
        if self._body is None:
            return math.inf
        if self._answered is not None or self._idle_since is None:
            return None
        return self._loop.time() - self._idle_since

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
        self._is_leaving = True
        self.transport.close()

    @property
    def default_headers(self) -> Headers:
        """Of every response: the date, which uvicorn renews."""
        return self._state.default_headers

    @property
    def is_ending(self) -> bool:
        """Whether the response that begins now is the connection's last one."""
        return self._context.drain.is_set() and not self._pipeline

    def end_response(self, *, keep_alive: bool, lingers: bool) -> None:
        """Go on after a response: with the next request, with waiting for one, or with the connection's end."""
        self._state.total_requests += 1
        self._answered = None
        if lingers:
            self._leave()
        elif not keep_alive:
            self.transport.close()
        elif self.transport.is_closing():
            return
        elif self._pipeline:
            self._start(self._pipeline.popleft())
            if not self._pipeline:
                self.flow.release(_PIPELINE)
        else:
            self._idle_since = self._loop.time()
            if self._idle_timer is None:
                self._idle_timer = self._loop.call_later(self._keep_alive_seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return
        # One timer serves many requests: what it does not find idle for long enough it looks at again.
        left = self._idle_since + self._keep_alive_seconds - self._loop.time()
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._close_if_idle)
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held += data
        elif self._context.turns.take():
            self._receive(data)
        else:
            self._idle_since = None
            self.flow.hold(_TURN, is_brief=True)
            self._held = data
            # 2,600 requests that arrive while the gateway waits for a core were parsed in turns of 48 to 126 ms of CPU,
            # in which no stream got a token. At 8 reads a turn the longest turn had 8.8 to 22.2 ms.
            self._context.turns.call(self._receive_held)

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
        self._idle_since = None
        pieces: Iterable[bytes | memoryview] = (data,)
        if len(data) > SLICE_BYTES:
            view = memoryview(data)
            # httptools joins an unfinished field anew for each read, without a limit, before any key is checked: one
            # trailer of 60 MB took 4.3 s of CPU. Slices let the limit stop it at 64 KiB.
            pieces = (view[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES))
        for piece in pieces:
            if self._is_leaving:
                break
            self._framing_bytes += len(piece)
            self._overhead_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                self._is_leaving = self._read_on(piece[upgrade.args[0] :])
            except httptools.HttpParserError:
                self._refuse(*_MALFORMED)
            else:
                if self._framing_bytes > MAX_HEAD_BYTES or len(self._headers) > MAX_FIELDS:
                    self._refuse_fields()
                elif self._overhead_bytes > MAX_CHUNK_OVERHEAD:
                    self._refuse(b"400 Bad Request", b"the chunks of the body are too small", "SMALL_CHUNKS")
        if self._framing_bytes or self._in_head:
            if self._framing_timer is None and not self._is_leaving:
                self._start_framing_timer()
        elif self._framing_timer is not None:
            self._stop_framing_timer()

    def _read_on(self, data: bytes | memoryview) -> bool:
        """Read what follows the head of a request that asks for another protocol; return whether nothing more is
        read."""
        if self._upgrading is None:  # CONNECT: what follows is not HTTP, and the connection ends with the response
            return True
        headers, self._upgrading = self._upgrading, None
        self.parser = parser_behind(self, headers)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # of the next request, which is behind the body
            return self._read_on(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(*_MALFORMED)
        return self._is_leaving

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._in_head, self._expects_continue = True, False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._framing_bytes > EXACT_BYTES or len(self._headers) > MAX_FIELDS:
            self._check_fields()
        if len(self._pipeline) >= MAX_PIPELINED:
            self._context.connections.on_refused(NO_RESPONSE, "PIPELINE_LIMIT")
            self.close_idle()
            raise _Refused
        self._in_head = False
        self._framing_bytes = self._overhead_bytes = 0
        parser, method = self.parser, self.parser.get_method().decode("ascii")
        url = httptools.parse_url(self._url)
        path = (url.path or b"/").decode("ascii")
        speaks_1_1 = parser.get_http_version() == "1.1"
        if parser.should_upgrade() and method != "CONNECT":
            self._upgrading = self._headers
        keep_alive = speaks_1_1 and parser.should_keep_alive() and method != "CONNECT"
        self._body = RequestBody(self.flow, self._context.budget, expects_continue=self._expects_continue)
        exchange = HttpExchange(
            (method, unquote(path) if "%" in path else path, url.query or b""),
            self._headers,
            self._body,
            ResponseWriter(self.flow, self, is_head=method == "HEAD", speaks_1_1=speaks_1_1, keep_alive=keep_alive),
        )
        if speaks_1_1 and b"host" not in exchange.headers:
            self._refuse(b"400 Bad Request", b"the header Host is missing", "MALFORMED")
            raise _Refused
        # A proxy in front might take the other one (RFC 9112 section 3.2).
        if len(exchange.headers) < len(self._headers) and [name for name, _ in self._headers].count(b"host") > 1:
            self._refuse(b"400 Bad Request", b"there is more than one header Host", "MALFORMED")
            raise _Refused
        self._headers = []  # trailers are counted, but never become headers of the request
        if self._answered is None:
            self._start(exchange)
        else:
            self._pipeline.append(exchange)
            self.flow.hold(_PIPELINE)  # until the responses before it have ended

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._overhead_bytes -= 2 * len(body)
        assert self._body is not None
        self._body.arrive(body)

    def on_message_complete(self) -> None:
        if self._upgrading is not None:
            return  # of the parser that ends behind the head
        if self._framing_bytes > EXACT_BYTES or len(self._headers) > MAX_FIELDS:
            self._check_fields()
        self._framing_bytes = self._overhead_bytes = 0
        assert self._body is not None
        self._body.end()

    def _start(self, exchange: HttpExchange) -> None:
        """Let the application answer a request. It starts in the loop's next turn."""
        self._answered = exchange
        task = self._loop.create_task(self._context.app(exchange))
        self._state.tasks.add(task)
        task.add_done_callback(partial(self._on_answered, exchange))

    def _on_answered(self, exchange: HttpExchange, task: asyncio.Task[None]) -> None:
        """Close the connection of a request whose task has ended without its whole response."""
        self._state.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s %s: the response could not be completed", exchange.method, exchange.path, exc_info=error)
        if exchange is not self._answered:
            return
        # A client that does not read would keep a connection that is only closed.
        if self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()

    def _check_fields(self) -> None:
        """Refuse a complete head, or complete trailers, above the limits."""
        size = len(self._url) if self._in_head else 0
        size += sum(len(name) + len(value) + len(b": \r\n") for name, value in self._headers)
        if size > MAX_HEAD_BYTES or len(self._headers) > MAX_FIELDS:
            self._refuse_fields()
            raise _Refused

    def _refuse_fields(self) -> None:
        limits = b"headers and trailers may have %d bytes and %d fields each" % (MAX_HEAD_BYTES, MAX_FIELDS)
        self._refuse(b"431 Request Header Fields Too Large", limits, "FIELDS_TOO_LARGE")

    def _start_framing_timer(self) -> None:
        self._framing_timer = self._loop.call_later(HEAD_SECONDS, self._on_framing_timeout)

    def _stop_framing_timer(self) -> None:
        if self._framing_timer is not None:
            self._framing_timer.cancel()
            self._framing_timer = None

    def _on_framing_timeout(self) -> None:
        self._framing_timer = None
        if self._is_leaving:
            return
        answered = self._answered
        # What came waits for a turn of the event loop, or is pipelined behind a live request.
        if self._held or self._pipeline or (answered is not None and not answered.body.is_incomplete):
            self._start_framing_timer()
        elif self._in_head or answered is not None:
            text = b"the head or the trailers of the request did not arrive in time"
            self._refuse(b"408 Request Timeout", text, "HEAD_TIMEOUT")
        else:
            self.close_idle()

    def _refuse(self, status: bytes, text: bytes, reason: str) -> None:
        """Close the connection, with a response if none has begun. ``reason``: for the metric."""
        if self._is_leaving:
            return
        answered, on_refused = self._answered, self._context.connections.on_refused
        if self._pipeline or (answered is not None and (answered.started or not answered.body.is_incomplete)):
            on_refused(NO_RESPONSE, reason)
            self.close_idle()
            return
        if answered is not None:  # the application must not respond any more; it counts the refusal, under its route
            answered.body.refused_by_protocol = int(status[:3]), reason
            answered.body.close()
            self._answered = None
            self.flow.lose()
        else:
            on_refused(int(status[:3]), reason)
        self._ignorable_bytes = LINGER_BYTES_REFUSED
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(text), text)
        )
        self._leave()

    def _leave(self) -> None:
        """Close the connection as soon as the client does, or after a short time. What it sends is not parsed."""
        self._is_leaving = True
        self._stop_framing_timer()
        # Half-closed only: data that arrives at a closed socket makes the kernel reset the connection, and the client's
        # machine may then discard the response before the client has read it.
        if self.transport.can_write_eof():  # not over TLS, where the client closes after the response
            self.transport.write_eof()
        self.flow.release_all()
        self._loop.call_later(LINGER_SECONDS, self.transport.close)
