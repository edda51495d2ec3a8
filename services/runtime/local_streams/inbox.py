"""The messages of a stream that have come and were not read yet."""

import asyncio
from collections import deque

from .connection import Connection

MAX_MESSAGES = 128
MAX_BYTES = 1 << 20
"""Beyond either the socket is not read; what one read of it brought, or one long message, may still come on top."""


class Inbox:
    """Of one reader. What has come is handed out without a turn of the event loop for each."""

    def __init__(self, connection: Connection) -> None:
        """``connection``: held up while the reader is behind."""
        self._connection = connection
        self._messages: deque[bytes] = deque()  # bounded as above
        self._num_bytes = 0
        self._is_complete = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """A message came; without effect once there is an end."""
        if self._is_complete:
            return
        self._messages.append(message)
        self._num_bytes += len(message)
        if len(self._messages) >= MAX_MESSAGES or self._num_bytes >= MAX_BYTES:
            self._connection.pause_reading()
        self._wake()

    def end(self) -> None:
        """No message follows; those that have come can still be read."""
        self._is_complete = True
        self._connection.resume_reading()  # or the end of the connection would go unnoticed
        self._wake()

    def drop(self) -> None:
        """Ends it, and forgets what was not read."""
        self._messages.clear()
        self._num_bytes = 0
        self.end()

    async def get(self) -> bytes | None:
        """The next message, None after the last. Cancelled, it has taken none."""
        while not self._messages:
            if self._is_complete:
                return None
            assert self._waiter is None, "a stream has one reader at a time"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._num_bytes -= len(message)
        if len(self._messages) <= MAX_MESSAGES // 2 and self._num_bytes <= MAX_BYTES // 2:
            self._connection.resume_reading()
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
