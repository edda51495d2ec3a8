"""Sends and receives messages over a stream socket between two processes of an engine.

A message is the number of its frames (32 bits), the size of each (64 bits), and then the frames, with little-endian
numbers. Both ends write and read the socket themselves: a library that does it in threads of its own adds two threads
to the way of each message, and each takes longer to wake up than the message takes to be written. The system gathers
and scatters the bytes of a message in pieces.
"""

import errno
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

import numpy as np

from .array_arena import Loan
from .serialization import Buffer, Frame, encode

# A request with 1,100 spans of embeddings, or a step with 1,100 pooled results, ended an engine before messages were
# cut.
IOV_MAX: Final = 1024
"""Linux's limit on the buffers of one ``sendmsg`` or ``recvmsg_into``; with more of them the call fails (EMSGSIZE)."""

NO_MEMORY: Final = (errno.ENOBUFS, errno.ENOMEM)
"""Errors of a send that may succeed later: the system has no memory for it now."""
RETRY_SECONDS: Final = 0.01


class Pieces:
    """Holds the pieces that are not moved yet, and yields as many as one call takes."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        """``buffers``: of bytes; empty ones are left out, because filling only those looks like the peer's end."""
        self._buffers = list(filter(len, buffers))
        self._next = 0
        self._head: list[Buffer] = []

    def head(self) -> list[Buffer]:
        """Return the next pieces, at most ``IOV_MAX``; none when all were moved."""
        if not self._head and self._next < len(self._buffers):
            self._head = self._buffers[self._next : self._next + IOV_MAX]
            self._next += len(self._head)
        return self._head

    def advance(self, num_bytes: int) -> bool:
        """Note that so many bytes of :meth:`head` were moved. Returns whether none are left."""
        head = self._head
        for index, buffer in enumerate(head):
            size = len(buffer)
            if num_bytes < size:
                if num_bytes:
                    head[index] = memoryview(buffer)[num_bytes:]
                del head[:index]
                return False
            num_bytes -= size
        self._head = []
        return self._next == len(self._buffers)


# ZMQ moved each message through a thread in either process: one message every 20 ms arrived after 0.32 ms at the core
# and 0.37 ms at the front, and over this socket after 0.13 to 0.15 ms.
READ_BYTES = 64 << 10
"""Limit of what is read at once: more than most messages have."""
# A damaged length would otherwise be waited for, or allocated, for ever.
MAX_FRAMES = 1 << 20
"""Limit of the frames of a message: its sender refuses more, and its receiver takes more for a broken stream."""
MAX_BYTES = 1 << 34
"""Limit of the bytes of a message, as of its frames; the largest hold the embeddings of a step's tokens."""
_COUNT = struct.Struct("<I")
_ONE_FRAME = struct.Struct("<IQ")
_SIZE_BYTES = 8
_MAX_IDLE_BYTES = 1 << 20
"""A buffer that has grown larger is not kept for the next message."""


def head(frames: Sequence[Frame]) -> bytes:
    """Return what precedes the frames of a message. Raises ``ValueError`` for more than a message may hold."""
    count = len(frames)
    if count == 1 and len(frames[0]) <= MAX_BYTES:
        return _ONE_FRAME.pack(1, len(frames[0]))
    sizes = list(map(len, frames))
    if not 0 < count <= MAX_FRAMES or sum(sizes) > MAX_BYTES:
        _refuse_size(count, sum(sizes))
    return struct.pack(f"<I{count}Q", count, *sizes)


# Over ZMQ a token cost the mesh 52.9 µs of CPU instead of 47.5 (bench mesh, steps of 4 ms, batch 64). First tokens in a
# message of their own, ahead of the rest of their step, came no earlier and were given up.
class FrameSender:
    """Sends messages from one thread, over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._body = bytearray()

    def send(self, message: object, *leading: bytes, loan: Loan | None = None) -> None:
        """Send the frames ``leading`` and then ``message``, except for the arrays that ``loan`` took; wait while the
        peer is too far behind. Raises ``OSError`` when the peer is gone, and before anything is sent ``ValueError`` for
        more than a message may hold."""
        frames = [*leading, *encode(message, loan, self._body)]
        self.send_frames(frames)
        # One step with thousands of prompts would keep its megabytes for the life of the process.
        if len(self._body) > _MAX_IDLE_BYTES:
            self._body = bytearray()

    def send_frames(self, frames: Sequence[Frame]) -> None:
        """Send a message that was encoded already. Waits and raises as :meth:`send`."""
        message = [head(frames), *frames]
        # Nearly every message of a step goes in one call, so only the others pay for the bookkeeping.
        sent = self._send_some(message) if len(message) <= IOV_MAX else 0
        if sent < sum(map(len, message)):
            rest = Pieces(message)
            while pieces := rest.head():
                rest.advance(sent or self._send_some(pieces))
                sent = 0

    def _send_some(self, pieces: list[Frame]) -> int:
        """Send as much of these pieces as one call takes. Returns how many bytes that is."""
        while True:
            try:
                return self._connection.sendmsg(pieces)
            except OSError as error:
                if error.errno not in NO_MEMORY:
                    raise
                time.sleep(RETRY_SECONDS)


class FrameReader:
    """Finds messages in what is read from a socket, however it is split."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a message
        # A message that needs several reads is read into memory of its own for each frame: arrays stay there, aligned.
        self._large: list[Frame] = []
        self._unread: Pieces | None = None

    def read(self, connection: socket.socket) -> list[list[Frame]] | None:
        """Read once, and return the frames of each message that is complete now; None at the end of the connection.

        Raises ``BlockingIOError`` when a non-blocking socket has nothing, and ``ValueError`` for a stream that holds
        none of our messages; its rest is of no use then.
        """
        try:
            if self._unread is not None:
                return self._read_large(connection, self._unread)
            data = connection.recv(READ_BYTES)
        except ConnectionError:
            return None
        return self._feed(data) if data else None

    def _read_large(self, connection: socket.socket, unread: Pieces) -> list[list[Frame]] | None:
        count = connection.recvmsg_into(unread.head())[0]
        if not count:
            return None
        if not unread.advance(count):
            return []
        message, self._large, self._unread = self._large, [], None
        return [message]

    def _feed(self, data: bytes) -> list[list[Frame]]:
        if self._rest:
            self._rest += data
        source = self._rest or data
        messages: list[list[Frame]] = []
        start = 0
        with memoryview(source) as view:
            while start < len(view):
                extents, end = _extents(view, start)
                if not extents or end > len(view):
                    break
                message: list[Frame] = []
                for begin, stop in extents:
                    message.append(bytes(view[begin:stop]))
                messages.append(message)
                start = end
        if self._rest:
            del self._rest[:start]
        elif start < len(data):
            self._rest += data[start:]
        # A large message grew in one buffer and was copied out of it: 8 MiB took 16 ms.
        if extents and end - start > READ_BYTES:
            self._begin_large([(begin - start, stop - start) for begin, stop in extents])
        return messages

    def _begin_large(self, extents: Sequence[tuple[int, int]]) -> None:
        """Move the beginning of a message to the memory of its frames. Raises ``ValueError`` if there is not enough."""
        try:
            self._large = [_memory(stop - begin) for begin, stop in extents]
        except MemoryError:
            raise ValueError(f"no memory for a message of {extents[-1][1]} bytes") from None
        unread: list[Frame] = []
        for frame, (begin, stop) in zip(self._large, extents, strict=True):
            known = self._rest[begin:stop]
            memoryview(frame)[: len(known)] = known
            unread.append(memoryview(frame)[len(known) :])
        self._unread = Pieces(unread)
        self._rest = bytearray()


class FrameReceiver:
    """Receives messages in one thread, over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._messages: deque[list[Frame]] = deque()  # those of one read

    def receive(self) -> list[Frame]:
        """Wait for a message and return its frames. Raises ``EOFError`` when the peer is gone, ``ValueError`` as
        :meth:`FrameReader.read`."""
        while not self._messages:
            if (messages := self._reader.read(self._connection)) is None:
                raise EOFError
            self._messages += messages
        return self._messages.popleft()


def _memory(nbytes: int) -> Frame:
    """Return memory for a frame. That of a large one is not touched before its bytes come: a size alone takes none."""
    return np.empty(nbytes, np.uint8).data if nbytes > READ_BYTES else bytearray(nbytes)


def _extents(view: memoryview, start: int) -> tuple[list[tuple[int, int]], int]:
    """Return where each frame of the message that begins at ``start`` begins and ends, and where the message ends,
    which may be beyond the view; no frames if its sizes are not there yet. Raises ``ValueError``."""
    sizes_at = start + _COUNT.size
    if sizes_at > len(view):
        return [], 0
    (count,) = _COUNT.unpack_from(view, start)
    if not 0 < count <= MAX_FRAMES:
        _refuse_size(count, 0)
    end = sizes_at + count * _SIZE_BYTES
    if end > len(view):
        return [], 0
    extents: list[tuple[int, int]] = []
    frames_at = end
    for size in struct.unpack_from(f"<{count}Q", view, sizes_at):
        extents.append((end, end + size))
        end += size
    if end - frames_at > MAX_BYTES:
        _refuse_size(count, end - frames_at)
    return extents, end


def _refuse_size(count: int, num_bytes: int) -> NoReturn:
    if not 0 < count <= MAX_FRAMES:
        raise ValueError(f"a message of {count} frames; it has 1 to {MAX_FRAMES}")
    raise ValueError(f"a message of {num_bytes} bytes; it has at most {MAX_BYTES}")
