"""One HTTP request and its response, on bare ASGI: nothing between an event and the socket."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tokenloom.request import errors

from . import direct_writer, sse
from .body import Receive, read_body

Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"
FAREWELL_SECONDS = 1.0
"""How long a client that does not read may delay its own error event."""


class MethodNotAllowed(errors.InvalidArgument):
    """The path exists, but not with this method."""

    http_status = 405
    reason = "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"this path takes {self.allowed}, not {method[:32]}")


class Exchange:
    """The response's state, so that a failure is told in the form that is still possible.

    Attributes:
        method, path, query: Of the request.
        headers: Of the request, lower-case names.
        receive: The request's body, then the disconnect.
        direct: The way to the connection past ASGI; None under another server than ours.
        request_id: Echoed to the client; never an identity inside the mesh.
        extra_headers: Of the answer, whatever it is.
    """

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send, request_id: bytes) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.query: bytes = scope["query_string"]
        self.request_id = request_id
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.started = False
        self.direct = direct_writer.find(scope)
        self._send = send

    @property
    def writable(self) -> bool:
        """Whether :meth:`write_now` may be called: a stream has begun, and the client keeps up with it."""
        return self.direct is not None and self.direct.is_open

    async def read_body(self, limit: int) -> bytes:
        """As :func:`body.read_body`; nobody waits for a body that came with its head."""
        arrived = self.direct.take_body() if self.direct is not None else None
        return await read_body(self.headers, self.receive, limit, arrived)

    async def start(self, status: int, headers: Headers) -> None:
        """Sends status and headers."""
        self.started = True
        all_headers = [*headers, *self.extra_headers, (b"x-request-id", self.request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def write(self, body: bytes) -> None:
        """Sends a piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def write_now(self, body: bytes) -> None:
        """As :meth:`write`, without waiting; only while :attr:`writable`."""
        assert self.direct is not None
        self.direct.write(body)

    async def finish(self, body: bytes = b"") -> None:
        """Sends the last piece."""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """A whole response at once."""
        length = str(len(body)).encode()
        await self.start(status, [(b"content-type", content_type), (b"content-length", length), *headers])
        await self.finish(body)

    async def fail(self, error: errors.TokenloomError) -> None:
        """Tells the error: as a status when nothing was sent yet, else as the stream's last event."""
        if not self.started:
            await self.respond(error.http_status, sse.encode_json(errors.openai_body(error)), headers=_headers(error))
            return
        async with asyncio.timeout(FAREWELL_SECONDS):
            await self.finish(sse.error_event(error))


def _headers(error: errors.TokenloomError) -> Headers:
    if error.retry_after is not None:
        yield b"retry-after", str(math.ceil(error.retry_after)).encode()
    if isinstance(error, errors.Unauthenticated):
        yield b"www-authenticate", b"Bearer"
    if isinstance(error, MethodNotAllowed):
        yield b"allow", error.allowed.encode()
