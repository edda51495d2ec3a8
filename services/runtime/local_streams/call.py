"""A local stream as its caller sees it: what ``grpc.aio`` gives for a bidirectional call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tokenloom.request.errors import TokenloomError

from .connection import Connection
from .frames import Kind, Status, decode_status
from .inbox import Inbox

Request = TypeVar("Request")
Response = TypeVar("Response")

_CANCELLED = Status.of(grpc.StatusCode.CANCELLED, "the call was cancelled here")
_LOST = Status.of(grpc.StatusCode.UNAVAILABLE, "the connection to the peer was lost")


class LocalCall(grpc.aio.StreamStreamCall[Request, Response]):
    """Of one writer and one reader. Messages that came before the end are read before it is told."""

    def __init__(
        self,
        method: str,
        serialize: Callable[[Request], bytes],
        deserialize: Callable[[bytes], Response],
        max_message_bytes: int,
    ) -> None:
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize
        self._max_message_bytes = max_message_bytes
        self.connection = Connection(self, max_message_bytes)
        """To be connected by who makes the call."""
        self._inbox = Inbox(self.connection)
        self._half_closed = False
        self._status: Status | None = None
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[Any], None]] = []

    # As of grpc.aio.StreamStreamCall

    async def write(self, request: Request) -> None:
        """Sends a message; waits while the peer takes none. ``InvalidStateError`` when the call is over."""
        if self._status is not None:
            raise asyncio.InvalidStateError("the call is over")
        if self._half_closed:
            raise asyncio.InvalidStateError("after done_writing nothing is written")
        payload = self._serialize(request)
        if len(payload) > self._max_message_bytes:
            self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {len(payload)} bytes is over the limit")
        elif not self.connection.is_writable:
            await self.connection.writable()
        self._raise_error()
        self.connection.send(Kind.MESSAGE, payload)

    async def done_writing(self) -> None:
        """The peer is told that no message follows. Idempotent."""
        if self._status is None and not self._half_closed:
            self._half_closed = True
            await self.connection.writable()
            self.connection.send(Kind.HALF_CLOSE)

    async def read(self) -> Any:
        """The next message, ``grpc.aio.EOF`` after the last. Raises ``AioRpcError`` when the call failed, and
        ``CancelledError`` when it was cancelled here."""
        payload = await self._inbox.get()
        if payload is None:
            self._raise_error()
            return grpc.aio.EOF
        try:
            return self._deserialize(payload)
        except DecodeError:
            self._fail(grpc.StatusCode.INTERNAL, "a message cannot be read")
            self._raise_error()

    async def __aiter__(self) -> AsyncIterator[Response]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        """Ends the call; the handler is cancelled. Returns whether it was not over yet."""
        was_live = self._status is None
        self._end(_CANCELLED)
        if was_live:
            self._inbox.drop()
        return was_live

    def cancelled(self) -> bool:
        return self._status is _CANCELLED

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def time_remaining(self) -> float | None:
        return None  # calls with a deadline go over gRPC

    async def code(self) -> grpc.StatusCode:
        return (await self._wait_ended()).status_code

    async def details(self) -> str:
        return (await self._wait_ended()).details

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return (await self._wait_ended()).metadata

    async def wait_for_connection(self) -> None:
        await self.connection.writable()
        self._raise_error()

    # As of connection.Receiver

    def on_connected(self) -> None:
        self.connection.send(Kind.OPEN, self._method.encode())

    def on_frame(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.MESSAGE:
            self._inbox.put(payload)
        elif kind is Kind.STATUS:
            self._end(decode_status(payload))
        else:
            self._fail(grpc.StatusCode.INTERNAL, f"{kind.name} came from a server")

    def on_broken(self, error: TokenloomError) -> None:
        self._fail(error.code, error.message)

    def on_lost(self) -> None:
        self._end(_LOST)

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        self._end(Status.of(code, details))

    def _end(self, status: Status) -> None:
        """Once: the first status counts."""
        if self._status is not None:
            return
        self._status = status
        self._inbox.end()
        self._ended.set()
        self.connection.abort()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    async def _wait_ended(self) -> Status:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    def _raise_error(self) -> None:
        status = self._status
        if status is None or status.status_code is grpc.StatusCode.OK:
            return
        if status is _CANCELLED:
            raise asyncio.CancelledError(status.details)
        raise grpc.aio.AioRpcError(status.status_code, grpc.aio.Metadata(), status.metadata, details=status.details)
