"""What all leases have in common. Processes of one machine use a lock on a file, which the kernel releases when its
holder ends."""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Protocol

from tokenloom.request.errors import InvalidArgument


class LeaderLease(Protocol):
    """Is held by one process at a time."""

    async def acquire(self) -> None:
        """Return when this process holds the lease, however long that takes."""

    async def keep(self) -> None:
        """Keep the lease until cancelled. Raises ``FailedPrecondition`` when another process may have it."""

    async def release(self) -> None:
        """Let another process have the lease at once. Idempotent."""


POLL_SECONDS = 0.1
"""How often a process that waits tries again: ``flock`` can wait only in a thread, which then cannot be ended."""


class FileLease:
    """Locks a file (``flock(2)``). A holder that is only stopped keeps it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    async def acquire(self) -> None:
        """Return when the lock is held. Raises ``InvalidArgument`` if the file cannot be opened."""
        try:
            # The file is never removed: a process that had opened it before would lock a file that no other one can
            # see.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"lease: cannot open {self._path}: {error.strerror}", "lease") from None
        try:
            while not _locked(descriptor):  # noqa: ASYNC110 - a lock has no event
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    async def keep(self) -> None:
        """Wait without end: nothing takes the lock from its holder."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Keep the lock until the process ends: until then its socket is at the address at which the next holder will
        listen, and closing that one removes it."""


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
