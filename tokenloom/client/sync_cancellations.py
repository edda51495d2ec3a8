"""Sends the cancellations of requests that the callers of the blocking client have left."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Send: TypeAlias = Callable[[], object]
"""Makes one call that cancels a request; blocks until it has ended."""

CLOSE_SECONDS = 2.0
"""How long :meth:`SyncCancellations.close` waits for calls."""


class SyncCancellations:
    """Sends from a thread of its own: the deletion of a stream may neither block nor begin a call of gRPC."""

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
        send()
