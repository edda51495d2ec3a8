"""What the client needs of gRPC in code that blocks; ``async_calls`` has the same for asyncio."""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

import grpc

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import inference_pb2

from .connection import Metadata, channel_options

Call: TypeAlias = "grpc._CallIterator[inference_pb2.GenerateResponse]"
CallError: TypeAlias = grpc.RpcError
Send: TypeAlias = Callable[[], object]
"""Makes one call that cancels a request; blocks until it has ended."""

CANNOT_WRITE: tuple[type[Exception], ...] = ()
"""What a write into a session that has ended raises: nothing, the next read says why it ended."""
CLOSE_SECONDS = 2.0
"""How long :meth:`SyncCancellations.close` waits for calls."""
sleep = time.sleep


def open_channel(address: str, secret: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Return a channel to ``host:port`` or ``unix:/path``; None: in plain text."""
    options = channel_options(address)
    return grpc.insecure_channel(address, options) if secret is None else grpc.secure_channel(address, secret, options)


def error_of(failed: CallError) -> errors.TokenloomError:
    """Return the error of a failed call."""
    return wire_errors.from_rpc(cast(grpc.Call, failed))  # as every error of a call is


def details_of(failed: CallError) -> str:
    """Return gRPC's text of a failed call."""
    return cast(grpc.Call, failed).details() or ""


def was_cut(failed: CallError) -> bool:
    """Return whether a call ended with its connection."""
    return wire_errors.was_cut(cast(grpc.Call, failed))


def collected(call: Iterable[Any]) -> list[Any]:
    """Return every response of a call."""
    return list(call)


class SyncTurns:
    """Writes the turns of a session and reads their answers."""

    def __init__(self, method: Any, timeout: float | None, metadata: Metadata) -> None:
        # At most the turn that is being answered, and the end.
        self._turns: SimpleQueue[inference_pb2.GenerateRequest | None] = SimpleQueue()
        self._call = method(iter(self._turns.get, None), timeout=timeout, metadata=metadata)

    def write(self, request: inference_pb2.GenerateRequest) -> None:
        """Begin a turn."""
        self._turns.put(request)

    def read(self) -> inference_pb2.GenerateResponse | None:
        """Return the next response; None: the gateway has ended the session. Raises ``CallError``."""
        response: inference_pb2.GenerateResponse | None = next(self._call, None)
        return response

    def end(self) -> None:
        """Let the gateway end the session. Idempotent."""
        self._turns.put(None)

    def cancel(self) -> None:
        """End the session and the turn that is being answered. Idempotent."""
        self._call.cancel()
        self._turns.put(None)  # the thread of gRPC that waits for turns would stay


class SyncCancellations:
    """Sends the cancellations of requests that the callers of the client have left.

    It has a thread of its own: the deletion of a stream may neither block nor begin a call of gRPC.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Send | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start the thread. To be called before the first request; idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_send_all, args=(self._queue,), name="cancellations", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._queue.put, None).atexit = False

    def add(self, send: Send) -> None:
        """Send a cancellation soon. May be called from ``__del__``."""
        self._queue.put(send)

    def close(self) -> None:
        """Wait until all were sent, or for two seconds. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)


def _send_all(queue: "SimpleQueue[Send | None]") -> None:
    while (send := queue.get()) is not None:
        # A gateway of an earlier release has no such method: it has cancelled the request with its call.
        with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed
            send()
