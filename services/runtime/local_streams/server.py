"""Serves local streams with the handlers that gRPC serves too."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

from tokenloom.process import unix_socket
from tokenloom.request.errors import Internal, InvalidArgument, TokenloomError
from tokenloom.request.wire_errors import status_of

from ..tasks import Tasks
from .socket_end import HEADER, JOINED_BYTES, OK_STATUS, Kind, Metadata, SocketEnd, encode_frame, encode_status

log = logging.getLogger(__name__)

_BACKLOG = 128
_LEAVE_SECONDS = 0.25
"""Time for callers to read the last status before their connection is cut."""
_OK = encode_frame(Kind.STATUS, OK_STATUS)


@dataclass(slots=True)
class CallDetails:
    """What ``grpc.HandlerCallDetails`` says about a call."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


FindHandler: TypeAlias = "Callable[[Any], grpc.RpcMethodHandler[Any, Any] | None]"
"""Returns the handler of a call, given its :class:`CallDetails`. It decodes the requests itself and writes its
responses to its context, as the handlers of :class:`tokenloom.services.runtime.host.servicer_edge.Edge` do."""


class ServerCall(SocketEnd):
    """Carries one call over one connection to the server. The handler of a stream gets it as the requests, and every
    handler as the methods of ``grpc.aio.ServicerContext`` that the handlers of the mesh use. ``write`` raises
    ``ResourceExhausted`` for a message over the limit, ``CancelledError`` when the call has ended: its handler is being
    cancelled."""

    _error_after_end = asyncio.CancelledError

    def __init__(
        self, find: FindHandler, tasks: Tasks, max_message_bytes: int, on_gone: Callable[["ServerCall"], object]
    ) -> None:
        """``tasks`` owns the handler's task. ``on_gone`` is called when the connection has been closed."""
        super().__init__(max_message_bytes)
        self._find = find
        self._tasks = tasks
        self._on_gone = on_gone
        self._unary: Any = None  # the handler that waits for its request
        self.gone = asyncio.Event()
        self.handler: asyncio.Task[Any] | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether it is a unary call of which the request is not complete yet."""
        return self._unary is not None and self.handler is None and not self.is_finished

    def decode_with(self, decode: Callable[[bytes], Any]) -> "ServerCall":
        """Decode the requests of a stream, and return them."""
        self._deserialize = decode
        return self

    def __aiter__(self) -> "ServerCall":
        return self

    __anext__ = SocketEnd.read

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status. Always raises ``AbortError``, which the handler lets pass."""
        self._finish(encode_frame(Kind.STATUS, encode_status(code, details, trailing_metadata)))
        raise grpc.aio.AbortError("the handler ended the call")

    def invocation_metadata(self) -> Metadata:
        """Return no metadata: calls with metadata use gRPC."""
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        """Do nothing: generated servicers call this before they raise ``NotImplementedError``, which says the same."""

    def set_details(self, details: str) -> None:
        """Do nothing, as :meth:`set_code`."""

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, unless it has one, and cancel its handler."""
        self._finish(encode_frame(Kind.STATUS, encode_status(code, details)))
        if self.handler is not None:
            self.handler.cancel()

    def on_lost(self) -> None:
        if self.handler is not None:
            self.handler.cancel()
        self.gone.set()
        self._on_gone(self)

    def _on_frame(self, kind: Kind, payload: bytes) -> None:
        if self.is_finished:
            return  # the caller sent it before it learned of the end
        behaviour: Any = None
        if kind is Kind.OPEN and self.handler is None and self._unary is None:
            method = payload.decode(errors="replace")
            handler = self._find(CallDetails(method))
            if handler is None or not (handler.stream_stream or handler.unary_unary):
                self.end(grpc.StatusCode.UNIMPLEMENTED, f"unknown stream {method}")
                return
            self._serialize = handler.response_serializer or bytes
            self._unary, serve = handler.unary_unary, cast(Any, handler.stream_stream)
            if serve is not None:
                self._takes_messages = True
                behaviour = serve(self, self)
        elif kind is Kind.MESSAGE and self._unary is not None and self.handler is None:
            behaviour = self._unary(payload, self)
        elif kind is Kind.HALF_CLOSE and self.handler is not None:
            self.end_messages()
        elif kind is Kind.HALF_CLOSE and self._unary is not None:
            self.end(grpc.StatusCode.INTERNAL, "the call ended without a request")
        elif kind is not Kind.MESSAGE or self.handler is None:
            raise Internal(f"a {kind.name} frame came out of turn")
        if behaviour is not None:
            self.handler = self._tasks.spawn(behaviour, name="handler of a local stream")
            # The status follows from the task's end, not from the handler's last line: it is also sent when the handler
            # was cancelled or has raised past its edge.
            self.handler.add_done_callback(self._on_done)

    def _on_done(self, handler: "asyncio.Task[Any]") -> None:
        if handler.cancelled():
            self.end(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        elif handler.exception() is not None:  # an AbortError has sent its status
            self.end(grpc.StatusCode.INTERNAL, "internal error")
        elif self._unary is None:
            self._finish(_OK)
        else:
            try:
                payload = self._serialize(handler.result())
            except Exception:  # raised here, it would leave the caller without an end
                log.exception("the response of a local call cannot be serialized")
                self.end(grpc.StatusCode.INTERNAL, "internal error")
                return
            if len(payload) > self._max_message_bytes:
                self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {len(payload)} bytes exceeds the limit")
                return
            header = HEADER.pack(len(payload), Kind.MESSAGE)
            if len(payload) <= JOINED_BYTES:
                self._finish(header + payload + _OK)
            else:
                self._finish(header, payload, _OK)

    def _finish(self, *frames: bytes) -> None:
        """Send the last frames, unless they were sent, and drop what the caller sends. The socket stays open until the
        caller has read them and closes it: closing it here while the caller is writing would lose the status."""
        if self.transport is not None and not self.is_finished:
            self.transport.writelines(frames)
        self.is_finished = True
        self.end_messages(drop=True)

    def _on_broken(self, error: TokenloomError) -> None:
        self.end(status_of(error), error.message)

    def _refuse(self, error: TokenloomError) -> NoReturn:
        raise error

    def _damaged(self) -> TokenloomError:
        return damaged_request()

    def _raise_end(self) -> NoReturn:
        raise asyncio.CancelledError("the call has ended")

    def _after_last(self) -> NoReturn:
        raise StopAsyncIteration


class LocalServer:
    """Accepts calls from :meth:`open` to :meth:`close`."""

    def __init__(self, path: str, find: FindHandler, max_message_bytes: int) -> None:
        """``max_message_bytes``: the largest message, in either direction."""
        self._path = path
        self._find = find
        self._max_message_bytes = max_message_bytes
        self._calls: dict[ServerCall, None] = {}  # one for each connection, in the order of their start
        self._tasks = Tasks(_log_failure)
        self._server: asyncio.AbstractServer | None = None
        self._is_closing = False
        self._identity = (0, 0)  # of the socket's file

    async def open(self) -> None:
        """Bind the socket, replacing one that a killed process left. Raises ``OSError`` when that fails."""
        listener = unix_socket.listen(self._path, _BACKLOG)
        self._identity = unix_socket.identity(self._path)
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listener)

    async def close(self, grace: float) -> None:
        """Stop accepting calls; those still running after ``grace`` seconds end with UNAVAILABLE. Idempotent."""
        if self._server is None:
            return
        self._is_closing = True
        # Compared by inode: a successor may have replaced the socket at this path already, and must keep it.
        unix_socket.remove(self._path, self._identity)
        self._server.close()
        await asyncio.sleep(0)  # the event loop makes the connections of sockets that it has accepted
        handlers: list[asyncio.Future[Any]] = [call.handler for call in self._calls if call.handler is not None]
        # Large requests arrive in several reads. A caller leaves when it has the response.
        arriving = [asyncio.ensure_future(call.gone.wait()) for call in self._calls if call.is_arriving]
        if handlers or arriving:
            await asyncio.wait([*handlers, *arriving], timeout=grace)
        for waiting in arriving:
            waiting.cancel()
        for call in self._calls:
            # The callers close their connections once they have read the status. Closing here at once could lose it: a
            # caller that writes at that moment finds the connection broken and reads no more.
            call.end(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        await self._tasks.close()
        await self._wait_gone()
        for call in self._calls:
            call.disconnect()
        await self._wait_gone()
        await self._server.wait_closed()

    async def _wait_gone(self) -> None:
        """Wait a little for the callers to close their connections, or for the event loop to cut them."""
        if gone := [asyncio.ensure_future(call.gone.wait()) for call in self._calls]:
            _, late = await asyncio.wait(gone, timeout=_LEAVE_SECONDS)
            for waiting in late:
                waiting.cancel()

    def _accept(self) -> ServerCall:
        call = ServerCall(self._find, self._tasks, self._max_message_bytes, self._calls.pop)
        self._calls[call] = None
        if self._is_closing:  # the event loop had taken the socket before the server was closed
            call.disconnect()
        return call


def damaged_request() -> TokenloomError:
    """Return the error of a call whose request cannot be decoded."""
    return InvalidArgument("The message cannot be decoded as this method's request type.")


def _log_failure(error: BaseException) -> None:
    if not isinstance(error, grpc.aio.AbortError):
        log.error("the handler of a local stream raised an error past its edge", exc_info=error)
