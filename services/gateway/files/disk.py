"""Owns the directory of the batch API, and the threads that read and write it."""

import asyncio
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenloom.request.errors import FailedPrecondition, Unavailable

T = TypeVar("T")

_NUM_THREADS = 2
_LOCK_SECONDS = 10.0
"""How long a gateway waits for its predecessor, which releases the directory as soon as it begins to drain."""
_POLL_SECONDS = 0.05


class Disk:
    """Holds a directory for one gateway. The event loop never waits for it: every access is a call in a thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="disk")
        self._lock: int | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Create the directory, private to this user, and lock it.

        Raises ``FailedPrecondition`` if it cannot be created, or another gateway has it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _LOCK_SECONDS
        while not await self.run(self._take):
            if loop.time() > until:
                raise FailedPrecondition(
                    f"--batch-dir: another gateway uses {self.directory}; give each gateway a directory of its own"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def run(self, call: Callable[[], T]) -> T:
        """Call in a thread. Raises ``Unavailable`` after :meth:`close`."""
        if self._is_closed:
            raise Unavailable("the gateway is shutting down; retry")
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self) -> None:
        """Release the directory to another gateway, after the calls in progress. Idempotent."""
        self._is_closed = True
        await asyncio.to_thread(self._threads.shutdown)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> bool:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FailedPrecondition(f"--batch-dir: {self.directory} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, so that a crash at any time leaves the old or the new one."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``. Raises ``OSError``."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
