"""Owns the directory of the batch API, and the threads that read and write it."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.services.runtime.tasks import completed

T = TypeVar("T")

_NUM_THREADS = 2
_LOCK_SECONDS = 10.0
"""How long a gateway waits for its predecessor, which releases the directory as soon as it begins to drain."""
_POLL_SECONDS = 0.05
NEW: Final = ".new"
"""Ends the name of a file whose content is not complete yet. A crash may leave it."""
_temporary = itertools.count()


class Disk:
    """Holds a directory for one gateway. The event loop never waits for it: every access is a call in a thread.

    A call that has begun is always completed, also when its caller is cancelled: the caller goes on afterwards, so that
    what it cleans up, or writes next, cannot come before what it began.
    """

    def __init__(self, directory: Path, threads: Executor | None = None) -> None:
        """``threads``: run the calls; None: two threads of its own."""
        self.directory = directory
        self._threads = threads or ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="disk")
        self._lock: int | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Create the directory, private to this user, and lock it.

        Raises ``InvalidArgument`` if it cannot be created, or another gateway has it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _LOCK_SECONDS
        while not await self.run(self._take):
            if loop.time() > until:
                raise InvalidArgument(
                    f"--batch-dir: another gateway uses {self.directory}; give each gateway a directory of its own",
                    "batch_dir",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def run(self, call: Callable[[], T], then: Callable[[T], object] | None = None) -> T:
        """Call in a thread. Raises what the call raises, and ``Unavailable`` after :meth:`close`.

        ``then``: called in the event loop with the result, also when the caller has been cancelled meanwhile: what the
        call did on disk is then known in memory, too.
        """
        if self._is_closed:
            raise Unavailable("the gateway is shutting down; retry")
        return await _complete(self._threads.submit(call), then)

    async def run_anyway(self, call: Callable[[], object]) -> None:
        """Call in a thread, or here after :meth:`close`: for what cleans up."""
        try:
            running = self._threads.submit(call)
        except RuntimeError:  # the threads have ended
            call()
            return
        await _complete(running)

    @contextlib.asynccontextmanager
    async def opened(self, opens: Callable[[], T], closes: Callable[[T], object]) -> AsyncIterator[T]:
        """Hold what ``opens`` returns, and close it on every path."""
        held: list[T] = []
        try:
            yield await self.run(opens, held.append)
        finally:
            for each in held:
                await self.run_anyway(lambda each=each: closes(each))  # type: ignore[misc]

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
            raise InvalidArgument(
                f"--batch-dir: {self.directory} cannot be used: {error.strerror}", "batch_dir"
            ) from None
        try:
            # The kernel releases the lock when the process ends, however it ends; a file with a process id would block
            # the next gateway after a crash.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True


async def _complete(called: "Future[T]", then: Callable[[T], object] | None = None) -> T:
    """Wait for a call in a thread, also when the waiting task is cancelled, and return its result."""
    running = asyncio.wrap_future(called)
    try:
        return await completed(running)
    finally:
        if then is not None and running.done() and running.exception() is None:
            then(running.result())


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, so that a crash at any time leaves the old or the new one. Raises ``OSError``.

    A crash may leave a file whose name ends with :data:`NEW`.
    """
    # A name of its own, so that two calls at the same time do not replace each other's half.
    temporary = path.with_name(f"{path.name}.{next(_temporary)}{NEW}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The new name is in the directory, which is a file of its own: without this a power failure may bring the old one
    # back.
    sync_directory(path.parent)


_CHECKSUM = b',"description_crc32":'


def sealed(data: bytes) -> bytes:
    """Return a JSON object with the checksum of itself as its last field, which older versions do not read."""
    return b"%s%s%d}" % (data[:-1], _CHECKSUM, zlib.crc32(data))


def unsealed(data: bytes) -> bytes:
    """Return what was sealed; an object without a checksum, of an older version, as it is. Raises ``ValueError`` if it
    was changed since."""
    head, mark, rest = data.rpartition(_CHECKSUM)
    if not mark:
        return data
    if rest != b"%d}" % zlib.crc32(head + b"}"):
        raise ValueError("its content does not have its checksum")
    return head + b"}"


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


_PIECE_BYTES = 1 << 20


def checksum_of(file: BinaryIO) -> int:
    """Return the CRC-32 of a file from its beginning on, which is its position again afterwards. Raises ``OSError``."""
    file.seek(0)
    total = 0
    while piece := file.read(_PIECE_BYTES):
        total = zlib.crc32(piece, total)
    file.seek(0)
    return total
