"""Runs the batches of all tenants, a few at a time, and resumes them after a restart."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from tokenloom.services.runtime.host.tasks import Tasks

from ..files.file_store import FileStore
from ..tenants.tenant import Tenant
from .batch import Batch, BatchProblem, Status
from .batch_lines import InputLines
from .batch_run import BatchFailed, BatchRun, Calls, Surroundings
from .batch_store import BatchStore
from .results import Results

log = logging.getLogger(__name__)

_LINE_HEAD_BYTES = 8 << 10
"""What a line of the input may have in addition to its body."""
_KEY_GONE = "the key that made the batch is not accepted any more"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits what batches may do.

    Attributes:
        lines: Requests of one batch.
        body_bytes: Of each request.
        concurrency: Lines of all batches that are answered at the same time.
    """

    lines: int
    body_bytes: int
    concurrency: int


class BatchRunner:
    """Owns a task for each batch that runs. At most as many run as lines may; the others wait, and the tenant with the
    fewest running batches is next."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        limits: BatchLimits,
        around: Surroundings,
        tenant_of: Callable[[str], Tenant | None],
    ) -> None:
        """``tenant_of``: returns the tenant of a name; None if it has no key any more."""
        self._batches = batches
        self._files = files
        self._limits = limits
        self._around = around
        self._tenant_of = tenant_of
        self._tasks = Tasks(lambda error: log.error("a batch failed: %s", error, exc_info=error))
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, Batch] = {}
        self._calls: Calls | None = None
        self._is_closed = False

    def start(self, calls: Calls) -> None:
        """Resume the batches that have not ended. ``calls``: sends the requests of all batches."""
        self._calls = calls
        for batch in self._batches.open_batches:
            self.submit(batch)

    def submit(self, batch: Batch) -> None:
        """Run a batch as soon as there is a place for it."""
        self._files.begin_use(batch.input_file_id, batch.id)
        self._waiting[batch.id] = batch
        self._fill()

    async def cancel(self, batch: Batch) -> None:
        """Stop a batch. What has a result is kept; a batch that has ended stays as it is."""
        if batch.is_ended or batch.status == "cancelling":
            return
        batch.begin("cancelling", self._around.now())
        await self._batches.save(batch)
        if (task := self._running.get(batch.id)) is not None:
            task.cancel()
        self._fill()

    async def close(self) -> None:
        """Stop all batches where they are. The next gateway on this directory resumes them."""
        self._is_closed = True
        await self._tasks.close()

    def places(self) -> int:
        """Return how many lines of each running batch may be answered at the same time."""
        return max(self._limits.concurrency // max(len(self._running), 1), 1)

    def _fill(self) -> None:
        is_on = self._calls is not None and not self._is_closed
        while is_on and self._waiting and len(self._running) < self._limits.concurrency:
            batch = self._next()
            del self._waiting[batch.id]
            self._running[batch.id] = self._tasks.spawn(self._keep(batch), name=f"batch {batch.id}")

    def _next(self) -> Batch:
        """Return the waiting batch whose tenant has the fewest that run; of several, the oldest."""
        running = Counter(batch.tenant for batch in self._batches.open_batches if batch.id in self._running)
        return min(self._waiting.values(), key=lambda batch: running[batch.tenant])

    async def _keep(self, batch: Batch) -> None:
        """Run a batch until it has ended, or this gateway ends."""
        try:
            try:
                await self._run(batch)
            except asyncio.CancelledError:
                if self._is_closed or batch.status != "cancelling":
                    raise
                await self._end(batch, "cancelled")
        finally:
            self._running.pop(batch.id, None)
            self._fill()

    async def _run(self, batch: Batch) -> None:
        if batch.status == "cancelling":  # when the gateway before this one ended
            async with self._results(batch, 0):
                pass
            await self._end(batch, "cancelled")
            return
        has_expired = False
        try:
            if batch.status != "finalizing":
                has_expired = await self._answer(batch)
                await self._begin(batch, "finalizing")
            await self._end(batch, "expired" if has_expired else "completed")
        except BatchFailed as failed:
            batch.problems.append(BatchProblem(failed.code, str(failed)))
            await self._end(batch, "failed")
        except OSError as error:
            log.warning("%s cannot continue: %s", batch.id, error)
            batch.problems.append(BatchProblem("storage", f"the storage of batches fails: {error.strerror}"))
            await self._end(batch, "failed")
        except Exception:  # a bug: the batch must not stay as if it ran
            log.exception("%s failed", batch.id)
            batch.problems.append(BatchProblem("internal_error", "the gateway has failed to run the batch"))
            await self._end(batch, "failed")

    async def _answer(self, batch: Batch) -> bool:
        """Give every line a result. Returns whether the time was over for some of them."""
        disk, path = self._around.disk, self._files.path(batch.input_file_id)
        if (tenant := self._tenant_of(batch.tenant)) is None:
            raise BatchFailed("key_removed", _KEY_GONE)
        file: BinaryIO = await disk.run(lambda: path.open("rb"))
        try:
            num_lines = await self._validate(batch, file)
            if batch.status != "in_progress":
                await self._begin(batch, "in_progress")
            async with self._results(batch, num_lines) as results:
                room = self._files.room(batch.tenant)
                assert self._calls is not None, "a batch runs after the start"
                run = BatchRun(
                    batch, tenant, results, self._around, self._calls, places=self.places, max_result_bytes=room
                )
                await run.run(file, self._limits.body_bytes + _LINE_HEAD_BYTES)
                return run.has_expired
        finally:
            await disk.run(file.close)

    @asynccontextmanager
    async def _results(self, batch: Batch, num_lines: int) -> AsyncIterator[Results]:
        """Hold the results that a batch has open; the batch shows how many they are."""
        paths = self._batches.output_path(batch), self._batches.error_path(batch)
        results = Results(self._around.disk, *paths)
        try:
            await results.open(num_lines)
            results.show(batch)
            yield results
        finally:
            await results.close()
            results.show(batch)

    async def _validate(self, batch: Batch, file: BinaryIO) -> int:
        """Count the requests of the input, and return its lines; the file is at its beginning again afterwards."""
        lines = InputLines(file, batch.endpoint, self._limits.body_bytes + _LINE_HEAD_BYTES)

        def count() -> int:
            number = lines.count(self._limits.lines)
            file.seek(0, os.SEEK_SET)
            return number

        batch.total = await self._around.disk.run(count)
        if not batch.total:
            raise BatchFailed("empty_file", "the input file has no requests")
        if batch.total > self._limits.lines:
            batch.total = 0
            raise BatchFailed("too_many_lines", f"the input file has more than {self._limits.lines} requests")
        return lines.number

    async def _begin(self, batch: Batch, status: Status) -> None:
        batch.begin(status, self._around.now())
        await self._batches.save(batch)

    async def _end(self, batch: Batch, status: Status) -> None:
        """Turn the results into files, and end the batch."""
        for path, file_id, name, number in (
            (self._batches.output_path(batch), batch.output_file_id, "output", batch.completed),
            (self._batches.error_path(batch), batch.error_file_id, "errors", batch.failed),
        ):
            if number:
                name = f"{batch.id}_{name}.jsonl"
                await self._files.adopt(path, file_id, batch.tenant, name=name, purpose="batch_output")
            else:
                await self._around.disk.run(lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]
        self._files.end_use(batch.input_file_id, batch.id)
        await self._begin(batch, status)
        log.info("%s: %s, %d answers and %d errors", batch.id, status, batch.completed, batch.failed)
