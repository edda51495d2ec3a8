"""Encodes messages with msgpack, sends and receives them over a stream socket between two processes of an engine, and
decodes them. The receiver names the type that it expects, so only plain data can arrive.

A message is the number of its frames (32 bits), the size of each (64 bits), and then the frames, with little-endian
numbers. Both ends write and read the socket themselves: a library that does it in threads of its own adds two threads
to the way of each message, and each takes longer to wake up than the message takes to be written. The system gathers
and scatters the bytes of a message in pieces.

The frames are the msgpack body, and one frame for each array that is too large for the body. In the body an array is
(dtype, shape, bytes), (dtype, shape, number of its frame from 1), or, if sender and receiver share memory with enough
room, (dtype, shape, region). An array must not change after it was encoded, because it may be sent and received without
a copy.
"""

import errno
import inspect
import math
import socket
import struct
import threading
import time
import typing
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import Any, Final, Generic, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .array_arena import ArenaReader, Loan, Region

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
Frame = Buffer
Array = npt.NDArray[Any]

MAX_INLINE_BYTES = 256
"""Limit of an array in the body: copying so few bytes costs less than a frame (as in vLLM)."""
_MAX_DIMENSIONS = 8
_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQefd"}


class _ArrayFrames(threading.local):
    """Holds the arrays of the message that this thread is encoding."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.loan: Loan | None = None


_arrays = _ArrayFrames()


def _encode_array(value: object) -> tuple[str, tuple[int, ...], bytes | int | Region]:
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        raise NotImplementedError(f"a message cannot carry {type(value).__name__}")
    if value.nbytes <= MAX_INLINE_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if _arrays.loan is not None and (region := _arrays.loan.put(value)) is not None:
        return value.dtype.str, value.shape, region
    _arrays.frames.append(np.ascontiguousarray(value).data.cast("B"))
    return value.dtype.str, value.shape, len(_arrays.frames)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: object, loan: Loan | None = None, into: bytearray | None = None) -> list[Frame]:
    """Return the frames of ``message``: the body, and the memory of its arrays that ``loan`` did not take. If ``into``
    is given, its content is replaced and it becomes the body."""
    _arrays.loan = loan
    try:
        if into is None:
            return [_encoder.encode(message), *_arrays.frames]
        _encoder.encode_into(message, into)
        return [into, *_arrays.frames]
    finally:
        _arrays.loan = None
        if _arrays.frames:
            _arrays.frames = []


class Decoder(Generic[T]):
    """Decodes messages of one type (or union) in one thread. Raises ``msgspec.DecodeError`` for anything else.

    Arrays are read-only views of their frames and regions. An array's dtype must be the annotated one, its size must
    fit its shape, and each frame and region must be used exactly once.
    """

    def __init__(self, message_type: type[T] | UnionType, arena: ArenaReader | None = None) -> None:
        self._arena = arena
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=self._decode_array)
        self._frames: Sequence[Frame] = ()
        self._unused: set[int] = set()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Return the message in ``frames``."""
        if not frames:
            raise msgspec.DecodeError("the message has no frames")
        self._frames = frames
        self._unused = set(range(1, len(frames)))
        try:
            message = self._decoder.decode(frames[0])
        except UnicodeDecodeError as error:  # msgspec does not convert this error of a broken text
            raise msgspec.DecodeError(str(error)) from None
        finally:
            self._frames = ()
        # A frame that nothing names is a sender with another version of the message, or an attack on memory: both are
        # refused.
        if self._unused:
            raise msgspec.DecodeError(f"the message does not refer to {len(self._unused)} of its frames")
        return message

    def _decode_array(self, kind: type, value: object) -> Array:
        dtype, shape, body = msgspec.convert(value, tuple[str, tuple[int, ...], bytes | int | Region])
        if dtype not in _DTYPES or len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise ValueError(f"an array of dtype {dtype!r} and shape {shape} is not allowed")
        if (wanted := _annotated_dtype(kind)) is not None and _DTYPES[dtype] != wanted:
            raise ValueError(f"the array has dtype {dtype}, expected {wanted.str}")
        frame = body if isinstance(body, bytes) else self._take_frame(body)
        if len(frame) != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"{len(frame)} bytes do not fit an array of dtype {dtype} and shape {shape}")
        array: Array = np.frombuffer(frame, _DTYPES[dtype]).reshape(shape)
        # Several requests may read one frame, and a region of shared memory belongs to its sender.
        array.flags.writeable = False
        return array

    def _take_frame(self, index: int | Region) -> Frame:
        if isinstance(index, Region):
            if self._arena is None:
                raise ValueError("the array is in shared memory, but this receiver has none")
            return self._arena.open(index)
        if index not in self._unused:
            raise ValueError(f"frame {index} does not exist, or belongs to another array")
        self._unused.remove(index)
        return self._frames[index]


def _annotated_dtype(kind: type) -> "np.dtype[Any] | None":
    """Return ``x`` of ``npt.NDArray[x]``; None if any dtype is allowed."""
    scalars = [typing.get_args(argument) for argument in typing.get_args(kind)[1:]]
    if not scalars or not isinstance(scalars[0][0], type):
        return None
    return np.dtype(scalars[0][0])


def to_raw(value: object) -> msgspec.Raw:
    """Encode ``value`` without large arrays inside another message, for a receiver that knows the type later."""
    body, *arrays = encode(value)
    if arrays:
        raise TypeError(
            f"an argument or result of a call must not contain an array of more than {MAX_INLINE_BYTES} bytes"
        )
    return msgspec.Raw(body)


def from_raw(raw: msgspec.Raw) -> object:
    """Return the plain value (None, bool, number, str, bytes, list, dict) of ``raw``."""
    value: object = msgspec.msgpack.decode(raw)
    return value


def call_with_raw(function: Callable[..., object], arguments: Sequence[msgspec.Raw]) -> object:
    """Call ``function`` with its positional arguments decoded to the annotated types.

    Raises ``TypeError`` for a wrong number of arguments, ``msgspec.DecodeError`` for a wrong type.
    """
    bound = inspect.signature(function).bind(*arguments)
    hints = typing.get_type_hints(function)
    return function(
        *(msgspec.msgpack.decode(raw, type=hints.get(name, object)) for name, raw in bound.arguments.items())
    )


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

    @property
    def has_messages(self) -> bool:
        """Whether the next message is here already, so that the socket need not become readable."""
        return bool(self._messages)

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
