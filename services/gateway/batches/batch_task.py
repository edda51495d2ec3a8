"""Carries one batch from its creation to its end."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.tasks import first_of

from ..files.file_store import FileRoom, FileStore
from ..tenants.tenant import Tenant
from .batch import ENDED, BatchProblem, Status, StoredBatch
from .batch_lines import InputLines
from .batch_run import BatchCalls, BatchFailed, BatchResources, BatchRun
from .batch_store import BatchStore
from .results import Results

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 30.0
"""After these times, what the disk has refused is written again."""
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

    @property
    def line_bytes(self) -> int:
        """Of each line of an input."""
        return self.body_bytes + _LINE_HEAD_BYTES


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Holds what the tasks of all batches share.

    Attributes:
        tenant_of: Returns the tenant of a name; None if it has no key any more.
        calls: Sends requests.
        place: Waits until a batch may answer lines, and holds its place among those that do.
        places: Returns how many lines of each batch may be answered at the same time.
    """

    batches: BatchStore
    files: FileStore
    limits: BatchLimits
    around: BatchResources
    tenant_of: Callable[[str], Tenant | None]
    calls: BatchCalls
    place: Callable[[StoredBatch], AbstractAsyncContextManager[None]]
    places: Callable[[], int]


class BatchTask:
    """Owns a batch: only its task changes it, writes it and touches its results; others ask it to.

    Each step is written before the next one begins, so that the task of the next gateway continues after a crash at any
    point: the results are closed, the outcome and the counts are written, the results become files, the end is written.
    What the disk refuses is written again until it succeeds; the batch shows what was written last.
    """

    def __init__(self, context: BatchContext, batch: StoredBatch, room: FileRoom) -> None:
        """``room``: holds the places and bytes of the results; it is released when the batch has ended."""
        self.batch = batch
        self._context = context
        self._room = room
        self._cancelled = asyncio.Event()
        self._changed = asyncio.Event()  # is set for a moment with each change
        self._storage_error = ""  # why the disk refuses the next change
        self._cancel_error = ""  # why it does not even keep that the batch is cancelled
        self._is_over = False
        self._needs_input = True
        self._counts_are_known = False
        self._has_expired = False

    async def cancel(self) -> None:
        """Stop the batch; what has a result is kept. Returns when that is written, or the batch has ended otherwise.

        Raises ``Unavailable`` when it cannot be written now; the batch is cancelled as soon as it can.
        """
        self._cancelled.set()
        while not (self.batch.is_ended or self.batch.status == "cancelling"):
            if self._is_over:
                raise Unavailable("the gateway is shutting down; retry")
            if self._cancel_error:
                message = f"the batch stops, but that cannot be stored now: {self._cancel_error}; retry later"
                raise Unavailable(message, retry_after=FIRST_RETRY_SECONDS)
            await self._changed.wait()

    async def run(self) -> None:
        """Return when the batch has ended. To be cancelled only when the gateway ends; the next one resumes it."""
        batch = self.batch
        try:
            if batch.outcome is None:
                await self._decide()
            # Before the end is written: a client that reads "completed" finds the files.
            await self._persist(self._store_results)
            if self._cancelled.is_set() and batch.outcome in ("completed", "expired"):  # behind the last result
                await self._change("cancelling", outcome="cancelled")
            assert batch.outcome is not None
            await self._change(batch.outcome)
            self._end_use()  # only now: until the end is on disk, the next gateway may need the input again
            self._room.release()
            log.info("%s: %s, %d answers and %d errors", batch.id, batch.status, batch.completed, batch.failed)
        finally:
            self._is_over = True
            self._announce()

    async def _decide(self) -> None:
        """Give every line a result, unless a client cancels the batch, and write how it ends."""
        outcome, problem = await self._outcome()
        self._needs_input = outcome not in ("cancelled", "failed")
        status: Status = self.batch.status
        if outcome == "cancelled":
            status = "cancelling"
        elif outcome != "failed":
            status = "finalizing"
        if not self._counts_are_known:
            await self._persist(self._count)
        counts = {"completed": self.batch.completed, "failed": self.batch.failed}
        problems = [] if problem is None else [problem]
        await self._change(status, outcome=outcome, problems=problems, **counts)
        if not self._needs_input:
            self._end_use()

    async def _outcome(self) -> tuple[Status, BatchProblem | None]:
        batch = self.batch
        if batch.status == "cancelling":  # when the gateway before this one ended
            return "cancelled", None
        if batch.status == "finalizing":  # an older gateway wrote no outcome; its counts are final
            self._counts_are_known = True
            return "completed", None
        try:
            await first_of(self._answer(), self._cancelled.wait())
        except BatchFailed as failed:
            return "failed", BatchProblem(failed.code, str(failed))
        except OSError as error:
            log.warning("%s cannot continue: %s", batch.id, error)
            self._counts_are_known = False  # a write may have succeeded in part
            return "failed", BatchProblem("storage", f"the storage of batches fails: {error.strerror}")
        except Exception:  # a bug: the batch must not stay as if it ran
            log.exception("%s failed", batch.id)
            self._counts_are_known = False
            return "failed", BatchProblem("internal_error", "the gateway has failed to run the batch")
        if self._cancelled.is_set():
            return "cancelled", None
        return "expired" if self._has_expired else "completed", None

    async def _answer(self) -> None:
        """Give every line a result."""
        batch, context = self.batch, self._context
        if (tenant := context.tenant_of(batch.tenant)) is None:
            raise BatchFailed("key_removed", _KEY_GONE)
        async with context.place(batch), self._input() as file:
            total, num_lines = await self._validate(file)
            await self._change("in_progress", total=total)
            async with self._results(num_lines) as results:
                run = BatchRun(
                    *(batch, tenant, results, context.around, context.calls), places=context.places, room=self._room
                )
                try:
                    await run.run(file, context.limits.line_bytes)
                finally:
                    self._has_expired = run.has_expired or results.has_expired  # also before a restart

    def _input(self) -> AbstractAsyncContextManager[BinaryIO]:
        path = self._context.files.path(self.batch.input_file_id)
        return self._context.around.disk.opened(lambda: path.open("rb"), lambda file: file.close())

    async def _validate(self, file: BinaryIO) -> tuple[int, int]:
        """Return how many requests and how many lines the input has; the file is at its beginning again afterwards."""
        most = self._context.limits.lines
        lines = InputLines(file, self.batch.endpoint, self._context.limits.line_bytes)

        stored = self._context.files.get(self.batch.input_file_id, self.batch.tenant)

        def count() -> int:
            if stored.is_damaged(file):
                raise BatchFailed("damaged_file", "the input file is damaged on the gateway's disk; upload it again")
            number = lines.count(most)
            file.seek(0, os.SEEK_SET)
            return number

        total = await self._context.around.disk.run(count)
        if not total:
            raise BatchFailed("empty_file", "the input file has no requests")
        if total > most:
            raise BatchFailed("too_many_lines", f"the input file has more than {most} requests")
        return total, lines.number

    @asynccontextmanager
    async def _results(self, num_lines: int) -> AsyncIterator[Results]:
        """Hold the results open; the batch shows how many they are."""
        batch, batches = self.batch, self._context.batches
        results = Results(self._context.around.disk, batches.output_path(batch), batches.error_path(batch))
        is_open = self._counts_are_known = False
        try:
            await results.open(num_lines)
            is_open = True
            self._room.hold(results.num_bytes)
            results.show(batch)
            yield results
        finally:
            await results.close()
            if is_open:
                results.show(batch)
                self._counts_are_known = True

    async def _count(self) -> None:
        """Count the results on disk, of a batch that stopped before they were opened, or while they could not be
        written."""
        async with self._results(0):
            pass

    async def _store_results(self) -> None:
        """Turn the results into files. It may be repeated after a failure or a crash at any point."""
        batch, context = self.batch, self._context
        for path, file_id, name, number in (
            (context.batches.output_path(batch), batch.output_file_id, "output", batch.completed),
            (context.batches.error_path(batch), batch.error_file_id, "errors", batch.failed),
        ):
            if number:
                name = f"{batch.id}_{name}.jsonl"
                options = {"name": name, "purpose": "batch_output"}
                await context.files.adopt(path, file_id, batch.tenant, room=self._room, **options)
            else:
                await context.around.disk.run(lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]

    async def _change(self, status: Status, **fields: object) -> None:
        """Write a change and let the batch show it."""
        context, batch = self._context, self.batch

        def change() -> Awaitable[None]:
            now = context.around.now()
            if batch.status != "cancelling" or status in ("cancelling", "cancelled"):
                return context.batches.change(batch, status, now, **fields)
            # It was cancelled while the disk refused the change.
            instead: Status = "cancelled" if status in ENDED else "cancelling"
            return context.batches.change(batch, instead, now, **{**fields, "outcome": "cancelled"})

        await self._persist(change)
        self._announce()

    async def _persist(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write, and again while that fails: the disk may be full, and a batch that cannot be written cannot end."""
        seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                await write()
            except Exception as error:  # whatever it is, no other task would end the batch
                self._report(error)
            else:
                self._storage_error = self._cancel_error = ""
                return
            await self._wait(seconds)
            seconds = min(seconds * 2, LONGEST_RETRY_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """Wait before the next attempt, at most until the batch is cancelled."""
        was_cancelled = self._cancelled.is_set()
        if not was_cancelled:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._cancelled.wait()
        if self._cancelled.is_set():
            await self._mark_cancelled()
        if was_cancelled:
            await asyncio.sleep(seconds)

    async def _mark_cancelled(self) -> None:
        """Keep that the batch is cancelled on a disk that refuses to write it: otherwise it would go on after a
        restart, and nothing that a client can do would make room."""
        if self.batch.is_ended or self.batch.status == "cancelling":
            return
        try:
            await self._context.batches.mark_cancelled(self.batch, self._context.around.now())
            self._cancel_error = ""
        except OSError as error:
            self._cancel_error = error.strerror or "the disk fails"
        self._announce()

    def _end_use(self) -> None:
        self._context.files.end_use(self.batch.input_file_id, self.batch.id)

    def _report(self, error: Exception) -> None:
        """Log a failure once, and let those that wait for the change know."""
        text = (error.strerror or "the disk fails") if isinstance(error, OSError) else "internal error"
        if text != self._storage_error:
            bug = None if isinstance(error, OSError) else error
            log.warning("%s cannot be written and is tried again: %s", self.batch.id, error, exc_info=bug)
        self._storage_error = text
        if not self._needs_input:
            self._end_use()  # a client may delete it, which makes room on a full disk
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed.clear()
