"""One HTTP request and its response: reads the body within limits, writes the response, notices a disconnect."""

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenloom.request import errors

from . import sse

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
BODY_SECONDS = 60.0
"""Limit on the time from the end of a request's head to the end of its body."""
FAREWELL_SECONDS = 1.0
"""Limit on the time that a client which does not read may delay the error event of its own stream."""
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class UnsupportedEncoding(errors.InvalidArgument):
    """Raised for a compressed body: its size after decompression is not known in advance."""

    http_status = 415
    reason = "UNSUPPORTED_ENCODING"


class BodyTimeout(errors.InvalidArgument):
    """Raised for a body that is incomplete when its time is over."""

    http_status = 408
    reason = "BODY_TIMEOUT"


class MethodNotAllowed(errors.InvalidArgument):
    """Raised for a path that exists, but not with the request's method."""

    http_status = 405
    reason = "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"this path accepts {self.allowed}, not {method[:32]}")


class ClientDisconnected(Exception):
    """Raised when the client has left; no response is possible any more."""


class DirectWriter:
    """Does what uvicorn's ``receive`` and ``send`` would do, for one request, without a task or a message.

    A streamed token that goes through ASGI costs a wake-up of the request's task, a coroutine and a message; here it
    costs one call (docs/decisions.md has the figures).

    Attributes:
        cycle: uvicorn's state of the request, a private part; its ``disconnected`` says whether the client has left.
    """

    def __init__(self, cycle: "RequestResponseCycle", watchers: Watchers) -> None:
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

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], object]:
        """Call ``on_lost`` when the client leaves, until the returned function is called.

        Raises :class:`ClientDisconnected` when the client has left already.
        """
        if self.cycle.disconnected:
            raise ClientDisconnected
        self._flow.resume_reading()  # a paused connection does not notice that the client has left
        self._watchers.add(on_lost)
        return partial(self._watchers.discard, on_lost)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` may be called: a chunked response has begun and its client keeps up."""
        cycle = self.cycle
        return not self._flow.write_paused and not cycle.disconnected and bool(cycle.chunked_encoding)

    def write(self, body: bytes) -> None:
        """Send a piece of the response's body. ``body`` must not be empty: an empty chunk would end the response."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class Exchange:
    """Holds a request and the state of its response, so that an error is reported in a form that is still possible.

    Attributes:
        method, path, query: Of the request.
        headers: Of the request, with lower-case names.
        direct: Writes to the connection past ASGI; None under a server that does not offer it.
        request_id: The client's ``x-request-id``, or a new one; returned to the client, never used inside the mesh.
        extra_headers: Added to the response, whatever it is.
    """

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.direct: DirectWriter | None = scope["extensions"].get(DIRECT_WRITER) if "extensions" in scope else None
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.started = False
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body, at most ``limit`` bytes.

        Raises :class:`errors.PayloadTooLarge` (before reading, when Content-Length is given),
        :class:`UnsupportedEncoding`, :class:`BodyTimeout` and :class:`ClientDisconnected`.
        """
        if self.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise UnsupportedEncoding("Content-Encoding is not supported; send the body uncompressed")
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        body = self.direct.take_body() if self.direct is not None else None
        if body is None:
            return await self._receive_body(limit)
        if len(body) > limit:
            raise _too_large(limit)
        return body

    @contextmanager
    def until_disconnected(self) -> Iterator[None]:
        """Cancel the ``with`` block when the client leaves, and raise :class:`ClientDisconnected` then.

        Enter it after the body was read: from then on ``receive`` reports only the disconnect.
        """
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        if self.direct is not None:
            stop = self.direct.watch(leave)
        else:
            stop = asyncio.create_task(self._watch(leave), name="disconnect watch").cancel
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
        """Send status and headers."""
        self.started = True
        all_headers = [*headers, *self.extra_headers, (b"x-request-id", self.request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

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
            await self.respond(error.http_status, sse.encode_json(errors.openai_body(error)), headers=_headers(error))
            return
        async with asyncio.timeout(FAREWELL_SECONDS):
            await self.finish(sse.error_event(error))

    async def _receive_body(self, limit: int) -> bytes:
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {BODY_SECONDS:g} s") from None
        return bytes(body)

    async def _watch(self, leave: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        leave()


def _too_large(limit: int) -> errors.PayloadTooLarge:
    return errors.PayloadTooLarge(f"the body is larger than {limit} bytes")


def _headers(error: errors.TokenloomError) -> Headers:
    if error.retry_after is not None:
        yield b"retry-after", str(math.ceil(error.retry_after)).encode()
    if isinstance(error, errors.Unauthenticated):
        yield b"www-authenticate", b"Bearer"
    if isinstance(error, MethodNotAllowed):
        yield b"allow", error.allowed.encode()
