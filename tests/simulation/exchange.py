"""Unary calls and unary streams over pipes, with the statuses of gRPC. Messages keep their boundaries."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from tokenloom.services.runtime.local_streams.socket_end import Metadata, decode_status, encode_status, status
from tokenloom.services.runtime.tasks import Tasks

from .network import Find
from .pipe import Pipe

_MESSAGE, _STATUS = b"M", b"S"
_LOST = status(grpc.StatusCode.UNAVAILABLE, "the connection to the peer was lost")
_LATE = status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed")
_CANCELLED = status(grpc.StatusCode.CANCELLED, "the caller cancelled the call")


class Exchange(asyncio.Protocol):
    """The caller's end of a call with one request."""

    def __init__(self, method: str, request: bytes, deserialize: Callable[[bytes], Any]) -> None:
        self._opening = method.encode() + b"\0" + request
        self._deserialize = deserialize
        self._messages: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._pipe: Pipe | None = None
        self._status: grpc.aio.AioRpcError | None = None

    def set_deadline(self, seconds: float) -> None:
        """Let the call end with DEADLINE_EXCEEDED after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, self._end, _LATE)

    async def unary(self) -> Any:
        """Return the only response. Raises ``AioRpcError``."""
        try:
            while self._status is None:
                await self._wait()
        finally:
            self._end(_CANCELLED)
        self._raise_error()
        return self._messages.popleft()

    # What callers use of a grpc.aio.UnaryStreamCall

    async def read(self) -> Any:
        while not self._messages and self._status is None:
            await self._wait()
        if self._messages:
            return self._messages.popleft()
        assert self._status is not None
        if self._status is _CANCELLED:
            raise asyncio.CancelledError
        self._raise_error()
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        was_live = self._status is None
        self._end(_CANCELLED)
        return was_live

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Pipe)
        self._pipe = transport
        transport.write(self._opening)

    def data_received(self, data: bytes) -> None:
        if data[:1] == _MESSAGE:
            self._messages.append(self._deserialize(data[1:]))
            self._changed.set()
        else:
            self._end(decode_status(data[1:]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(_LOST)

    def refused(self) -> None:
        """End the call because no process listens at the address."""
        self._end(_LOST)

    def _raise_error(self) -> None:
        ended = self._status
        if ended is not None and ended.code() is not grpc.StatusCode.OK:
            # A new one each time: an exception keeps the frames that it passed.
            raise status(ended.code(), ended.details() or "", ended.trailing_metadata())

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _end(self, ended: grpc.aio.AioRpcError) -> None:
        if self._status is None:
            self._status = ended
            self._changed.set()
            if self._pipe is not None:
                self._pipe.abort()


class Served(asyncio.Protocol):
    """The server's end of a call with one request."""

    def __init__(self, find: Find, tasks: Tasks) -> None:
        self._find = find
        self._tasks = tasks
        self._pipe: Pipe | None = None
        self._handler: asyncio.Task[Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Pipe)
        self._pipe = transport

    def data_received(self, data: bytes) -> None:
        name, _, request = data.partition(b"\0")
        self._handler = self._tasks.spawn(self._run(name.decode(), request), name=name.decode())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._handler is not None:
            self._handler.cancel()

    async def _run(self, method: str, request: bytes) -> None:
        handler = self._find(method)
        if handler is None:
            self._send(_STATUS, encode_status(grpc.StatusCode.UNIMPLEMENTED, method))
            return
        context = _Context(self._send, handler.response_serializer)
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        behaviour = behaviour or handler.stream_unary
        try:
            response = await behaviour(request if handler.stream_unary is None else unpacked(request), context)
        except grpc.aio.AbortError:
            return  # it has sent its status
        if handler.unary_unary or handler.stream_unary:
            await context.write(response)
        self._send(_STATUS, encode_status(grpc.StatusCode.OK))

    def _send(self, kind: bytes, payload: bytes) -> None:
        assert self._pipe is not None
        self._pipe.write(kind + payload)


class _Context:
    """What handlers use of a ``grpc.aio.ServicerContext``."""

    def __init__(self, send: Callable[[bytes, bytes], None], serialize: Callable[[Any], bytes] | None) -> None:
        self._send = send
        self._serialize = serialize or bytes

    async def write(self, message: Any) -> None:
        self._send(_MESSAGE, self._serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self._send(_STATUS, encode_status(code, details, trailing_metadata))
        raise grpc.aio.AbortError("the handler ended the call")

    def invocation_metadata(self) -> Metadata:
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        pass

    def set_details(self, details: str) -> None:
        pass


def packed(messages: Sequence[bytes]) -> bytes:
    """Return several requests as one."""
    return b"".join(len(each).to_bytes(4, "little") + each for each in messages)


async def unpacked(request: bytes) -> AsyncIterator[bytes]:
    """Yield the requests that were packed."""
    while request:
        end = 4 + int.from_bytes(request[:4], "little")
        yield request[4:end]
        request = request[end:]
