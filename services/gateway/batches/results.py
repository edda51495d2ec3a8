"""Appends the results of a batch to its two files; several results share one write."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom.services.runtime.tasks import completed

from ..files.disk import Disk, write_all
from .batch import StoredBatch
from .batch_lines import results_in

SYNC_SECONDS = 1.0
"""Results are handed to the operating system at once, which keeps them if the gateway is killed, and are synced to the
disk this often, which keeps them if the machine fails."""


@dataclass(slots=True)
class _Pending:
    """Holds results that wait for the write before them to end."""

    outputs: list[bytes] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)
    written: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def size(self) -> int:
        return sum(map(len, self.outputs)) + sum(map(len, self.errors))


class Results:
    """Holds the open files of one batch.

    Attributes:
        done: For each line of the input, from 1, whether it has a result.
        num_outputs, num_errors: Lines of the two files.
        num_bytes: Of both files.
        has_expired: Whether a result that was there at the opening is that of a request that expired.
    """

    def __init__(self, disk: Disk, outputs: Path, errors: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, for the time between two syncs."""
        self.done = bytearray()
        self.num_outputs = self.num_errors = self.num_bytes = 0
        self.has_expired = False
        self._disk = disk
        self._paths = outputs, errors
        self._clock = clock
        self._files: list[int] = []
        self._ends: list[int] = []
        """Of each file, where its last whole line ends; more may be there if a write failed."""
        self._synced_at = clock()
        self._pending: _Pending | None = None
        self._writer: asyncio.Task[None] | None = None

    async def open(self, num_lines: int) -> None:
        """Read which lines have a result; drop an incomplete last one. ``num_lines``: of the input."""
        self.done = bytearray(num_lines + 1)
        await self._disk.run(self._open)

    async def add(self, number: int, line: bytes, *, is_error: bool) -> None:
        """Append a result. Returns when it is written. Raises ``OSError``; then the line has no result.

        ``number``: of the input's line. A result for a line that has one is dropped.
        """
        if self.done[number]:
            return
        self.done[number] = 1
        if self._pending is None:
            self._pending = _Pending()
        pending = self._pending
        (pending.errors if is_error else pending.outputs).append(line)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="results of a batch")
        try:
            # Several results share the write, so the cancellation of one line must not cancel it for the others.
            await asyncio.shield(pending.written)
        except Exception:
            self.done[number] = 0
            raise

    def show(self, batch: StoredBatch) -> None:
        """Update the counts of the batch."""
        batch.completed, batch.failed = self.num_outputs, self.num_errors

    async def close(self) -> None:
        """Write and sync what was added, and close the files. Raises ``OSError``; they are closed then, too."""
        try:
            if self._writer is not None:
                # A gateway that ends cancels its tasks twice, a second apart. The second cancellation once ended this
                # wait, another thread closed the files under the writer, and results went to whatever had the
                # descriptors' numbers by then.
                await completed(self._writer)
        finally:
            await self._disk.run_anyway(self._close)

    async def _write(self) -> None:
        """Write until nothing is pending."""
        while (pending := self._pending) is not None:
            self._pending = None
            try:
                await self._disk.run(lambda pending=pending: self._append(pending))  # type: ignore[misc]
            except Exception as error:  # whatever it is, the lines that wait must not wait for ever
                pending.written.set_exception(error)
                pending.written.exception()  # it may be that nothing waits any more
                continue
            self.num_outputs += len(pending.outputs)
            self.num_errors += len(pending.errors)
            self.num_bytes += pending.size
            pending.written.set_result(None)

    def _append(self, pending: _Pending) -> None:
        self._drop_rest()
        try:
            for descriptor, lines in zip(self._files, (pending.outputs, pending.errors), strict=True):
                if lines:
                    write_all(descriptor, b"".join(lines))
            # Not after each write: a sync takes milliseconds, and the disk is shared by all batches. What a failed
            # machine loses is answered again.
            if self._clock() - self._synced_at >= SYNC_SECONDS:
                self._sync()
        except Exception:  # none of these lines has a result, so none may stay
            with contextlib.suppress(OSError):  # otherwise what comes next tries again, before it writes
                self._drop_rest()
            raise
        self._ends = [os.lseek(descriptor, 0, os.SEEK_END) for descriptor in self._files]

    def _drop_rest(self) -> None:
        """Drop what a write that failed has left: no half of a line may be followed by another line."""
        # A file that could not be read has no end: the opening failed there, and nothing was written.
        for descriptor, end in zip(self._files, self._ends, strict=False):
            if os.lseek(descriptor, 0, os.SEEK_END) != end:
                os.ftruncate(descriptor, end)
                os.lseek(descriptor, end, os.SEEK_SET)

    def _sync(self) -> None:
        for descriptor in self._files:
            os.fsync(descriptor)
        self._synced_at = self._clock()

    def _open(self) -> None:
        counts = [0, 0]
        for index, path in enumerate(self._paths):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._files.append(descriptor)
            with open(descriptor, "rb", closefd=False) as file:
                # The id of a result holds the number of its line, so both files together say what is done: no position
                # is kept that could disagree with them.
                for number, has_expired in results_in(file):
                    self.has_expired |= has_expired
                    if number < len(self.done):
                        self.done[number] = 1
                    counts[index] += 1
                end = file.tell()
            os.ftruncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
            self._ends.append(end)
            self.num_bytes += end
        self.num_outputs, self.num_errors = counts

    def _close(self) -> None:
        try:
            self._drop_rest()
            self._sync()
        finally:
            while self._files:
                os.close(self._files.pop())
