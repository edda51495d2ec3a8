"""Decides when the gateway reads from a connection and when it waits to write, notices a client that leaves, and writes
responses. Spreads what many connections cause at once over turns of the event loop, so that no turn takes long."""

import asyncio
import http
import re
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

LOOK_SECONDS = 1.0
"""How often a connection that is not read is looked at: only reading reports that its client has left."""
REQUESTS_PER_TURN = 8
"""Reads of connections that are parsed in one turn: each may begin a request, which takes about 0.3 ms."""
ANSWERS_PER_TURN = 16
"""Answers that begin or end in one turn; each takes about 0.15 ms. A step of an engine may begin hundreds."""
_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class ClientDisconnected(Exception):
    """Raised when the client has left; no response is possible any more."""


class ClientFlow:
    """Holds what the requests of a connection share of it.

    The connection is read as long as no owner holds reading back. An owner releases what it has held itself, and
    nothing else: with one switch for all of them, what one had paused, another one would resume.

    Attributes:
        transport: Of the connection.
        read_paused: Whether reading is held back.
        write_paused: Whether the client does not read what was written.
        is_lost: Whether nothing can be written any more: the client has left, or the connection has refused it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.read_paused = self.write_paused = self.is_lost = False
        self._is_writable = asyncio.Event()
        self._holders: dict[object, None] = {}  # the protocol, and the bodies of its requests
        # One for each request in work, so one unless the client pipelines.
        self._watchers: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, holder: object, *, is_brief: bool = False) -> None:
        """Read no further until this holder releases it. ``is_brief``: it does within a few turns of the event loop, so
        that the client is not looked at meanwhile."""
        if not self._holders:
            self.read_paused = True
            self.transport.pause_reading()
        self._holders[holder] = None
        if self._timer is None and not is_brief:
            self._look_later()

    def release(self, holder: object) -> None:
        """Read again as far as this holder is concerned. Does nothing if it holds nothing back."""
        if holder in self._holders:
            del self._holders[holder]
            if not self._holders:
                self._resume()

    def release_all(self) -> None:
        """Read again, whatever is held back: the connection is being closed, and what it reads is dropped."""
        self._holders.clear()
        self._resume()

    def pause_writing(self) -> None:
        """Have :meth:`drain` wait: the client does not read what was written."""
        self.write_paused = True
        self._is_writable.clear()

    def resume_writing(self) -> None:
        """Let :meth:`drain` return."""
        self.write_paused = False
        self._is_writable.set()

    async def drain(self) -> None:
        """Wait until the client reads what was written, or has left; call it while :attr:`write_paused`."""
        await self._is_writable.wait()

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], object]:
        """Call ``on_lost`` when the client leaves, until the returned function is called.

        Raises :class:`ClientDisconnected` when the client has left already.
        """
        if self.is_lost:
            raise ClientDisconnected
        self._watchers[on_lost] = None
        return partial(self._watchers.pop, on_lost, None)

    def lose(self) -> None:
        """End all waiting: the client has left, or gets no response but the one of the connection itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.is_lost = True
        self.resume_writing()
        for on_lost in tuple(self._watchers):
            on_lost()

    def _resume(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Close the connection if its client has left; look again later while it is not read."""
        self._timer = None
        if not self._holders or self.transport.is_closing():
            return
        # While reading is paused the event loop does not see the end of a connection, and the request of a client that
        # has left would run on.
        if has_left(self.transport):
            self.transport.abort()
        else:
            self._look_later()


def has_left(transport: asyncio.Transport) -> bool:
    """Return whether the other side has closed a connection, or its sending half. What it sent before may be unread."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return any(events & _LEFT for _, events in poll.poll(0))


class TurnShare:
    """Admits a limited number of pieces of work in each turn of the event loop. Further ones wait, in order.

    What waits is bounded by the connections of the gateway.
    """

    def __init__(self, pieces_per_turn: int) -> None:
        self._limit = pieces_per_turn
        self._num_taken = 0
        self._waiting: deque[Callable[[], object]] = deque()

    def take(self) -> bool:
        """Return whether a piece may be done now."""
        if self._num_taken >= self._limit:
            return False
        if not self._num_taken:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_taken += 1
        return True

    def call(self, piece: Callable[[], object]) -> None:
        """Call ``piece`` in a later turn, because :meth:`take` has returned False."""
        self._waiting.append(piece)

    async def wait(self) -> None:
        """Return when a piece may be done."""
        if not self.take():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call(partial(_wake, turn))
            await turn

    def _begin_turn(self) -> None:
        loop = asyncio.get_running_loop()
        self._num_taken = min(len(self._waiting), self._limit)
        if self._num_taken:
            loop.call_soon(self._begin_turn)
        for _ in range(self._num_taken):
            loop.call_soon(self._waiting.popleft())


def _wake(turn: "asyncio.Future[None]") -> None:
    if not turn.done():  # otherwise its request has ended
        turn.set_result(None)


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
        watch: :meth:`ClientFlow.watch` of the connection.
        left: Bytes of the body that are still to come; None while their number is not known in advance.
        speaks_1_1: Whether the client speaks HTTP/1.1, so that it understands chunks.
    """

    __slots__ = (
        "_flow",
        "_has_begun",
        "_is_chunked",
        "_is_head",
        "_keep_alive",
        "_lingers",
        "_owner",
        "left",
        "speaks_1_1",
        "watch",
    )

    def __init__(
        self, flow: ClientFlow, owner: ResponseOwner, *, is_head: bool, speaks_1_1: bool, keep_alive: bool
    ) -> None:
        """Args:
        is_head: The request's method is HEAD: the response has no body.
        speaks_1_1: See above.
        keep_alive: The client may send another request on this connection.
        """
        self._flow = flow
        self.watch = flow.watch
        self._owner = owner
        self._is_head = is_head
        self.speaks_1_1 = speaks_1_1
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
            # A client of HTTP/1.0 reads no chunks: there, the end of the connection is the end of the body.
            self._is_chunked = self.speaks_1_1
            lines.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        else:
            lines.append(b"\r\n")
        if body:
            lines.append(self._piece(body))
        self._flow.transport.write(b"".join(lines))

    def go_on(self) -> None:
        """Continue a response in chunks that another process has begun."""
        self._has_begun = self._is_chunked = True

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
