"""Keeps the descriptions of batches on disk."""

from pathlib import Path

import msgspec

from tokenloom.request.errors import FailedPrecondition, NotFound

from ..files.disk import Disk, write_atomically
from .batch import Batch

MAX_OPEN = 100
"""Batches of one tenant that have not ended."""
MAX_KEPT = 1000
"""Batches of one tenant; the oldest that have ended are dropped, and their files stay."""


class BatchStore:
    """Holds every batch, and writes each change of its status."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._directory = disk.directory / "batches"
        self._batches: dict[str, Batch] = {}  # in the order of their creation

    async def open(self) -> None:
        """Read the batches that are there."""
        found = await self._disk.run(self._scan)
        self._batches = {
            batch.id: batch for batch in sorted(found, key=lambda each: (each.times["validating"], each.id))
        }

    @property
    def open_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.is_ended]

    def of(self, tenant: str) -> list[Batch]:
        """Return a tenant's batches, the oldest first."""
        return [batch for batch in self._batches.values() if batch.tenant == tenant]

    def get(self, batch_id: str, tenant: str) -> Batch:
        """Return a tenant's batch. Raises ``NotFound``, which also covers those of other tenants."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise NotFound(f"no batch {batch_id[:64]!r} is known here")
        return batch

    def output_path(self, batch: Batch) -> Path:
        """Return where the answers are collected until the batch ends."""
        return self._directory / f"{batch.id}.output"

    def error_path(self, batch: Batch) -> Path:
        """Return where the errors are collected until the batch ends."""
        return self._directory / f"{batch.id}.errors"

    async def add(self, batch: Batch) -> None:
        """Keep a new batch. Raises ``FailedPrecondition`` if the tenant has too many that have not ended."""
        own = self.of(batch.tenant)
        num_open = sum(not each.is_ended for each in own)
        if num_open >= MAX_OPEN:
            raise FailedPrecondition(f"{num_open} batches have not ended, as many as may be; wait, or cancel some")
        self._batches[batch.id] = batch
        await self.save(batch)
        ended = [each for each in own if each.is_ended]
        for old in ended[: max(len(own) + 1 - MAX_KEPT, 0)]:
            self._batches.pop(old.id, None)
            await self._disk.run(self._path(old).unlink)

    async def save(self, batch: Batch) -> None:
        """Write a batch, durably."""
        data, path = msgspec.json.encode(batch), self._path(batch)
        await self._disk.run(lambda: write_atomically(path, data))

    def _path(self, batch: Batch) -> Path:
        return self._directory / f"{batch.id}.json"

    def _scan(self) -> list[Batch]:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found: list[Batch] = []
        for path in self._directory.glob("*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Batch))
            except msgspec.DecodeError:  # of another version, or damaged: it is left for the operator
                continue
        return found
