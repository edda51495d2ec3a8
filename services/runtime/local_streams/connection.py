"""One end of the socket of a local stream: frames in and out, and whether the other end lives."""

import asyncio
from typing import Protocol, cast

from tokenloom.request.errors import TokenloomError

from .frames import FrameDecoder, Kind, encode

TICK_SECONDS = 0.5
SILENT_TICKS = 5
"""At so many ticks after its last byte a peer is dead: after 2 to 2.5 s, as by gRPC's pings. Ticks are counted, not
time: a pause of this process is one tick, however long."""


class Receiver(Protocol):
    """What a connection tells. Nothing follows ``on_lost``."""

    def on_connected(self) -> None:
        """Frames can be sent."""

    def on_frame(self, kind: Kind, payload: bytes) -> None:
        """Any frame but a beat. A ``TokenloomError`` that this raises is what ``on_broken`` gets."""

    def on_broken(self, error: TokenloomError) -> None:
        """What came breaks the rules; nothing more is read from it."""

    def on_lost(self) -> None:
        """The socket is closed, by either side, or the peer was silent for too long."""


class Connection(asyncio.Protocol):
    """Made before its socket is connected; what is sent meanwhile waits in :meth:`writable`."""

    def __init__(self, receiver: Receiver, max_message_bytes: int) -> None:
        """``max_message_bytes``: of a payload that comes."""
        self._receiver = receiver
        self._decoder = FrameDecoder(max_message_bytes)
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._is_open = True
        self._is_finished = False
        self._is_broken = False
        self._is_reading = True
        self._has_sent = False
        self._silent_ticks = 0
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._is_finished or not self._is_open

    @property
    def is_attached(self) -> bool:
        """Whether it ever had a socket, which it then closes itself."""
        return self._transport is not None

    @property
    def is_writable(self) -> bool:
        """Whether the socket takes more; else :meth:`writable` waits for that."""
        return self._writable.is_set()

    async def writable(self) -> None:
        """Returns when the socket takes more, or is gone."""
        await self._writable.wait()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame, without waiting; swallowed when nothing can be sent any more."""
        if self._transport is not None and not self.is_finished:
            self._has_sent = True
            self._transport.write(encode(kind, payload))

    def finish(self, kind: Kind, payload: bytes) -> None:
        """Sends the last frame. The socket stays open until the peer, which has read it, closes it: closed here, what
        the peer is just writing would cost it that frame."""
        self.send(kind, payload)
        self._is_finished = True

    def abort(self) -> None:
        """Closes the socket without what is not sent yet."""
        self._is_open = False
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        """Reads no more until :meth:`resume_reading`: the peer's writes will wait. Idempotent, as its inverse."""
        if self._is_open and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_open and not self._is_reading and self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._is_open:
            self._transport.abort()
            return
        self._writable.set()
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._receiver.on_connected()

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        if self._is_broken:
            return
        try:
            for kind, payload in self._decoder.feed(data):
                if kind is not Kind.BEAT:
                    self._receiver.on_frame(kind, payload)
        except TokenloomError as error:
            self._is_broken = True
            self._receiver.on_broken(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = False
        self._writable.set()
        if self._ticker is not None:
            self._ticker.cancel()
        self._receiver.on_lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _tick(self) -> None:
        self._silent_ticks = self._silent_ticks + 1 if self._is_reading else 0
        if self._silent_ticks >= SILENT_TICKS:
            self.abort()
            return
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        if not self._has_sent and self.is_writable:
            self.send(Kind.BEAT)
        self._has_sent = False
