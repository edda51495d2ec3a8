"""Sends the cancellations of requests that the callers of the asyncio client have left."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc.aio

Send: TypeAlias = Callable[[], Awaitable[object]]
"""Makes one call that cancels a request."""

CLOSE_SECONDS = 2.0
"""How long :meth:`AsyncCancellations.close` waits for calls."""


class AsyncCancellations:
    """Owns the calls until they have ended."""

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
