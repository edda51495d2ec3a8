"""One end of a local stream's socket: frames out, messages in, and whether the peer is alive."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, cast

from tokenloom.request.errors import TokenloomError

from ..liveness import LivenessTimer
from .frames import HEADER, FrameDecoder, Kind
from .sockets import is_stopped

TICK_SECONDS = 0.5
SILENT_TICKS = 5
"""A peer whose process is stopped is dead this many ticks after its last byte: after 2 to 2.5 s, as gRPC's pings."""
HUNG_TICKS = 20
"""Any other peer is dead this many ticks after its last byte: its event loop may only be busy, but not for 10 s."""

MAX_MESSAGES = 128
MAX_BYTES = 1 << 20
"""Beyond either limit of unread messages the socket is not read. What one read returned may still exceed them."""

IsPeerStopped: TypeAlias = Callable[[asyncio.Transport], bool]
"""Returns whether the process at the other end of a transport is stopped and cannot answer."""


def is_peer_stopped(transport: asyncio.Transport) -> bool:
    """Return what the system knows of the process at the other end of a unix socket."""
    return is_stopped(transport.get_extra_info("socket"))


class SocketEnd(ABC, asyncio.Protocol):
    """Sends frames and keeps the messages received, for one reader. Made before its socket is connected.

    Attributes:
        is_writable: The socket takes more data; otherwise await :meth:`writable`, which waits for the connection too.
        is_finished: Nothing can be sent any more.
        was_silent: The connection was given up because the peer sent nothing.
        transport: None until it has a socket, which it then closes itself.
    """

    def __init__(self, max_message_bytes: int, is_peer_stopped: IsPeerStopped = is_peer_stopped) -> None:
        """``max_message_bytes``: the largest payload, in either direction."""
        self._max_message_bytes = max_message_bytes
        self._is_peer_stopped = is_peer_stopped
        self._decoder = FrameDecoder(max_message_bytes)
        self.transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self.is_writable = self.is_finished = self.was_silent = False
        self._takes_messages = self._has_all = self._has_sent = self._is_broken = False
        self._is_open = self._is_reading = True
        self._silence = LivenessTimer(longest=TICK_SECONDS)  # a pause of this process counts as one tick
        self._ticker: asyncio.TimerHandle | None = None
        self._messages: deque[bytes] = deque()  # bounded by MAX_MESSAGES and MAX_BYTES
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    # What the two ends of a call do differently

    def _on_connected(self) -> None:
        """Frames can be sent."""

    @abstractmethod
    def _on_frame(self, kind: Kind, payload: bytes) -> None:
        """Take any frame except beats, and except messages that the reader gets. Raises ``TokenloomError`` for one that
        breaks the protocol."""

    @abstractmethod
    def _on_broken(self, error: TokenloomError) -> None:
        """The peer broke the protocol; nothing more is read from it."""

    @abstractmethod
    def on_lost(self) -> None:
        """The socket was closed, by either side, or never connected, or the peer was silent for too long."""

    # Frames sent

    async def writable(self) -> None:
        """Return when the socket takes more data, or is gone."""
        await self._can_write.wait()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame without waiting; drop it when nothing can be sent any more."""
        if self.transport is not None and not self.is_finished:
            self._has_sent = True
            self.transport.write(HEADER.pack(len(payload), kind) + payload)

    def finish(self, kind: Kind, payload: bytes) -> None:
        """Send the last frame. The socket stays open until the peer has read the frame and closes it: closing it here
        while the peer is writing would lose the frame."""
        self.send(kind, payload)
        self.is_finished = True

    def disconnect(self) -> None:
        """Close the socket without sending what is still buffered."""
        self._close()
        if self.transport is not None:
            self.transport.abort()

    # Messages received

    async def next_message(self) -> bytes:
        """Return the next message, without a turn of the event loop if it is here. Raises ``StopAsyncIteration`` after
        the last one. Cancelling loses none."""
        while not self._messages:
            if self._has_all:
                raise StopAsyncIteration
            assert self._waiter is None, "a stream has one reader at a time"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._num_bytes -= len(message)
        if not self._is_reading and len(self._messages) <= MAX_MESSAGES // 2 and self._num_bytes <= MAX_BYTES // 2:
            self._read_on()
        return message

    def end_messages(self, *, drop: bool = False) -> None:
        """No message follows; the reader still gets those received before, unless they are to be dropped."""
        if drop:
            self._messages.clear()
            self._num_bytes = 0
        self._takes_messages = False
        self._has_all = True
        self._read_on()  # otherwise the end of the connection would go unnoticed
        self._wake_reader()

    def _wake_reader(self) -> bool:
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    def _read_on(self) -> None:
        if self._is_open and not self._is_reading and self.transport is not None:
            self._is_reading = True
            self.transport.resume_reading()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # The call may have been cancelled between connect() and this callback; a transport that nothing closes would
        # leak.
        if not self._is_open:
            self.transport.abort()
            return
        self.resume_writing()
        # The ticker starts first, so that a peer that accepts a connection and never answers is found like any silent
        # one.
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._on_connected()

    def data_received(self, data: bytes) -> None:
        self._silence.owed = 0.0
        if self._is_broken:
            return
        try:
            for kind, payload in self._decoder.feed(data):
                if kind is Kind.MESSAGE and self._takes_messages:
                    self._messages.append(payload)
                    self._num_bytes += len(payload)
                elif kind is not Kind.BEAT:
                    self._on_frame(kind, payload)
            if self._decoder.error is not None:
                raise self._decoder.error
        except TokenloomError as error:
            self._is_broken = True
            # Only this connection ends: one connection is one call, so broken bytes cannot shift the frames of other
            # calls.
            self._on_broken(error)
        if not self._messages or self._wake_reader():
            return
        if (len(self._messages) >= MAX_MESSAGES or self._num_bytes >= MAX_BYTES) and self._is_open and self._is_reading:
            assert self.transport is not None
            self._is_reading = False  # the peer's writes wait until reading resumes
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()
        if self._ticker is not None:
            self._ticker.cancel()
        self.on_lost()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._can_write.clear()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._can_write.set()

    def _close(self) -> None:
        self._is_open = False
        self.is_finished = True
        self.resume_writing()

    def _tick(self) -> None:
        # While reading is paused the peer's beats stay in the kernel, so its silence is this side's doing and does not
        # count.
        silent_ticks = round(self._silence.look(owes=self._is_reading) / TICK_SECONDS)
        if silent_ticks >= SILENT_TICKS and self._is_peer_dead(silent_ticks):
            self.was_silent = True
            self.disconnect()
            return
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        # A beat is sent only in a tick without another frame, so that a busy stream pays nothing for it. It is not
        # queued behind a full buffer either: beats for a peer that does not read would only pile up.
        if not self._has_sent and self.is_writable:
            self.send(Kind.BEAT)
        self._has_sent = False

    def _is_peer_dead(self, silent_ticks: int) -> bool:
        assert self.transport is not None
        # A beat shows that the event loop runs, not that the process lives: a gateway whose loop was busy for 2 s once
        # lost all streams. So the system is asked about the process, and a peer that runs but is busy gets 10 s.
        return silent_ticks >= HUNG_TICKS or self._is_peer_stopped(self.transport)
