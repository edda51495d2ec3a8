"""Sends and receives messages in an event loop, over a stream socket to the core."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

from ..data.errors import EngineDeadError, NotSentError
from ..wire.frames import NO_MEMORY, RETRY_SECONDS, FrameReader, Pieces, head
from ..wire.serialization import Frame

# A front that falls behind stops reading; then the socket's buffer fills and the core waits, instead of this process
# growing.
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
        self._unsent: Pieces | None = None
        self._has_begun = False  # whether the first byte of it is sent
        self._on_begun: Callable[[], None] | None = None
        self._is_reading = self._is_writing = self._has_ended = False
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

    async def send(self, frames: Sequence[Frame], on_begun: Callable[[], None] | None = None) -> None:
        """Send a message; wait while the peer is too far behind.

        ``on_begun`` is called once the first byte is sent: from then on the whole message will be, even if its sender
        is cancelled. Raises the error of :meth:`fail`, and ``NotSentError`` for a message that cannot be sent.
        """
        try:
            message = Pieces([head(frames), *frames])
        except ValueError as error:
            raise NotSentError(str(error)) from None
        async with self._sending:
            if self._unsent is not None:
                await self._flush(self._unsent)  # the rest of a message whose sender was cancelled
            self._unsent, self._has_begun, self._on_begun = message, False, on_begun
            try:
                await self._flush(message)
            finally:
                if not self._has_begun:
                    self._unsent = None

    def fail(self, error: Exception) -> None:
        """End all operations with ``error``, later ones too. The first error wins.

        The event loop knows nothing of the connection afterwards, so that the caller may close it at once.
        """
        self._error = self._error or error
        self._pause_reading()
        self._pause_writing()
        _wake(self._arrival)
        _wake(self._room)

    async def _flush(self, unsent: Pieces) -> None:
        while True:
            if self._error is not None:
                raise self._error
            try:
                is_sent = unsent.advance(self._connection.sendmsg(unsent.head()))
            except BlockingIOError:
                await self._wait_for_room()
            except ConnectionError:
                # The end of the connection says nothing about its cause; the thread that waits for the process brings
                # the status.
                self._room = asyncio.get_running_loop().create_future()
                await self._room  # until :meth:`fail`
            except OSError as error:
                await self._retry_or_give_up(error)
            else:
                if not self._has_begun:
                    self._has_begun = True
                    if self._on_begun is not None:
                        self._on_begun()
                if is_sent:
                    self._unsent = None
                    return

    async def _retry_or_give_up(self, error: OSError) -> None:
        """Wait if the message may be sent later. Raises ``NotSentError`` if nothing of it was sent; a message that ends
        in its middle leaves a stream that no receiver understands."""
        if error.errno in NO_MEMORY:
            await asyncio.sleep(RETRY_SECONDS)
        elif not self._has_begun:
            raise NotSentError(f"the message cannot be sent: {error}") from None
        else:
            self.fail(EngineDeadError(f"a message to the engine core ended in its middle: {error}"))

    async def _wait_for_room(self) -> None:
        loop = asyncio.get_running_loop()
        self._room = room = loop.create_future()
        loop.add_writer(self._connection.fileno(), _wake, room)
        self._is_writing = True
        try:
            await room
        finally:
            self._pause_writing()
            self._room = None

    def _read_on(self) -> None:
        if not self._is_reading and not self._has_ended:
            self._is_reading = True
            asyncio.get_running_loop().add_reader(self._connection.fileno(), self._on_readable)

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def _pause_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            asyncio.get_running_loop().remove_writer(self._connection.fileno())

    def _on_readable(self) -> None:
        try:
            messages = self._reader.read(self._connection)
        except BlockingIOError:
            return
        except ValueError as error:
            self.fail(EngineDeadError(f"the engine core sent something else than messages: {error}"))
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
