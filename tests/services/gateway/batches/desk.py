"""Batches and files on a disk, without a gateway around them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from tests.services.gateway.files.failing_disk import InlineThreads
from tokenloom.services.gateway.batches.batch import StoredBatch, new_batch_id
from tokenloom.services.gateway.batches.batch_lines import results_in
from tokenloom.services.gateway.batches.batch_run import BatchResources, LineMetrics
from tokenloom.services.gateway.batches.batch_runner import BatchRunner
from tokenloom.services.gateway.batches.batch_store import BatchStore
from tokenloom.services.gateway.batches.batch_task import BatchLimits
from tokenloom.services.gateway.files.disk import Disk
from tokenloom.services.gateway.files.file_store import FileLimits, FileStore, StoredFile, new_file_id
from tokenloom.services.gateway.http.internal_call import InternalResponse
from tokenloom.services.gateway.tenants.tenant import NO_TENANT, Tenant

PATH = "/v1/completions"
NOW = 1000.0
SOON = 30.0
"""Bound of every wait: a hang is a failure."""
Answer = Callable[[bytes], Awaitable[InternalResponse]]


async def at_once(body: bytes) -> InternalResponse:
    """Answer, without a turn of the event loop."""
    return InternalResponse(200, {}, b'{"ok":1}')


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop take turns until a state is there."""
    async with asyncio.timeout(SOON):
        while not is_so():  # noqa: ASYNC110 - turns are what these tests count
            await asyncio.sleep(0)


class Calls:
    """Answers the lines of batches as the test says."""

    def __init__(self) -> None:
        self.answer: Answer = at_once

    async def post(self, path: str, body: bytes, tenant: Tenant) -> InternalResponse:
        assert path == PATH
        return await self.answer(body)


class Desk:
    """Holds the stores and the runner on one directory."""

    def __init__(
        self, directory: Path, *, concurrency: int = 4, tenant_files: int = 1000, tenant_bytes: int = 1 << 20
    ) -> None:
        self.disk = Disk(directory, InlineThreads())
        self.files = FileStore(self.disk, FileLimits(1 << 20, tenant_bytes, tenant_files), lambda: NOW)
        self.batches = BatchStore(self.disk)
        self.calls = Calls()
        self.now = NOW
        around = BatchResources(self.disk, LineMetrics(CollectorRegistry()), Random(1), lambda: self.now)
        limits = BatchLimits(1000, 1 << 20, concurrency)
        self.runner = BatchRunner(self.batches, self.files, limits, around, lambda name: NO_TENANT)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Desk"]:
        try:
            await self.disk.open()
            await self.files.open()
            await self.batches.open()
            self.runner.start(self.calls)
            yield self
        finally:
            await self.runner.close()
            await self.disk.close()

    async def upload(self, *lines: bytes) -> StoredFile:
        """Store lines as an input."""
        file_id = new_file_id()
        data = b"".join(line + b"\n" for line in lines)
        self.files.partial_path(file_id).write_bytes(data)
        try:
            return await self.files.add_upload(file_id, "", name="in", purpose="batch", size=len(data))
        finally:
            self.files.partial_path(file_id).unlink(missing_ok=True)

    def batch(self, file: StoredFile) -> StoredBatch:
        batch = StoredBatch(
            id=new_batch_id(),
            tenant="",
            endpoint=PATH,
            input_file_id=file.id,
            completion_window="24h",
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            expires_at=NOW + 3600,
        )
        batch.begin("validating", NOW)
        return batch

    async def create(self, file: StoredFile) -> StoredBatch:
        batch = self.batch(file)
        await self.runner.create(batch)
        return batch

    async def ended(self, batch: StoredBatch) -> StoredBatch:
        """Wait for the end of a batch."""
        await until(lambda: batch.is_ended)
        return batch

    def numbers(self, file_id: str) -> list[int]:
        """Return which lines a file of results answers."""
        path = self.files.path(file_id)
        if not path.exists():
            return []
        with path.open("rb") as file:
            numbers = [number for number, _ in results_in(file)]
            assert not file.read(), "an incomplete line"
        return numbers

    def check(self) -> None:
        """Check that nothing is left on disk but what the stores know, and that the limits count what is there."""
        files, batches = self.files.of(""), self.batches.of("")
        found = {path.name for path in self.files.path("x").parent.iterdir()}
        assert found == {name for file in files for name in (file.id, file.id + ".json")}
        assert self.files._shelf("").places.taken == len(files)
        assert self.files._shelf("").bytes.taken == sum(path_size(self.files.path(file.id)) for file in files)
        found = {path.name for path in (self.disk.directory / "batches").iterdir()}
        assert found == {f"{batch.id}.json" for batch in batches}
        for batch in batches:
            assert batch.is_ended
            on_disk = json.loads((self.disk.directory / "batches" / f"{batch.id}.json").read_text())
            assert on_disk["status"] == batch.status
            outputs, errors = self.numbers(batch.output_file_id), self.numbers(batch.error_file_id)
            assert (len(outputs), len(errors)) == (batch.completed, batch.failed)
            assert len({*outputs, *errors}) == batch.completed + batch.failed, "a line has two results"
            if batch.status in ("completed", "expired"):
                assert batch.completed + batch.failed == batch.total


def path_size(path: Path) -> int:
    return path.stat().st_size
