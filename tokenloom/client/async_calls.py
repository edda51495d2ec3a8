"""What the client needs of gRPC under asyncio; ``sync_calls`` has the same for code that blocks."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import inference_pb2

from .connection import Metadata, channel_options

Call: TypeAlias = grpc.aio.UnaryStreamCall[
    inference_pb2.GenerateRequest | inference_pb2.InferenceResumeRequest, inference_pb2.GenerateResponse
]
CallError: TypeAlias = grpc.aio.AioRpcError
Send: TypeAlias = Callable[[], Awaitable[object]]
"""Makes one call that cancels a request."""

CANNOT_WRITE = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What a write into a session that has ended raises; reading says why it ended."""
CLOSE_SECONDS = 2.0
"""How long :meth:`AsyncCancellations.close` waits for calls."""
sleep = asyncio.sleep


def open_channel(address: str, secret: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Return a channel to ``host:port`` or ``unix:/path``; None: in plain text."""
    options = channel_options(address)
    if secret is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, secret, options=options)


def error_of(failed: CallError) -> errors.TokenloomError:
    """Return the error of a failed call."""
    return wire_errors.from_rpc(failed)


def details_of(failed: CallError) -> str:
    """Return gRPC's text of a failed call."""
    return failed.details() or ""


def was_cut(failed: CallError) -> bool:
    """Return whether a call ended with its connection."""
    return wire_errors.was_cut(failed)


async def collected(call: Any) -> list[Any]:
    """Return every response of a call."""
    return [response async for response in call]


class AsyncTurns:
    """Writes the turns of a session and reads their answers."""

    def __init__(self, method: Any, timeout: float | None, metadata: Metadata) -> None:
        self._call = method(timeout=timeout, metadata=metadata)

    async def write(self, request: inference_pb2.GenerateRequest) -> None:
        """Begin a turn. Raises one of ``CANNOT_WRITE``."""
        await self._call.write(request)

    async def read(self) -> inference_pb2.GenerateResponse | None:
        """Return the next response; None: the gateway has ended the session. Raises ``CallError``."""
        response = await self._call.read()
        return response if isinstance(response, inference_pb2.GenerateResponse) else None

    async def end(self) -> None:
        """Let the gateway end the session. Idempotent."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """End the session and the turn that is being answered. Idempotent."""
        self._call.cancel()


class AsyncCancellations:
    """Sends the cancellations of requests that the callers of the client have left; owns the calls until they end."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # bounded by the requests that were made

    def prepare(self) -> None:
        """Note the event loop. To be called before the first request; idempotent."""
        self._loop = asyncio.get_running_loop()

    def add(self, send: Send) -> None:
        """Send a cancellation in the next turn of the event loop. May be called from ``__del__``, in any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and every call with it
                self._loop.call_soon_threadsafe(self._start, send)

    async def close(self) -> None:
        """Wait until all were sent, or for two seconds. Idempotent."""
        await asyncio.sleep(0)  # :meth:`add` may have been called in this turn
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)

    def _start(self, send: Send) -> None:
        task = asyncio.get_running_loop().create_task(_sent(send), name="cancel a request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _sent(send: Send) -> None:
    # A gateway of an earlier release has no such method: it has cancelled the request with its call.
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError):
        await send()
