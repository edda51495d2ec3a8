"""The bytes of a message in pieces, for calls of the system that gather or scatter them."""

import errno
from collections.abc import Iterable
from typing import Final

Buffer = bytes | bytearray | memoryview

# A request with 1,100 spans of embeddings, or a step with 1,100 pooled results, ended an engine before messages were
# cut.
IOV_MAX: Final = 1024
"""Linux's limit on the buffers of one ``sendmsg`` or ``recvmsg_into``; with more of them the call fails (EMSGSIZE)."""

NO_MEMORY: Final = (errno.ENOBUFS, errno.ENOMEM)
"""Errors of a send that may succeed later: the system has no memory for it now."""
RETRY_SECONDS: Final = 0.01


class Pieces:
    """Holds the pieces that are not moved yet, and yields as many as one call takes."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        """``buffers``: of bytes; empty ones are left out, because filling only those looks like the peer's end."""
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._next = 0
        self._head: list[Buffer] = []

    def head(self) -> list[Buffer]:
        """Return the next pieces, at most ``IOV_MAX``; none when all were moved."""
        if not self._head and self._next < len(self._buffers):
            self._head = self._buffers[self._next : self._next + IOV_MAX]
            self._next += len(self._head)
        return self._head

    def advance(self, num_bytes: int) -> None:
        """Note that so many bytes of :meth:`head` were moved."""
        head = self._head
        for index, buffer in enumerate(head):
            size = len(buffer)
            if num_bytes < size:
                if num_bytes:
                    head[index] = memoryview(buffer)[num_bytes:]
                del head[:index]
                return
            num_bytes -= size
        self._head = []
