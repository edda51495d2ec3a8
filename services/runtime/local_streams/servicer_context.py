"""What a handler gets for a local stream: its requests and its context."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from tokenloom.request.errors import ResourceExhausted

from .connection import Connection
from .frames import Kind, Metadata, Status, encode_status
from .inbox import Inbox


class Requests:
    """The caller's messages, until it half-closes."""

    def __init__(self, inbox: Inbox, deserialize: Callable[[bytes], Any]) -> None:
        self._inbox = inbox
        self._deserialize = deserialize

    def __aiter__(self) -> "Requests":
        return self

    async def __anext__(self) -> Any:
        if (payload := await self._inbox.get()) is None:
            raise StopAsyncIteration
        return self._deserialize(payload)


class LocalContext:
    """What handlers use of ``grpc.aio.ServicerContext``."""

    def __init__(self, connection: Connection, serialize: Callable[[Any], bytes], max_message_bytes: int) -> None:
        self._connection = connection
        self._serialize = serialize
        self._max_message_bytes = max_message_bytes

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the caller takes none.

        Raises ``ResourceExhausted`` for one that is too long, ``CancelledError`` when the call is over: its handler is
        being cancelled.
        """
        payload = self._serialize(message)
        if len(payload) > self._max_message_bytes:
            raise ResourceExhausted(f"a message of {len(payload)} bytes is over the limit", retry_after=None)
        if not self._connection.is_writable:
            await self._connection.writable()
        if self._connection.is_finished:
            raise asyncio.CancelledError("the call is over")
        self._connection.send(Kind.MESSAGE, payload)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """Ends the call with a status. Raises ``AbortError``, always, which the handler lets pass."""
        end(self._connection, code, details, trailing_metadata)
        raise grpc.aio.AbortError("the handler ended the call")

    def invocation_metadata(self) -> Metadata:
        """None: calls with metadata go over gRPC."""
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        """Generated servicers say so before they raise ``NotImplementedError``, which says the same."""

    def set_details(self, details: str) -> None:
        """As :meth:`set_code`."""


def end(connection: Connection, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
    """Tells the caller how the call ended; the first to do so counts."""
    connection.finish(Kind.STATUS, encode_status(Status.of(code, details, trailing_metadata)))
