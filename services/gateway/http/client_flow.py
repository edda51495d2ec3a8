"""Decides when the gateway reads from a connection and when it waits to write, and notices a client that leaves.
Spreads what many connections cause at once over turns of the event loop, so that no turn takes long."""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

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
