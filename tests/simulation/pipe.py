"""One end of a connection in memory: an asyncio transport whose writes arrive when the network says so."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from .network import KEEPALIVE_SECONDS, Network
from .virtual_loop import Process

_HIGH_BYTES, _LOW_BYTES = 64 << 10, 16 << 10
"""The writer pauses above the first and resumes below the second number of bytes on their way."""


class Pipe(asyncio.Transport):
    """Sends to its ``peer``, in order. Each write arrives as a whole.

    Attributes:
        here: The process that owns this end.
        there: The process at the other end.
    """

    peer: "Pipe"

    def __init__(self, network: Network, here: Process, there: Process, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.here, self.there = here, there
        self._network = network
        self._protocol = protocol
        self._next_at = 0.0
        self._kept: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # while the link is cut
        self._unread: deque[Callable[[], None]] = deque()  # while reading is paused
        self._is_reading = True
        self._is_closed = False
        self._num_bytes = 0  # written and not read yet
        self._is_writing_paused = False
        network.pipes[self] = None

    @classmethod
    def connect(
        cls, network: Network, client: Process, protocol: asyncio.Protocol, server: Process, served: asyncio.Protocol
    ) -> None:
        """Connect two protocols. The client's end is open at once, the server's when the news arrives there."""
        ours, theirs = cls(network, client, server, protocol), cls(network, server, client, served)
        ours.peer, theirs.peer = theirs, ours
        ours._send(theirs._open)
        ours._open()
        if ours._is_in_trouble():
            network.loop.call_later(KEEPALIVE_SECONDS, ours.give_up)

    # asyncio.Transport

    def write(self, data: Any) -> None:
        if self._is_closed:
            return
        data = bytes(data)
        self._network.note(self.here.name, self.there.name, data)
        self._num_bytes += len(data)
        self._send(self.peer._arrive, data)
        if self._num_bytes > _HIGH_BYTES and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def abort(self) -> None:
        if self._close():
            self._network.loop.call_soon(self._protocol.connection_lost, None, context=self.here.context)
            self._send(self.peer.lose_in_turn)

    close = abort

    def is_closing(self) -> bool:
        return self._is_closed

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        while self._unread and self._is_reading:
            self._unread.popleft()()

    def is_peer_stopped(self) -> bool:
        """Return whether the process at the other end is frozen."""
        return self.there.is_frozen

    # Called by the network

    def flush(self) -> None:
        """Send what was kept back while the link was cut."""
        kept, self._kept = self._kept, []
        for arrive, args in kept:
            self._send(arrive, *args)

    def give_up(self) -> None:
        """Close the connection if the other end still cannot answer: the pings of the transport have failed."""
        if self._is_in_trouble():
            self.lose()
            self._send(self.peer.lose_in_turn)

    def lose(self) -> None:
        """Lose the connection now, at this end only."""
        if self._close():
            self._network.loop.call_soon(self._protocol.connection_lost, None, context=self.here.context)

    def lose_in_turn(self) -> None:
        """Lose the connection after what arrived before has been read."""
        if self._is_reading:
            self.lose()
        else:
            self._unread.append(self.lose)

    def die(self) -> None:
        """Close this end because its process has ended."""
        if self._close():
            self._send(self.peer.lose_in_turn)

    def _open(self) -> None:
        if not self._is_closed:
            self._protocol.connection_made(self)

    def _arrive(self, data: bytes) -> None:
        if not self._is_reading:
            self._unread.append(lambda: self._arrive(data))
            return
        self.peer._taken(len(data))
        if not self._is_closed:
            self._protocol.data_received(data)

    def _taken(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        if self._is_writing_paused and self._num_bytes < _LOW_BYTES:
            self._is_writing_paused = False
            if not self._is_closed:
                self._network.loop.call_soon(self._protocol.resume_writing, context=self.here.context)

    def _send(self, arrive: Callable[..., None], *args: Any) -> None:
        network = self._network
        sender, receiver = self.here.name, self.there.name
        if self._kept or network.is_cut(sender, receiver):
            self._kept.append((arrive, args))
            return
        self._next_at = max(self._next_at, network.loop.time() + network.delay(sender, receiver))
        network.loop.call_at(self._next_at, arrive, *args, context=self.there.context)

    def _is_in_trouble(self) -> bool:
        here, there = self.here.name, self.there.name
        return self.there.is_frozen or self._network.is_cut(here, there) or self._network.is_cut(there, here)

    def _close(self) -> bool:
        """Return whether it was open."""
        if self._is_closed:
            return False
        self._is_closed = True
        return True
