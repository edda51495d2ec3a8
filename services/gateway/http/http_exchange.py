"""One HTTP request and its response: hands out the body, writes the response, notices a disconnect."""

import asyncio
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenloom.request import errors

from ..request_log.request_record import RequestRecord
from ..tenants.tenant import Tenant
from .error_form import OPENAI
from .request_body import ClientDisconnected, RequestBody, too_large
from .response_counts import OTHER

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
Watchers: TypeAlias = set[Callable[[], None]]
"""Called when a connection is lost; one for each of its requests in work, so one unless the client pipelines."""

JSON = b"application/json"
DIRECT_WRITER = "tokenloom.direct_writer"
"""Name of the ASGI extension under which a scope offers its :class:`DirectWriter`."""
INTERNAL_TENANT = "tokenloom.internal_tenant"
"""Name of the ASGI extension under which a call from within the gateway states its tenant; no client can set it."""
REQUEST_BODY = "tokenloom.request_body"
"""Name of the ASGI extension under which a scope offers its :class:`.request_body.RequestBody`."""
FAREWELL_SECONDS = 1.0
"""Limit on the time that a client which does not read may delay the error event of its own stream."""
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


class DirectWriter:
    """Does what uvicorn's ``send`` would do, for one request, without a task or a message.

    A streamed token that goes through ASGI costs a wake-up of the request's task, a coroutine and a message; here it
    costs one call.

    Attributes:
        cycle: uvicorn's state of the request, a private part; its ``disconnected`` says whether the client has left.
        is_last: Returns whether the gateway drains, so that the connection shall end with this response.
    """

    def __init__(
        self,
        cycle: "RequestResponseCycle",
        watchers: Watchers,
        leave: Callable[[], None],
        is_last: Callable[[], bool] = lambda: False,
    ) -> None:
        """``leave``: closes the connection when the client has had time to read what was written. ``is_last``: returns
        whether the response that begins now shall be the connection's last one."""
        self.cycle = cycle
        self.is_last = is_last
        self._leave = leave
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._watchers = watchers

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], object]:
        """Call ``on_lost`` when the client leaves, until the returned function is called.

        Raises :class:`ClientDisconnected` when the client has left already.
        """
        if self.cycle.disconnected:
            raise ClientDisconnected
        self._watchers.add(on_lost)
        return partial(self._watchers.discard, on_lost)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` may be called: a chunked response has begun and its client keeps up."""
        cycle = self.cycle
        return not self._flow.write_paused and not cycle.disconnected and bool(cycle.chunked_encoding)

    def end_connection(self) -> None:
        """Have the connection closed at the end of the response, which must be announced in the response's head.

        uvicorn would close it at once, and the machine of a client that still sends may then drop the response unread.
        """
        self.cycle.keep_alive = True
        self.cycle.on_response = self._leave

    @property
    def can_begin(self) -> bool:
        """Whether :meth:`begin` may be called: no response has begun, and it needs not be the connection's last."""
        cycle = self.cycle
        is_free = not (cycle.response_started or cycle.disconnected or self._flow.write_paused)
        return is_free and not self.is_last()

    def begin(self, headers: Headers, body: bytes) -> None:
        """Begin a chunked response with status 200, and send the first piece of its body with its head."""
        cycle = self.cycle
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        # Head and first event in one write, past ASGI. Through plain ASGI a streamed token costs 51.4 µs of the gateway
        # instead of 37.0, at 64 streams and steps of 20 ms.
        pieces = [b"HTTP/1.1 200 OK\r\n"]
        pieces += (b"%b: %b\r\n" % pair for pair in (*cycle.default_headers, *headers))
        if not cycle.keep_alive:
            pieces.append(b"connection: close\r\n")
        pieces.append(b"transfer-encoding: chunked\r\n\r\n")
        if body:
            pieces.append(b"%x\r\n%b\r\n" % (len(body), body))
        self._transport.write(b"".join(pieces))

    def write(self, body: bytes) -> None:
        """Send a piece of the response's body. ``body`` must not be empty: an empty chunk would end the response."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class HttpExchange:
    """Holds a request and the state of its response, so that an error is reported in a form that is still possible.

    Attributes:
        method, path, query: Of the request.
        headers: Of the request, with lower-case names.
        direct: Writes to the connection past ASGI.
        body: What the client sends after the head.
        internal_tenant: The tenant for which the gateway itself makes the request; None: a client makes it.
        request_id: The client's ``x-request-id``, or a new one; returned to the client, never used inside the mesh.
        extra_headers: Added to the response, whatever it is.
        error_form: How errors are reported.
        route: The path, with ``*`` for the id of an object; ``other`` until it is known to be served.
        status: Of the response; 0 before it begins.
        began: When the head had arrived, in monotonic seconds.
        record: What the request has generated.
        key: The start of the digest of the client's key; empty before it was checked, and where no key is needed.
        tenant: The tenant of the client's key; not set before the key was checked, nor for paths that need none.
    """

    tenant: Tenant

    def __init__(self, scope: dict[str, Any], send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        # Taken out of the scope, which uvicorn's cycle holds and which would otherwise hold the cycle: only the garbage
        # collector would free the two.
        extensions = scope.pop("extensions")
        self.direct: DirectWriter = extensions[DIRECT_WRITER]
        self.body: RequestBody = extensions[REQUEST_BODY]
        self.internal_tenant: Tenant | None = extensions.get(INTERNAL_TENANT)
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
        self._send = send

    async def read_body(self, limit: int) -> RequestBody:
        """Return the whole JSON body, at most ``limit`` bytes. Use it as ``with``, which ends when it was decoded.

        Raises :class:`errors.PayloadTooLarge` and :class:`errors.ResourceExhausted` (before reading, when
        Content-Length is given), :class:`UnsupportedMediaType`, :class:`UnsupportedEncoding`,
        :class:`.request_body.BodyTimeout` and :class:`.request_body.ClientDisconnected`.
        """
        headers = self.headers
        kind = headers.get(b"content-type", b"")
        # A page of another site may send text/plain without asking first, but no JSON; so this check also keeps such
        # pages away from a gateway without keys.
        if kind != JSON and kind.partition(b";")[0].strip().lower() != JSON:
            raise UnsupportedMediaType("the body must be JSON; set the header Content-Type: application/json")
        if b"content-encoding" in headers and headers[b"content-encoding"].strip().lower() != b"identity":
            raise UnsupportedEncoding("Content-Encoding is not supported; send the body uncompressed")
        digits = headers.get(b"content-length", b"")
        length = int(digits) if digits.isdigit() else None  # the parser has refused a length of more than 64 bits
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

        stop = self.direct.watch(leave)
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
        self.started = True
        self.status = status
        all_headers = [*headers, *self.extra_headers, (b"x-request-id", self.request_id)]
        # The rest of a body that was refused would be parsed as the next request.
        is_last = self.body.is_incomplete or self.direct.is_last()
        if is_last:
            all_headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        if is_last:
            self.direct.end_connection()

    @property
    def can_begin(self) -> bool:
        """Whether :meth:`begin` may be called: nothing was sent, and the client can take it."""
        return self.direct.can_begin and not self.body.is_incomplete

    def begin(self, headers: Headers, body: bytes) -> None:
        """Begin a stream: send status 200, the headers and the first piece of the body at once, without waiting."""
        self.started = True
        self.status = 200
        self.direct.begin((*headers, *self.extra_headers, (b"x-request-id", self.request_id)), body)

    async def write(self, body: bytes) -> None:
        """Send a piece of the body; wait while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self, body: bytes = b"") -> None:
        """Send the last piece of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send a whole response."""
        length = str(len(body)).encode()
        await self.start(status, [(b"content-type", content_type), (b"content-length", length), *headers])
        await self.finish(body)

    async def fail(self, error: errors.TokenloomError) -> None:
        """Report an error: as a status while nothing was sent, otherwise as the last event of the stream."""
        if not self.started:
            await self.respond(error.http_status, self.error_form.body(error), headers=_headers(error))
            return
        async with asyncio.timeout(FAREWELL_SECONDS):
            await self.finish(self.error_form.event(error))


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
