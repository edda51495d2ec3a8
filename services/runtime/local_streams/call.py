"""The caller's side of a local stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tokenloom.request.errors import TokenloomError
from tokenloom.request.wire_errors import status_of

from .frames import Kind, decode_status, status
from .socket_end import IsPeerStopped, SocketEnd, is_peer_stopped

Request = TypeVar("Request")
Response = TypeVar("Response")

_CANCELLED = status(grpc.StatusCode.CANCELLED, "the caller cancelled the call")
SILENT = "the peer was silent for too long"
_SILENT = status(grpc.StatusCode.UNAVAILABLE, SILENT)
_LOST = status(grpc.StatusCode.UNAVAILABLE, "the connection to the peer was lost")


class LocalCall(SocketEnd, Generic[Request, Response]):
    """One call with one writer and one reader: what the mesh uses of a bidirectional ``grpc.aio`` call. The reader gets
    all messages received before it gets the status."""

    def __init__(
        self,
        method: str,
        serialize: Callable[[Request], bytes],
        deserialize: Callable[[bytes], Response],
        max_message_bytes: int,
        is_peer_stopped: IsPeerStopped = is_peer_stopped,
    ) -> None:
        super().__init__(max_message_bytes, is_peer_stopped)
        self._takes_messages = True
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize
        self._half_closed = False
        self._status: grpc.aio.AioRpcError | None = None
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[Any], object]] = []

    async def write(self, request: Request) -> None:
        """Send a message; wait while the peer takes none. Raises ``InvalidStateError`` when the call has ended."""
        if self._status is not None or self._half_closed:
            raise asyncio.InvalidStateError("the call has ended, or was half-closed")
        payload = self._serialize(request)
        if len(payload) > self._max_message_bytes:
            self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {len(payload)} bytes exceeds the limit")
        elif not self.is_writable:
            await self.writable()
        # The end may come while the writer waits for room in the socket. Raising the status here, as gRPC does, keeps
        # the caller from taking the message for one that was sent.
        if self.is_finished:
            self._raise_error()
        self.send(Kind.MESSAGE, payload)

    async def done_writing(self) -> None:
        """Half-close the call: the server learns that no message follows. Idempotent."""
        if self._status is None and not self._half_closed:
            self._half_closed = True
            await self.writable()
            self.send(Kind.HALF_CLOSE)

    async def read(self) -> Any:
        """Return the next message, ``grpc.aio.EOF`` after the last. Raises ``AioRpcError`` when the call failed and
        ``CancelledError`` when it was cancelled here."""
        try:
            return self._deserialize(await self.next_message())
        except StopAsyncIteration:
            self._raise_error()
            return grpc.aio.EOF
        except DecodeError:
            self._fail(grpc.StatusCode.INTERNAL, "a message could not be decoded")
            self._raise_error()

    async def __aiter__(self) -> AsyncIterator[Response]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        """End the call; the server cancels its handler. Return whether the call was live."""
        # The status is set before the messages are dropped: the reader that this wakes must find why the call ended.
        was_live = self._status is None
        self._end(_CANCELLED)
        if was_live:
            self.end_messages(drop=True)
        return was_live

    def cancelled(self) -> bool:
        return self._status is _CANCELLED

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        return (await self._wait_ended()).code()

    async def details(self) -> str:
        return (await self._wait_ended()).details() or ""

    def _on_connected(self) -> None:
        self.send(Kind.OPEN, self._method.encode())

    def _on_frame(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STATUS:
            self._end(decode_status(payload))
        elif kind is not Kind.MESSAGE:  # a message after the end is late
            self._fail(grpc.StatusCode.INTERNAL, f"the server sent a {kind.name} frame")

    def _on_broken(self, error: TokenloomError) -> None:
        self._fail(status_of(error), error.message)

    def on_lost(self) -> None:
        # Both are UNAVAILABLE, but with different texts: silence.was_silent() reads them, because an engine's silence,
        # unlike its death, is never held against the request that ran there.
        self._end(_SILENT if self.was_silent else _LOST)

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        self._end(status(code, details))

    def _end(self, ended: grpc.aio.AioRpcError) -> None:
        """Set the status; only the first one counts."""
        if self._status is not None:
            return
        self._status = ended
        self.end_messages()
        self._ended.set()
        self.disconnect()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    async def _wait_ended(self) -> grpc.aio.AioRpcError:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    def _raise_error(self) -> None:
        if (ended := self._status) is _CANCELLED:
            raise asyncio.CancelledError(ended.details())
        if ended is not None and ended.code() is not grpc.StatusCode.OK:
            # A new exception each time: one that the call kept would hold on to the frames that it passed.
            raise status(ended.code(), ended.details() or "", ended.trailing_metadata())
