"""One end of a local stream's socket: frames out, messages in, and whether the peer is alive. The socket stands next to
the unix socket on which the same process serves gRPC.

A frame is its payload's length (four bytes, little-endian), its kind (one byte) and its payload. A change of this
format also changes :data:`SUFFIX`, so that processes of different versions use gRPC.
"""

import asyncio
import enum
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError

from tokenloom.request.errors import Internal, ResourceExhausted, TokenloomError

from .. import addresses

SUFFIX = ".calls"
TICK_SECONDS = 0.5
SILENT_TICKS = 5
"""A peer whose process is stopped is dead this many ticks after its last byte: after 2 to 2.5 s, as gRPC's pings."""
HUNG_TICKS = 20
"""Any other peer is dead this many ticks after its last byte: its event loop may only be busy, but not for 10 s."""

MAX_MESSAGES = 128
MAX_BYTES = 1 << 20
"""Beyond either limit of unread messages the socket is not read. What one read returned may still exceed them."""

_CREDENTIALS = struct.Struct("iII")  # process, user and group
_STOPPED = b"Tt"  # by a signal, and by a debugger


Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

HEADER = struct.Struct("<IB")
"""A payload's length in bytes, and the kind."""
JOINED_BYTES = 1 << 16
"""A longer payload is written beside its header and not behind it: a copy of the 16 MB of a text's ids takes 6 ms."""


class Kind(enum.IntEnum):
    """Says what a frame carries."""

    OPEN = 1
    """The first frame to the server: the method's full name, in UTF-8."""
    MESSAGE = 2
    """A serialized message, in either direction."""
    HALF_CLOSE = 3
    """To the server: no message follows. The payload is empty."""
    STATUS = 4
    """The last frame to the client: see :func:`encode_status`."""
    BEAT = 5
    """Sent in either direction after a tick without another frame: the sender is alive. The payload is empty."""


_KINDS = {kind.value: kind for kind in Kind}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_STATUS = msgspec.msgpack.Decoder(tuple[int, str, tuple[tuple[str, bytes], ...]])


def encode_frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return HEADER.pack(len(payload), kind) + payload


def encode_status(code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> bytes:
    """Return the payload of a STATUS frame. ``trailing``: metadata of the call's end."""
    pairs = [(key, value if isinstance(value, bytes) else value.encode()) for key, value in trailing]
    return msgspec.msgpack.encode((code.value[0], details, pairs))


def decode_status(payload: bytes) -> grpc.aio.AioRpcError:
    """Read the payload of a STATUS frame; the result holds code OK for a call that succeeded. Metadata are bytes under
    keys that end with ``-bin`` and text under others, as in gRPC.

    Raises ``Internal`` for a payload that is no status.
    """
    try:
        code, details, trailing = _STATUS.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Internal("the status of a local stream cannot be decoded") from None
    pairs = ((key, value if key.endswith("-bin") else value.decode(errors="replace")) for key, value in trailing)
    return status(_CODES.get(code, grpc.StatusCode.UNKNOWN), details, grpc.aio.Metadata(*pairs))


def status(code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    """Return how a call ended."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details=details)


_BEAT = encode_frame(Kind.BEAT)
OK_STATUS = encode_status(grpc.StatusCode.OK)
"""The payload at the end of nearly every call, which is neither encoded nor decoded again."""


def split_frames(
    rest: bytearray, data: bytes, max_payload_bytes: int
) -> tuple[list[tuple[Kind, bytes]], TokenloomError | None]:
    """Return the frames that ``data`` completes, however the stream of bytes is split, and why what follows them is no
    frame; split no more then. ``ResourceExhausted`` for a payload over the limit, as soon as its length is known,
    ``Internal`` for an unknown kind.

    ``rest``: what the last call left, empty at first; takes the beginning of a frame, bounded by the longest one.
    """
    # Most reads hold whole frames only. They are parsed in place, and a frame that was cut is copied into ``rest``.
    view: bytes | bytearray = data
    if rest:
        rest += data
        view = rest
    frames: list[tuple[Kind, bytes]] = []
    start, end = 0, len(view)
    error: TokenloomError | None = None
    while end - start >= HEADER.size:
        size, number = HEADER.unpack_from(view, start)
        # The length is checked before the payload has arrived: otherwise a peer could make this side hold 4 GB.
        if (kind := _KINDS.get(number)) is None:
            error = Internal(f"unknown frame kind {number}")
            break
        if size > max_payload_bytes:
            text = f"a message of {size} bytes exceeds the limit of {max_payload_bytes} bytes"
            error = ResourceExhausted(text, retry_after=None)
            break
        if (stop := start + HEADER.size + size) > end:
            break
        frames.append((kind, bytes(memoryview(view)[start + HEADER.size : stop])))
        start = stop
    if view is rest:
        del rest[:start]
    elif start < end:
        rest += data[start:]
    return frames, error


def path_beside(address: str) -> str | None:
    """Return where a process that serves gRPC at ``address`` serves local streams. None: nowhere, because the address
    is no unix socket or its path is too long for the suffix."""
    if not address.startswith("unix:"):
        return None
    path = addresses.parse(address).path + addresses.STREAMS_SUFFIX
    return path if len(path.encode()) <= addresses.MAX_UNIX_PATH else None


def is_stopped(connected: socket.socket) -> bool:
    """Return whether the peer's process is stopped (SIGSTOP, a debugger): it cannot answer, however long one waits.

    False for a process that runs, however busy, and for one that this process cannot see: of another PID namespace, or
    where ``/proc`` hides the processes of other users.
    """
    try:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, _, _ = _CREDENTIALS.unpack(credentials)
        with open(f"/proc/{process}/stat", "rb") as stat:
            # The second column is the command's name in parentheses and may itself hold spaces and parentheses, so the
            # state is the first word behind the last one.
            return stat.read().rpartition(b")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False


class SocketEnd(ABC, asyncio.Protocol):
    """Sends frames and keeps the messages received, for one reader. Made before its socket is connected.

    Attributes:
        is_finished: Nothing can be sent any more.
        was_silent: The connection was given up because the peer sent nothing.
        transport: None until it has a socket, which it then closes itself.
    """

    _error_after_end: type[BaseException] = asyncio.InvalidStateError
    """What is raised for a message that is written after the end."""

    def __init__(
        self,
        max_message_bytes: int,
        serialize: Callable[[Any], bytes] = bytes,
        deserialize: Callable[[bytes], Any] = bytes,
        opening: bytes = b"",
    ) -> None:
        """``max_message_bytes``: the largest payload, in either direction. ``opening``: frames that are sent as soon as
        there is a connection."""
        self._max_message_bytes = max_message_bytes
        self._serialize = serialize
        self._deserialize = deserialize
        self._opening = opening
        self.transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self.is_finished = self.was_silent = False
        self._takes_messages = self._has_all = self._has_sent = self._is_half_closed = self._is_broken = False
        self._is_reading = True
        self._silent_ticks = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._rest = bytearray()
        self._messages: deque[bytes] = deque()  # bounded by MAX_MESSAGES and MAX_BYTES
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

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

    @abstractmethod
    def _raise_end(self) -> None:
        """Raise why the call ended, while a message waited to be sent."""

    @abstractmethod
    def _after_last(self) -> Any:
        """Return what the reader gets after the last message, or raise it."""

    @abstractmethod
    def _damaged(self) -> TokenloomError:
        """Return what a message that cannot be decoded is refused with."""

    @abstractmethod
    def _refuse(self, error: TokenloomError) -> NoReturn:
        """Raise for a message that cannot be sent, or not be decoded."""

    async def write(self, message: Any) -> None:
        """Send a message; wait while the peer takes none. Raises for a message over the limit, and when the call has
        ended."""
        is_late = self.is_finished or self._is_half_closed
        if is_late:
            raise self._error_after_end("the call has ended, or was half-closed")
        payload = self._serialize(message)
        if len(payload) > self._max_message_bytes:
            text = f"a message of {len(payload)} bytes exceeds the limit"
            self._refuse(ResourceExhausted(text, retry_after=None))
        if not self._can_write.is_set():
            await self._can_write.wait()
        # The end may come while the writer waits for room in the socket. Raising the status here, as gRPC does, keeps
        # the caller from taking the message for one that was sent.
        if self.is_finished:
            self._raise_end()
        assert self.transport is not None
        self._has_sent = True
        if len(payload) <= JOINED_BYTES:
            self.transport.write(HEADER.pack(len(payload), Kind.MESSAGE) + payload)
        else:
            self.transport.writelines((HEADER.pack(len(payload), Kind.MESSAGE), payload))

    def disconnect(self) -> None:
        """Close the socket without sending what is still buffered."""
        self.is_finished = True
        self._can_write.set()
        if self.transport is not None:
            self.transport.abort()

    async def read(self) -> Any:
        """Return the next message, without a turn of the event loop if it is here. Cancelling loses none."""
        while not self._messages:
            if self._has_all:
                return self._after_last()
            assert self._waiter is None, "a stream has one reader at a time"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        payload = self._messages.popleft()
        self._num_bytes -= len(payload)
        if not self._is_reading and len(self._messages) <= MAX_MESSAGES // 2 and self._num_bytes <= MAX_BYTES // 2:
            self._read_on()
        try:
            return self._deserialize(payload)
        except DecodeError:
            self._refuse(self._damaged())

    def end_messages(self, *, drop: bool = False) -> None:
        """No message follows; the reader still gets those received before, unless they are to be dropped."""
        if drop:
            self._messages.clear()
            self._num_bytes = 0
        self._takes_messages = False
        self._has_all = True
        if not self._is_reading:
            self._read_on()  # otherwise the end of the connection would go unnoticed
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_on(self) -> None:
        self._is_reading = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)
        # The call may have been cancelled between connect() and this callback; a transport that nothing closes would
        # leak, and so does uvloop's socket if it is closed within this callback.
        if self.is_finished:
            asyncio.get_running_loop().call_soon(transport.abort)
            return
        # The ticker starts first, so that a peer that accepts a connection and never answers is found like any silent
        # one.
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._can_write.set()
        if self._opening:
            self._has_sent = True
            self.transport.write(self._opening)
            self._opening = b""

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        if self._is_broken:
            return
        frames, error = split_frames(self._rest, data, self._max_message_bytes)
        try:
            for kind, payload in frames:
                if kind is Kind.MESSAGE and self._takes_messages:
                    self._messages.append(payload)
                    self._num_bytes += len(payload)
                elif kind is not Kind.BEAT:
                    self._on_frame(kind, payload)
            if error is not None:
                raise error
        except TokenloomError as raised:
            self._is_broken = True
            # Only this connection ends: one connection is one call, so broken bytes cannot shift the frames of other
            # calls.
            self._on_broken(raised)
        if not self._messages:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif (len(self._messages) >= MAX_MESSAGES or self._num_bytes >= MAX_BYTES) and self._is_reading:
            assert self.transport is not None
            if not self.transport.is_closing():
                self._is_reading = False  # the peer's writes wait until reading resumes
                self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_finished = True
        self._can_write.set()
        if self._ticker is not None:
            self._ticker.cancel()
        self.on_lost()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _tick(self) -> None:
        assert self.transport is not None
        # While reading is paused the peer's beats stay in the kernel, so its silence is this side's doing and does not
        # count. Ticks are counted, not seconds: a pause of this process, however long, is one tick of silence.
        self._silent_ticks = self._silent_ticks + 1 if self._is_reading else 0
        # A beat shows that the event loop runs, not that the process lives: a gateway whose loop was busy for 2 s once
        # lost all streams. So the system is asked about the process, and a peer that runs but is busy gets 10 s.
        if self._silent_ticks >= HUNG_TICKS or (self._silent_ticks >= SILENT_TICKS and self._is_peer_stopped()):
            self.was_silent = True
            self.disconnect()
            return
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        # A beat is sent only in a tick without another frame, so that a busy stream pays nothing for it. It is not
        # queued behind a full buffer either: beats for a peer that does not read would only pile up.
        if not self._has_sent and not self.is_finished and self._can_write.is_set():
            self.transport.write(_BEAT)
        self._has_sent = False

    def _is_peer_stopped(self) -> bool:
        assert self.transport is not None
        return is_stopped(self.transport.get_extra_info("socket"))
