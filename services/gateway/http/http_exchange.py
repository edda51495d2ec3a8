"""One HTTP request and its response: hands out the body, writes the response, notices a disconnect."""

import asyncio
import math
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.fair_stage import FairStage
from tokenloom.services.runtime.telemetry import tracing

from ..encoding.sse import encode_json
from ..request_log.finished_request import RequestRecord
from ..tenants.tenant import Tenant
from .client_flow import ClientDisconnected, Headers
from .request_body import OFF_LOOP_BYTES, RequestBody, too_large
from .response_counts import OTHER

if TYPE_CHECKING:
    from .body_files import BodyFiles
    from .held_response import HeldResponse
    from .held_table import PastResponse


IGNORED_HEADER = b"x-tokenloom-ignored"
"""Names the fields of the body that had no effect."""
MAX_IGNORED = 32
"""Limits the names in that header."""
MAX_NAME = 64
"""Limits the length of each."""


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """Describes errors as one API's clients expect them."""

    describe: Callable[[errors.TokenloomError], object]
    """Returns the JSON body of a response."""
    event_name: bytes = b""
    """Name of the event that reports an error in a stream that has begun; empty: it has none."""
    describe_event: Callable[[errors.TokenloomError], object] | None = None
    """Returns the JSON of that event, where it is not that of a response."""
    id_header: bytes = b""
    """Name of the header in which the API's clients look for the request's id, besides ``x-request-id``."""
    is_lines: bool = False
    """Whether a stream consists of lines of JSON instead of events."""

    def body(self, error: errors.TokenloomError) -> bytes:
        return encode_json(self.describe(error))

    def event(self, error: errors.TokenloomError) -> bytes:
        """Return the last event of a stream."""
        if self.is_lines:
            return self.body(error) + b"\n"
        name = b"event: %b\n" % self.event_name if self.event_name else b""
        describe = self.describe_event or self.describe
        return b"%bdata: %b\n\n" % (name, encode_json(describe(error)))


def _openai_event(error: errors.TokenloomError) -> dict[str, dict[str, object]]:
    """Return the event of OpenAI's APIs, with the status that the response would have had."""
    return {"error": {**wire_errors.openai_body(error)["error"], "status": error.http_status}}


def _response_event(error: errors.TokenloomError) -> dict[str, object]:
    """Return the event of the Responses API. OpenAI's client raises for the member ``error``, and would otherwise yield
    the event as one of many."""
    body = _openai_event(error)
    return {"type": "error", **{name: body["error"].get(name) for name in ("code", "message", "param")}, **body}


OPENAI = ErrorForm(wire_errors.openai_body, describe_event=_openai_event)
RESPONSES = ErrorForm(wire_errors.openai_body, b"error", _response_event)


JSON = b"application/json"
FAREWELL_SECONDS = 1.0
"""Limit on the time that a client which does not read may delay the error event of its own stream."""
# Ollama's documentation sends JSON with curl's own type, that of a form, and its clients none at all. The Origin, which
# browsers state with every POST, keeps the pages of other sites away there.
_ANY_TYPE = "/api/"
PIECE_BYTES = 256 << 10
"""Bytes of an answer that are shaped or written in one turn of the event loop."""
_HELD_BYTES = 960 << 10
"""Of an answer that is written at once where another gateway could go on with it, in 1 MiB with its head."""
_TURN_SECONDS = 0.001
"""Blocks of an answer are made for so long in one turn of the event loop."""
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class UnsupportedEncoding(errors.InvalidArgument):
    """Raised for a compressed body: its size after decompression is not known in advance."""

    http_status = 415
    reason = "UNSUPPORTED_ENCODING"


class UnsupportedMediaType(errors.InvalidArgument):
    """Raised for a body that is not declared to be JSON: pages of other sites may send such without asking first."""

    http_status = 415
    reason = "UNSUPPORTED_MEDIA_TYPE"


class MethodNotAllowed(errors.InvalidArgument):
    """Raised for a path that exists, but not with the request's method."""

    http_status = 405
    reason = "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"this path accepts {self.allowed}, not {method[:32]}")


class ResponseSink(Protocol):
    """Describes what writes a response; see :class:`.client_flow.ResponseWriter`."""

    left: int | None

    @property
    def watch(self) -> Callable[[Callable[[], None]], Callable[[], object]]: ...

    @property
    def can_begin(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def is_paused(self) -> bool: ...

    async def drain(self) -> None: ...

    def begin(self, status: int, headers: Headers, body: bytes = b"", *, is_cut: bool = False) -> None: ...

    def write(self, body: bytes) -> None: ...

    def finish(self, body: bytes = b"") -> None: ...

    def abort(self) -> None: ...


def shaping_stage() -> FairStage:
    """Return the stage at which the large answers of a gateway are made: a slice of one answer at a time, whose tenants
    take turns. None is refused; their number is bounded by that of the connections."""
    # With a slice for each answer in each turn of the event loop, every hop of another request waited for all of them.
    return FairStage(1, "answers", max_waiting=sys.maxsize, max_cost=sys.maxsize)


class HttpExchange:
    """Holds a request and the state of its response, so that an error is reported in a form that is still possible.

    Attributes:
        method, path, query: Of the request.
        headers: Of the request, with lower-case names.
        body: What the client sends after the head.
        response: Writes to the connection.
        internal_tenant: The tenant for which the gateway itself makes the request; None: a client makes it.
        is_line: Whether it is a line of a batch.
        is_of_peer: Whether it came over the internal listener, from a peer with a certificate of the mesh.
        was_read: Whether another gateway, which was lost, had read it: the client has waited, so that it is not refused
            because the mesh is busy.
        request_id: The client's ``x-request-id``, or a new one; returned to the client, never used inside the mesh.
        extra_headers: Added to the response, whatever it is.
        error_form: How errors are reported.
        route: The path, with ``*`` for the id of an object; ``other`` until it is known to be served.
        status: Of the response; 0 before it begins.
        started: Whether the response has begun.
        began: When the head had arrived, in monotonic seconds.
        record: What the request has generated.
        key: The start of the digest of the client's key; empty before it was checked, and where no key is needed.
        tenant: The tenant of the client's key; not set before the key was checked, nor for paths that need none.
        shaping: Where its answer is made if that is large; see :func:`shaping_stage`. Set by the application.
        past: What another gateway has done of the response; None: it begins here.
        hold: Stores the response from now on for a gateway that would continue it, given the request's body; None: no
            gateway would.
        held: What stores it; None: nothing does.
        let_go: Lets the request end with this gateway, if that is killed: answered once more by another one, it would
            have effects twice. None: it does so in any case.
        stays: Whether its connection ends with this gateway too: the client goes on with what this one alone has. On a
            connection of another gateway ``let_go`` then raises :class:`.client_flow.ClientDisconnected`.
    """

    past: "PastResponse | None" = None
    hold: "Callable[[bytes | bytearray], HeldResponse | None] | None" = None
    held: "HeldResponse | None" = None
    let_go: Callable[[], None] | None = None
    stays = False
    tenant: Tenant
    shaping: FairStage
    is_line = False
    is_of_peer = False
    was_read = False

    def __init__(
        self,
        target: tuple[str, str, bytes],
        headers: Sequence[tuple[bytes, bytes]],
        body: RequestBody,
        response: ResponseSink,
        *,
        internal_tenant: Tenant | None = None,
    ) -> None:
        """``target``: method, path and query. ``internal_tenant``: stands here and not in a header, so that no client
        can name one."""
        self.method, self.path, self.query = target
        self.headers = dict(headers)
        self.body = body
        self.response = response
        self.internal_tenant = internal_tenant
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.error_form = OPENAI
        self.route = OTHER
        self.status = 0
        self.began = time.monotonic()
        self.record = RequestRecord()
        self.key = ""
        self.started = False

    async def read_body(self, limit: int, files: "BodyFiles | None" = None) -> RequestBody:
        """Return the whole JSON body, at most ``limit`` bytes. Use it as ``with``, which ends when it was decoded.

        ``files``: takes the files out of a large body, which do not count for ``limit``; None: it may hold none.
        Raises :class:`errors.PayloadTooLarge` and :class:`errors.ResourceExhausted` (before reading, when
        Content-Length is given), :class:`UnsupportedMediaType`, :class:`UnsupportedEncoding`,
        :class:`.request_body.BodyTimeout` and :class:`.client_flow.ClientDisconnected`.
        """
        if self.body.is_kept:
            return self.body
        headers = self.headers
        kind = headers.get(b"content-type", b"")
        # A page of another site may send text/plain without asking first, but no JSON; so this check also keeps such
        # pages away from a gateway without keys.
        if kind != JSON and kind.partition(b";")[0].strip().lower() != JSON and not self.path.startswith(_ANY_TYPE):
            raise UnsupportedMediaType("the body must be JSON; set the header Content-Type: application/json")
        if b"content-encoding" in headers and headers[b"content-encoding"].strip().lower() != b"identity":
            raise UnsupportedEncoding("Content-Encoding is not supported; send the body uncompressed")
        digits = headers.get(b"content-length", b"")
        length = int(digits) if digits.isdigit() else None  # the parser has refused a length of more than 64 bits
        if files is not None and length is not None and length > OFF_LOOP_BYTES:
            await files.collect(self.body, limit, length)
            return self.body
        if length is not None and length > limit:
            raise too_large(limit)
        await self.body.read(limit, length)
        return self.body

    @contextmanager
    def until_disconnected(self) -> Iterator[None]:
        """Cancel the ``with`` block when the client leaves, and raise :class:`ClientDisconnected` then.

        Enter it after the body was read.
        """
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        stop = self.response.watch(leave)
        try:
            yield
        except asyncio.CancelledError:
            # As in asyncio.timeout: swallow only the cancellation that comes from here.
            if gone and task.uncancel() == 0:
                raise ClientDisconnected from None
            raise
        finally:
            stop()

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers. The connection closes after a response that begins before the body has arrived, and
        after the first one that begins while the gateway drains."""
        if self.response.is_paused:
            await self.response.drain()
        self._begin(status, headers)

    @property
    def can_begin(self) -> bool:
        """Whether :meth:`begin` may be called: nothing was sent, and the client can take it."""
        return self.response.can_begin and not self.body.is_incomplete

    def begin(self, headers: Headers, body: bytes) -> None:
        """Begin a stream: send status 200, the headers and the first piece of the body at once, without waiting."""
        # Head and first event in one write, without the request's task. When each streamed token woke the task, it cost
        # 51.4 µs of the gateway instead of 37.0, at 64 streams and steps of 20 ms.
        self._begin(200, headers, body)

    async def write(self, body: bytes) -> None:
        """Send a piece of the body; wait while the client does not read."""
        if self.response.is_paused:
            await self.response.drain()
        self.response.write(body)

    async def finish(self, body: bytes = b"") -> None:
        """Send the last piece of the body; wait while the client does not read."""
        if self.response.is_paused:
            await self.response.drain()
        self.response.finish(body)

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send a whole response."""
        if self.response.is_paused:
            await self.response.drain()
        length = str(len(body)).encode()
        self._begin(status, [(b"content-type", content_type), (b"content-length", length), *headers], body)
        self.response.finish()

    async def fail(self, error: errors.TokenloomError) -> None:
        """Report an error: as a status while nothing was sent, otherwise as the last event of the stream."""
        if not self.started:
            await self.respond(error.http_status, self.error_form.body(error), headers=_headers(error))
        elif self.response.left is not None:  # within a body of announced length, an error has no form
            self.response.abort()
        else:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.finish(self.error_form.event(error))

    def _begin(self, status: int, headers: Headers, body: bytes = b"") -> None:
        self.started = True
        self.status = status
        all_headers = (*headers, *self.extra_headers, (b"x-request-id", self.request_id))
        if name := self.error_form.id_header:
            all_headers = (*all_headers, (name, self.request_id))
        self.response.begin(status, all_headers, body, is_cut=self.body.is_incomplete)


def _headers(error: errors.TokenloomError) -> Headers:
    if error.is_final:
        # OpenAI's clients repeat every status from 500 on, and 408, 409 and 429, unless this header says no. A request
        # that has killed two engines would otherwise be sent again and kill two more.
        yield b"x-should-retry", b"false"
    elif error.retry_after is not None:
        yield b"retry-after", str(math.ceil(error.retry_after)).encode()
    if isinstance(error, errors.Unauthenticated):
        yield b"www-authenticate", b"Bearer"
    if isinstance(error, MethodNotAllowed):
        yield b"allow", error.allowed.encode()


def listed(names: Sequence[str]) -> bytes:
    """Return names as a header's value; those that a header cannot hold are left out."""
    fit = [name for name in names[:MAX_IGNORED] if name.isascii() and name.isprintable() and len(name) <= MAX_NAME]
    return ", ".join(fit).encode()


def trace_headers(exchange: HttpExchange) -> tracing.Headers:
    """Return the headers of the trace that the client has begun."""
    if b"traceparent" not in exchange.headers:
        return tracing.NO_HEADERS
    return tracing.pick_headers((name.decode("latin-1"), value) for name, value in exchange.headers.items())


class _Turns:
    """Takes the turns of one large answer."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self._is_held = False

    async def next(self) -> None:
        """Return when it is this answer's turn, in a later turn of the event loop."""
        self.end()
        await self._exchange.shaping.begin(self._exchange.tenant.name, 1)
        self._is_held = True
        await asyncio.sleep(0)

    def end(self) -> None:
        """End the turn, if there is one."""
        if self._is_held:
            self._is_held = False
            self._exchange.shaping.end(self._exchange.tenant.name, 1)


async def respond_in_pieces(exchange: HttpExchange, body: Iterator[bytes], headers: Headers = ()) -> None:
    """Send a JSON response whose body is made in small blocks. The response begins after its last block was made, so an
    error that is raised meanwhile has a status of its own."""
    turns = _Turns(exchange)
    try:
        pieces = await _shape(body, turns)
    finally:
        turns.end()
    size = sum(map(len, pieces))
    if len(pieces) == 1 or (exchange.hold is not None and size <= _HELD_BYTES):
        await exchange.respond(200, b"".join(pieces), headers=headers)
        return
    length = str(size).encode()
    await exchange.start(200, [(b"content-type", JSON), (b"content-length", length), *headers])
    pieces.reverse()  # what was written is dropped
    while pieces:
        await exchange.write(pieces.pop())
        await asyncio.sleep(0)
    await exchange.finish()


async def _shape(body: Iterator[bytes], turns: _Turns) -> list[bytes]:
    """Return the body in pieces. What takes longer than a slice is made in turns with the other large answers."""
    pieces, blocks, size = list[bytes](), list[bytes](), 0
    began = time.perf_counter()
    for block in body:
        blocks.append(block)
        size += len(block)
        if size > PIECE_BYTES:
            pieces.append(b"".join(blocks))
            blocks, size = [], 0
        if time.perf_counter() - began > _TURN_SECONDS:
            await turns.next()
            began = time.perf_counter()
    pieces.append(b"".join(blocks))
    return pieces
