"""A channel to a process of this host: its bidirectional and unary calls are local streams, all others use gRPC."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from tokenloom.request.errors import Internal, TokenloomError
from tokenloom.request.wire_errors import status_of

from .socket_end import HEADER, OK_STATUS, Kind, SocketEnd, decode_status, encode_frame, is_stopped, status

log = logging.getLogger(__name__)

_CANCELLED = status(grpc.StatusCode.CANCELLED, "the caller cancelled the call")
SILENT = "the peer was silent for too long"
_SILENT = status(grpc.StatusCode.UNAVAILABLE, SILENT)
_LOST = status(grpc.StatusCode.UNAVAILABLE, "the connection to the peer was lost")
_OK = status(grpc.StatusCode.OK, "")


class LocalCall(SocketEnd):
    """One call with one writer and one reader: what the mesh uses of a bidirectional ``grpc.aio`` call. The reader gets
    all messages received before it gets the status: ``read`` returns ``grpc.aio.EOF`` after the last, or raises
    ``AioRpcError`` when the call failed and ``CancelledError`` when it was cancelled here."""

    def __init__(
        self,
        opening: bytes,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        max_message_bytes: int,
        on_end: Callable[["LocalCall"], object],
    ) -> None:
        """``opening``: an OPEN frame, and the frames that follow it at once. ``on_end``: called once, at the end."""
        super().__init__(max_message_bytes, serialize, deserialize, opening)
        self._takes_messages = True
        self._status: grpc.aio.AioRpcError | None = None
        self._callbacks: list[Callable[[Any], object]] = [on_end]

    async def done_writing(self) -> None:
        """Half-close the call: the server learns that no message follows. Idempotent."""
        if not self.is_finished and not self._is_half_closed:
            self._is_half_closed = True
            await self._can_write.wait()
            if self.transport is not None and not self.is_finished:
                self.transport.write(encode_frame(Kind.HALF_CLOSE))

    def cancel(self) -> bool:
        """End the call; the server cancels its handler. Return whether the call was live."""
        if self._status is not None:
            return False
        self._end(_CANCELLED)
        return True

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def on_lost(self) -> None:
        # Both are UNAVAILABLE, but with different texts: slotted_stream.was_silent() reads them, because an engine's
        # silence, unlike its death, is never held against the request that ran there.
        if self._status is None:
            self._end(_SILENT if self.was_silent else _LOST)

    def _on_frame(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STATUS:
            self._end(_OK if payload == OK_STATUS else decode_status(payload))
        elif kind is not Kind.MESSAGE:  # a message after the end is late
            self._on_broken(Internal(f"the server sent a {kind.name} frame"))

    def _on_broken(self, error: TokenloomError) -> None:
        self._end(status(status_of(error), error.message))

    def _refuse(self, error: TokenloomError) -> NoReturn:
        self._on_broken(error)
        self._raise_end()
        # The server's OK is here already: a unary response that cannot be decoded comes in one write with it.
        raise status(status_of(error), error.message)

    def _damaged(self) -> TokenloomError:
        return Internal("a message could not be decoded")

    def _end(self, ended: grpc.aio.AioRpcError) -> None:
        """Set the status; only the first one counts."""
        if self._status is not None:
            return
        self._status = ended  # first: the reader that the next line wakes must find why the call ended
        self.end_messages(drop=ended is _CANCELLED)
        self.disconnect()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def _raise_end(self) -> None:
        if (ended := self._status) is _CANCELLED:
            raise asyncio.CancelledError(ended.details())
        if ended is not None and ended is not _OK:
            # A new exception each time: one that the call kept would hold on to the frames that it passed.
            raise status(ended.code(), ended.details() or "", ended.trailing_metadata())

    def _after_last(self) -> Any:
        self._raise_end()
        return grpc.aio.EOF


# grpc.aio wakes a polling thread for each event and, through a socket pair, the event loop. Without that, a message and
# its answer every 20 ms take 368 instead of 1,034 µs, and 677 instead of 1,600 µs of CPU in both processes.
class LocalChannel:
    """Behaves as the gRPC channel that it wraps, and closes that channel with itself."""

    def __init__(self, channel: grpc.aio.Channel, path: str, max_message_bytes: int) -> None:
        """``path``: where the peer serves local streams, if it does; each call checks again."""
        self._grpc = channel
        self._path = path
        self._max_message_bytes = max_message_bytes
        self._calls: dict[LocalCall, None] = {}  # in the order of their start; each leaves when it ends
        self._opening: dict[asyncio.Task[Any], None] = {}  # of the calls that get their sockets
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grpc, name)  # streams in one direction, and the state

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Any:
        through_grpc = self._grpc.stream_stream(method, request_serializer, response_deserializer, **options)
        opening = encode_frame(Kind.OPEN, method.encode())

        def begin(*args: Any, **kwargs: Any) -> Any:
            # Local frames have no place for deadlines and metadata. Traced calls carry metadata, so they show gRPC's
            # times.
            call = None if args or kwargs else self.open_call(opening, request_serializer, response_deserializer)
            return call or through_grpc(*args, **kwargs)

        return begin

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Any:
        through_grpc = self._grpc.unary_unary(method, request_serializer, response_deserializer, **options)
        serialize, opening = request_serializer or bytes, encode_frame(Kind.OPEN, method.encode())

        async def respond(request: Any, *, metadata: Any = None, **kwargs: Any) -> Any:
            if metadata or kwargs:
                return await through_grpc(request, metadata=metadata, **kwargs)
            payload: bytes = serialize(request)
            if len(payload) > self._max_message_bytes:
                text = f"a message of {len(payload)} bytes exceeds the limit"
                raise status(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            # The request follows the OPEN frame at once: the caller waits for the answer only, and not for room in a
            # socket that nothing has used yet.
            frames = opening + HEADER.pack(len(payload), Kind.MESSAGE) + payload
            if (call := self.open_call(frames, serialize, response_deserializer)) is None:
                return await through_grpc(request)
            try:
                if (response := await call.read()) is grpc.aio.EOF:
                    raise status(grpc.StatusCode.INTERNAL, "the call ended without a response")
                return response
            finally:
                call.cancel()

        return respond

    def open_call(self, frames: bytes, serialize: Any, deserialize: Any) -> LocalCall | None:
        """Begin a call with its first frames; return None when the peer serves no local streams now, or its process is
        stopped: the system accepts the connection for it, but gRPC notices at once that nothing answers."""
        # Looked up for every call, not once for the channel: a peer of an older release, or one that is restarting, may
        # have no such socket now and have one for the next call.
        if self._is_closed or (connected := connect(self._path)) is None:
            return None
        call = LocalCall(frames, serialize or bytes, deserialize or bytes, self._max_message_bytes, self._calls.pop)
        self._calls[call] = None
        inode = os.fstat(connected.fileno()).st_ino

        def attached(opening: "asyncio.Task[Any]") -> None:
            del self._opening[opening]
            if not opening.cancelled() and (error := opening.exception()) is not None:
                log.debug("a local stream could not be opened: %r", error)  # the peer is gone already
            if call.transport is None:
                # uvloop closes the descriptor, not the socket, if it fails after it took it: the number may be another
                # socket's by now, whose connection must not be closed with it.
                if _inode(connected) == inode:
                    connected.close()
                else:
                    connected.detach()
                call.on_lost()

        loop = asyncio.get_running_loop()
        opening = loop.create_task(loop.create_unix_connection(lambda: call, sock=connected))
        self._opening[opening] = None
        opening.add_done_callback(attached)
        return call

    async def close(self, grace: float | None = None) -> None:
        """Cancel its calls, those of gRPC after ``grace`` seconds."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        # Before gRPC's channel: a task that still attaches a socket would otherwise outlive the channel that owns it.
        # It is not cancelled: the socket is connected, so the task ends in the next turns of the event loop.
        if self._opening:
            await asyncio.wait(self._opening)
        await self._grpc.close(grace)

    async def __aenter__(self) -> "LocalChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _inode(connected: socket.socket) -> int | None:
    """Return which socket the descriptor names now; None: it is closed."""
    try:
        return os.fstat(connected.fileno()).st_ino
    except OSError:
        return None


def connect(path: str) -> socket.socket | None:
    """Return a connected socket without waiting; None when no process listens there, or a stopped one."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        # A unix socket connects at once or not at all, so no wait is needed. A full backlog counts as no listener, and
        # the call goes through gRPC instead of blocking the event loop.
        connected.setblocking(False)
        connected.connect(path)
        if not is_stopped(connected):
            return connected
    except OSError:  # also BlockingIOError: the queue of connections is full
        pass
    connected.close()
    return None
