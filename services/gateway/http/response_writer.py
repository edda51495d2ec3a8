"""Writes the response of one request to its connection."""

import http
import re
from collections.abc import Iterable
from typing import Protocol

from .client_flow import ClientFlow

Headers = Iterable[tuple[bytes, bytes]]

_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_STATUS_LINES = {status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b"")) for status in range(100, 600)}
_WITHOUT_BODY = (204, 304)
_NOT_IN_VALUES = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ResponseOwner(Protocol):
    """Describes what a response needs of the protocol of its connection."""

    @property
    def default_headers(self) -> Headers:
        """Of every response: the date."""

    @property
    def is_ending(self) -> bool:
        """Whether the response that begins now shall be the connection's last one."""

    def end_response(self, *, keep_alive: bool, lingers: bool) -> None:
        """Go on with the next request after a complete response.

        ``keep_alive``: whether there may be one. ``lingers``: the client may still send; give it time to read.
        """


class ResponseWriter:
    """Writes head and body, in chunks where the length is not known in advance.

    No method waits: the caller drains the connection first, if it may wait, or looks whether there is room. A client
    that has left is written nothing.

    Attributes:
        watch: :meth:`.client_flow.ClientFlow.watch` of the connection.
        left: Bytes of the body that are still to come; None while their number is not known in advance.
    """

    __slots__ = (
        "_flow",
        "_has_begun",
        "_is_chunked",
        "_is_head",
        "_keep_alive",
        "_lingers",
        "_owner",
        "_speaks_1_1",
        "left",
        "watch",
    )

    def __init__(
        self, flow: ClientFlow, owner: ResponseOwner, *, is_head: bool, speaks_1_1: bool, keep_alive: bool
    ) -> None:
        """Args:
        is_head: The request's method is HEAD: the response has no body.
        speaks_1_1: The client speaks HTTP/1.1, so that it understands chunks.
        keep_alive: The client may send another request on this connection.
        """
        self._flow = flow
        self.watch = flow.watch
        self._owner = owner
        self._is_head = is_head
        self._speaks_1_1 = speaks_1_1
        self._keep_alive = keep_alive
        self._has_begun = self._is_chunked = self._lingers = False
        self.left: int | None = None

    @property
    def can_begin(self) -> bool:
        """Whether the head may be written now, without waiting, and need not announce the connection's end."""
        flow = self._flow
        return not (self._has_begun or flow.write_paused or flow.is_lost or self._owner.is_ending)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` may be called without waiting: a chunked response has begun and its client keeps up."""
        return self._is_chunked and not self._flow.write_paused and not self._flow.is_lost

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read what was written, so that :meth:`drain` waits."""
        return self._flow.write_paused

    async def drain(self) -> None:
        """Wait until the client reads what was written, or has left."""
        await self._flow.drain()

    def begin(self, status: int, headers: Headers, body: bytes = b"", *, is_cut: bool = False) -> None:
        """Write the head, and in the same write the first piece of the body.

        ``is_cut``: the rest of the request's body is not read, so that the connection ends with this response. Raises
        ``ValueError`` for a header that would break the head.
        """
        if self._flow.is_lost:
            return
        self._has_begun = True
        pairs = [*self._owner.default_headers, *headers]
        if _NOT_IN_VALUES.search(b"".join([value for _, value in pairs])):
            raise ValueError(f"a header of the response holds a control character: {pairs}")
        # The rest of a body that was refused would be parsed as the next request.
        self._lingers = is_cut or self._owner.is_ending
        length = dict(pairs).get(b"content-length")
        if length is not None:
            self.left = int(length)
        elif self._is_head or status in _WITHOUT_BODY:
            self.left = 0
        lines = [_STATUS_LINES[status], *[b"%b: %b\r\n" % pair for pair in pairs]]
        if self._lingers or not self._keep_alive:
            lines.append(b"connection: close\r\n")
        if self.left is None:
            # A client of HTTP/1.0 knows no chunks: there, the end of the connection is the end of the body.
            self._is_chunked = self._speaks_1_1
            lines.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        else:
            lines.append(b"\r\n")
        if body:
            lines.append(self._piece(body))
        self._flow.transport.write(b"".join(lines))

    def write(self, body: bytes) -> None:
        """Send a piece of the body; it must not be empty."""
        if self._flow.is_lost:
            return
        # The line of a chunk stands here once more: this is called for every streamed token.
        piece = b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else self._piece(body)
        if piece:
            self._flow.transport.write(piece)

    def finish(self, body: bytes = b"") -> None:
        """Send the last piece of the body, and let the connection go on with the next request. Raises ``RuntimeError``
        when the body is shorter than was announced: the client would take what follows for the rest of it."""
        if self._flow.is_lost:
            return
        piece = self._piece(body) if body else b""
        if self._is_chunked:
            piece += b"0\r\n\r\n"
        if self.left and not self._is_head:
            raise RuntimeError(f"the body of a response is {self.left} bytes shorter than announced")
        if piece:
            self._flow.transport.write(piece)
        self._owner.end_response(keep_alive=self._keep_alive, lingers=self._lingers)

    def abort(self) -> None:
        """Close the connection: what is missing of the response cannot be sent."""
        self._flow.transport.abort()

    def _piece(self, body: bytes) -> bytes:
        """Return a piece of the body as it is sent. Raises ``RuntimeError`` for more than was announced."""
        if self._is_chunked:
            return b"%x\r\n%b\r\n" % (len(body), body)
        if self._is_head:
            return b""
        if self.left is not None:
            self.left -= len(body)
            if self.left < 0:
                raise RuntimeError(f"the body of a response is {-self.left} bytes longer than announced")
        return body
