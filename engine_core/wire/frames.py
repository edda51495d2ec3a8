"""Sends and receives messages over a stream socket between two processes of an engine.

A message is the number of its frames (32 bits), the size of each (64 bits), and then the frames, with little-endian
numbers. Both ends write and read the socket themselves: a library that does it in threads of its own adds two threads
to the way of each message, and each takes longer to wake up than the message takes to be written.
"""

import socket
import struct
from collections import deque
from collections.abc import Sequence

from .array_arena import Loan
from .serialization import Frame, encode

READ_BYTES = 64 << 10
"""Limit of what is read at once: more than most messages have."""
_COUNT = struct.Struct("<I")
_ONE_FRAME = struct.Struct("<IQ")
_SIZE_BYTES = 8
_MAX_IDLE_BYTES = 1 << 20
"""A buffer that has grown larger is not kept for the next message."""


def head(frames: Sequence[Frame]) -> bytes:
    """Return what precedes the frames of a message."""
    if len(frames) == 1:
        return _ONE_FRAME.pack(1, len(frames[0]))
    return struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames))


def rest_after(buffers: Sequence[Frame], num_bytes: int) -> list[Frame]:
    """Return what is left of the buffers, without empty ones, when so many bytes have been sent."""
    rest: list[Frame] = []
    for buffer in buffers:
        size = len(buffer)
        if num_bytes < size:
            rest.append(memoryview(buffer)[num_bytes:] if num_bytes else buffer)
        num_bytes = max(num_bytes - size, 0)
    return rest


class FrameSender:
    """Sends messages from one thread, over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._body = bytearray()

    def send(self, message: object, *leading: bytes, loan: Loan | None = None) -> None:
        """Send the frames ``leading`` and then ``message``, except for the arrays that ``loan`` took; wait while the
        peer is too far behind. Raises ``OSError`` when the peer is gone."""
        frames = [*leading, *encode(message, loan, self._body)]
        self.send_frames(frames)
        if len(self._body) > _MAX_IDLE_BYTES:
            self._body = bytearray()

    def send_frames(self, frames: Sequence[Frame]) -> None:
        """Send a message that was encoded already. Waits and raises as :meth:`send`."""
        rest: list[Frame] = [head(frames), *frames]
        while rest:
            rest = rest_after(rest, self._connection.sendmsg(rest))


class FrameReader:
    """Finds messages in a stream of bytes, however it is split. No I/O."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a message

    def feed(self, data: bytes) -> list[list[Frame]]:
        """Return the frames of each message that ``data`` completes."""
        if self._rest:
            self._rest += data
        source = self._rest or data
        messages: list[list[Frame]] = []
        start = 0
        with memoryview(source) as view:
            while (found := _first_message(view, start)) is not None:
                frames, start = found
                messages.append(frames)
        if self._rest:
            del self._rest[:start]
        elif start < len(data):
            self._rest += data[start:]
        return messages


class FrameReceiver:
    """Receives messages in one thread, over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._messages: deque[list[Frame]] = deque()  # those of one read

    def receive(self) -> list[Frame]:
        """Wait for a message and return its frames. Raises ``EOFError`` when the peer is gone."""
        while not self._messages:
            try:
                data = self._connection.recv(READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._messages += self._reader.feed(data)
        return self._messages.popleft()


def _first_message(view: memoryview, start: int) -> tuple[list[Frame], int] | None:
    """Return the frames of the message that begins at ``start``, and where it ends; None if it is incomplete."""
    end = start + _COUNT.size
    if end > len(view):
        return None
    (count,) = _COUNT.unpack_from(view, start)
    sizes_at, end = end, end + count * _SIZE_BYTES
    if end > len(view):
        return None
    sizes = struct.unpack_from(f"<{count}Q", view, sizes_at)
    if end + sum(sizes) > len(view):
        return None
    frames: list[Frame] = []
    for size in sizes:
        frames.append(bytes(view[end : end + size]))
        end += size
    return frames, end
