"""Runs the batches of all tenants, a few at a time, and resumes them after a restart."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.tasks import Tasks

from ..files.file_store import FileRoom, FileStore
from ..files.files_api import storage_fails
from ..tenants.tenant import Tenant
from .batch import StoredBatch
from .batch_run import BatchCalls, BatchResources
from .batch_store import BatchStore
from .batch_task import BatchContext, BatchLimits, BatchTask

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Holds a batch that waits until it may answer lines."""

    batch: StoredBatch
    has_come: asyncio.Event = field(default_factory=asyncio.Event)


class BatchRunner:
    """Owns the task of each batch that has not ended. At most as many answer lines as lines may be answered; the others
    wait, and the tenant with the fewest batches that do is next."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        limits: BatchLimits,
        around: BatchResources,
        tenant_of: Callable[[str], Tenant | None],
    ) -> None:
        """``tenant_of``: returns the tenant of a name; None if it has no key any more."""
        self._batches = batches
        self._files = files
        self._limits = limits
        self._around = around
        self._tenant_of = tenant_of
        self._tasks = Tasks(lambda error: log.error("a batch failed: %s", error, exc_info=error))
        self._owners: dict[str, BatchTask] = {}  # bounded by the open batches of all tenants
        self._running: dict[str, StoredBatch] = {}
        self._waiting: dict[str, _Turn] = {}
        self._context: BatchContext | None = None
        self._is_closed = False

    def start(self, calls: BatchCalls) -> None:
        """Resume the batches that have not ended. ``calls``: sends the requests of all batches."""
        self._context = BatchContext(
            batches=self._batches,
            files=self._files,
            limits=self._limits,
            around=self._around,
            tenant_of=self._tenant_of,
            calls=calls,
            place=self._place,
            places=self.places,
        )
        for batch in self._batches.open_batches:
            self.submit(batch)

    async def create(self, batch: StoredBatch) -> None:
        """Keep a new batch and run it.

        Raises ``FailedPrecondition`` if the tenant has too many batches that have not ended, or no places for the files
        of results, ``Unavailable`` if the disk refuses it or the gateway ends; then nothing of it is kept.
        """
        if self._is_closed:
            raise Unavailable("the gateway is shutting down; retry")
        with self._files.take(batch.tenant, num_files=2) as room:
            self._files.begin_use(batch.input_file_id, batch.id)  # before anything waits: a client may delete it
            try:
                await self._batches.add(batch, lambda: self.submit(batch, room.move()))
            except OSError as error:
                raise storage_fails(error) from error
            finally:
                if batch.id not in self._owners:
                    self._files.end_use(batch.input_file_id, batch.id)

    def submit(self, batch: StoredBatch, room: FileRoom | None = None) -> None:
        """Run a batch as soon as there is a place for it. ``room``: of its results; None takes it, whatever the limits
        are."""
        if self._is_closed:
            return  # the next gateway runs it
        assert self._context is not None, "a batch runs after the start"
        self._files.begin_use(batch.input_file_id, batch.id)
        room = room or self._files.reserve_for_results(batch.tenant)
        owner = self._owners[batch.id] = BatchTask(self._context, batch, room)
        self._tasks.spawn(self._keep(owner), name=f"batch {batch.id}")

    async def cancel(self, batch: StoredBatch) -> None:
        """Stop a batch, as :meth:`BatchTask.cancel`. A batch that has ended stays as it is."""
        if (owner := self._owners.get(batch.id)) is not None:
            await owner.cancel()

    async def close(self) -> None:
        """Stop all batches where they are. The next gateway on this directory resumes them."""
        self._is_closed = True
        await self._tasks.close()

    def places(self) -> int:
        """Return how many lines of each running batch may be answered at the same time."""
        return max(self._limits.concurrency // max(len(self._running), 1), 1)

    async def _keep(self, owner: BatchTask) -> None:
        """Run a batch until it has ended, or this gateway ends."""
        try:
            await owner.run()
        finally:
            del self._owners[owner.batch.id]

    @asynccontextmanager
    async def _place(self, batch: StoredBatch) -> AsyncIterator[None]:
        turn = self._waiting[batch.id] = _Turn(batch)
        self._fill()
        try:
            await turn.has_come.wait()
            yield
        finally:
            self._waiting.pop(batch.id, None)
            self._running.pop(batch.id, None)
            self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._limits.concurrency:
            turn = self._next()
            del self._waiting[turn.batch.id]
            self._running[turn.batch.id] = turn.batch
            turn.has_come.set()

    def _next(self) -> _Turn:
        """Return the waiting batch whose tenant has the fewest that run; of several, the oldest."""
        running = Counter(batch.tenant for batch in self._running.values())
        return min(self._waiting.values(), key=lambda turn: running[turn.batch.tenant])
