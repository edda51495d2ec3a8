"""Sends and receives messages in an event loop, over a stream socket to the core."""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence

from ..wire.frames import FrameReader, head, rest_after
from ..wire.serialization import Frame

_MAX_MESSAGES = 64
"""While so many messages wait for their receiver, the socket is not read, so that its sender waits."""


class AsyncSocket:
    """Receives and sends whole messages; each direction in the order of the calls.

    The end of the connection alone raises nothing: :meth:`fail` says why the peer has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        """``connection``: the caller closes it, after :meth:`fail`."""
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader()
        self._messages: deque[list[Frame]] = deque()  # bounded by _MAX_MESSAGES and those of one read
        self._receiving, self._sending = asyncio.Lock(), asyncio.Lock()
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._unsent: list[Frame] = []
        self._is_reading = self._has_ended = False
        self._error: Exception | None = None

    async def receive(self) -> list[Frame]:
        """Return the frames of the next message. Cancelling loses no message. Raises the error of :meth:`fail`."""
        async with self._receiving:
            while True:
                if self._error is not None:
                    raise self._error
                if self._messages:
                    return self._messages.popleft()
                self._read_on()
                self._arrival = asyncio.get_running_loop().create_future()
                try:
                    await self._arrival
                finally:
                    self._arrival = None

    async def send(self, frames: Sequence[Frame]) -> None:
        """Send a message; wait while the peer is too far behind. Raises the error of :meth:`fail`."""
        async with self._sending:
            await self._flush()  # the rest of a message whose sender was cancelled
            self._unsent = [head(frames), *frames]
            num_frames = len(self._unsent)
            try:
                await self._flush()
            except asyncio.CancelledError:
                if len(self._unsent) == num_frames and not isinstance(self._unsent[0], memoryview):
                    self._unsent = []  # nothing of it was sent
                raise

    def fail(self, error: Exception) -> None:
        """End all operations with ``error``, later ones too. The first error wins."""
        self._error = self._error or error
        self._pause_reading()
        _wake(self._arrival)
        _wake(self._room)

    async def _flush(self) -> None:
        while True:
            if self._error is not None:
                raise self._error
            if not self._unsent:
                return
            try:
                self._unsent = rest_after(self._unsent, self._connection.sendmsg(self._unsent))
            except BlockingIOError:
                await self._wait_for_room()
            except ConnectionError:
                self._room = asyncio.get_running_loop().create_future()
                await self._room  # until :meth:`fail`

    async def _wait_for_room(self) -> None:
        loop = asyncio.get_running_loop()
        self._room = room = loop.create_future()
        loop.add_writer(self._connection.fileno(), _wake, room)
        try:
            await room
        finally:
            loop.remove_writer(self._connection.fileno())
            self._room = None

    def _read_on(self) -> None:
        if not self._is_reading and not self._has_ended:
            self._is_reading = True
            asyncio.get_running_loop().add_reader(self._connection.fileno(), self._on_readable)

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def _on_readable(self) -> None:
        try:
            messages = self._reader.read(self._connection)
        except BlockingIOError:
            return
        if messages is None:
            self._has_ended = True
            self._pause_reading()
            return
        self._messages += messages
        if self._messages:
            _wake(self._arrival)
        if len(self._messages) >= _MAX_MESSAGES:
            self._pause_reading()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
