"""Decides when the gateway reads from a connection, and notices a client that leaves while it does not.

Replaces the flow control of uvicorn, which has one switch for all owners: what one had paused, the next one resumed.
"""

import asyncio
import select
import socket

from uvicorn.protocols.http.flow_control import FlowControl

LOOK_SECONDS = 1.0
"""How often a connection that is not read is looked at: only reading reports that its client has left."""
_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class ClientFlow(FlowControl):
    """Reads as long as no owner holds reading back. An owner releases what it has held itself, and nothing else.

    Attributes:
        read_paused: Whether reading is held back.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._holders: dict[object, None] = {}  # the protocol, and the bodies of its requests
        self._timer: asyncio.TimerHandle | None = None

    def pause_reading(self) -> None:
        """Do nothing: uvicorn calls it, but does not own reading."""

    def resume_reading(self) -> None:
        """Do nothing, for the same reason."""

    def hold(self, holder: object, *, is_brief: bool = False) -> None:
        """Read no further until this holder releases it. ``is_brief``: it does within a few turns of the event loop, so
        that the client is not looked at meanwhile."""
        if not self._holders:
            self.read_paused = True
            self._transport.pause_reading()
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

    def close(self) -> None:
        """Look no more: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _resume(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Close the connection if its client has left; look again later while it is not read."""
        self._timer = None
        if not self._holders or self._transport.is_closing():
            return
        # While reading is paused the event loop does not see the end of a connection, and the request of a client that
        # has left would run on.
        if has_left(self._transport):
            self._transport.abort()
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
