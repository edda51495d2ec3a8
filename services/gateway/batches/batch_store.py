"""Keeps the descriptions of batches on disk."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.request.errors import FailedPrecondition, NotFound
from tokenloom.request.limits import AdmissionLimit, Reservation

from ..files.disk import NEW, Disk, sealed, sync_directory, unsealed, write_atomically
from .batch import Status, StoredBatch

log = logging.getLogger(__name__)

MAX_OPEN = 100
"""Batches of one tenant that have not ended."""
MAX_KEPT = 1000
"""Batches of one tenant; the oldest that have ended are dropped, and their files stay."""
_DESCRIPTION, _STOPPED = ".json", ".stop"
"""How the name of a batch's description ends; the second: that of one that was cancelled while nothing could be
written."""


class BatchStore:
    """Holds every batch, and writes each change of its status before it shows it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._directory = disk.directory / "batches"
        self._batches: dict[str, StoredBatch] = {}  # in the order of their creation
        self._limits: dict[str, AdmissionLimit] = {}  # of open batches, by tenant; bounded by the tenants with batches
        self._places: dict[str, Reservation] = {}  # what each open batch holds of its tenant's limit
        self._dropped: set[str] = set()  # chosen to be dropped when the batch that takes their place is written

    async def open(self) -> None:
        """Read the batches that are there; drop what a crash has left of others."""
        found = await self._disk.run(self._scan)
        self._batches = {
            batch.id: batch for batch in sorted(found, key=lambda each: (each.times["validating"], each.id))
        }
        self._places = {batch.id: self._limit(batch.tenant).take_anyway(1) for batch in self.open_batches}

    @property
    def open_batches(self) -> list[StoredBatch]:
        """Those that have not ended, the oldest first."""
        batches = list(self._batches.values())  # a copy: a scrape runs in a thread of its own
        return [batch for batch in batches if not batch.is_ended]

    def of(self, tenant: str) -> list[StoredBatch]:
        """Return a tenant's batches, the oldest first."""
        return [batch for batch in self._batches.values() if batch.tenant == tenant]

    def get(self, batch_id: str, tenant: str) -> StoredBatch:
        """Return a tenant's batch. Raises ``NotFound``, which also covers those of other tenants."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise NotFound(f"no batch {batch_id[:64]!r} is known here")
        return batch

    def output_path(self, batch: StoredBatch) -> Path:
        """Return where the answers are collected until the batch ends."""
        return self._directory / f"{batch.id}.output"

    def error_path(self, batch: StoredBatch) -> Path:
        """Return where the errors are collected until the batch ends."""
        return self._directory / f"{batch.id}.errors"

    async def add(self, batch: StoredBatch, then: Callable[[], object] = lambda: None) -> None:
        """Keep a new batch. Raises ``FailedPrecondition`` if the tenant has too many that have not ended, and
        ``OSError``, after which the batch is not kept.

        ``then``: called as soon as the batch is kept, also when the caller has been cancelled meanwhile: a batch on
        disk without a task that runs it would never end.
        """
        limit = self._limit(batch.tenant)
        if (place := limit.take(1)) is None:
            raise FailedPrecondition(f"{limit.taken} batches have not ended, as many as may be; wait, or cancel some")
        dropped = self._choose_dropped(batch.tenant)
        data = sealed(msgspec.json.encode(batch))

        def write() -> None:
            try:
                write_atomically(self._path(batch), data)
            except OSError:  # of the directory, after the name was there: its client, who was refused, sends it again
                with contextlib.suppress(OSError):
                    self._path(batch).unlink(missing_ok=True)
                raise
            for old in dropped:
                with contextlib.suppress(OSError):  # it is listed once more after a restart, and dropped later
                    os.unlink(self._path(old))

        def keep(_: None) -> None:
            self._batches[batch.id], self._places[batch.id] = batch, place.move()
            for old in dropped:
                del self._batches[old.id]
            then()

        try:
            await self._disk.run(write, keep)
        finally:
            place.release()  # does nothing if the batch is kept
            self._dropped.difference_update(old.id for old in dropped)

    async def change(self, batch: StoredBatch, status: Status, now: float, **fields: Any) -> None:
        """Write what a batch becomes, durably, and let it become that. Raises ``OSError``; then it stays as it was.

        Only the task that owns the batch may call this: a second change at the same time would undo the first one.
        ``now``: seconds since 1970. ``fields``: what changes beside the status.
        """
        times = batch.times if status == batch.status else {**batch.times, status: int(now)}
        fields |= {"status": status, "times": times}
        # A copy is written first and shown afterwards: a client must not see a state that a crash would take back.
        await self.save(msgspec.structs.replace(batch, **fields))
        for name, value in fields.items():
            setattr(batch, name, value)
        if batch.is_ended and (place := self._places.pop(batch.id, None)) is not None:
            place.release()

    async def save(self, batch: StoredBatch) -> None:
        """Write a batch, durably. Raises ``OSError``."""
        data, path = sealed(msgspec.json.encode(batch)), self._path(batch)

        def write() -> None:
            write_atomically(path, data)
            if batch.status in ("cancelling", "cancelled"):
                path.with_suffix(_STOPPED).unlink(missing_ok=True)

        await self._disk.run(write)

    async def mark_cancelled(self, batch: StoredBatch, now: float) -> None:
        """Let a batch become ``cancelling``, durably, on a disk that has no room to write that.

        Raises ``OSError``; then it stays as it was. As for :meth:`change`, only the task that owns the batch may call
        this.

        ``now``: seconds since 1970.
        """
        path = self._path(batch)

        def mark() -> None:
            os.replace(path, path.with_suffix(_STOPPED))  # a name of the same length, for which no room is needed
            sync_directory(self._directory)

        await self._disk.run(mark, lambda _: batch.begin("cancelling", now))

    def _choose_dropped(self, tenant: str) -> list[StoredBatch]:
        """Return the ended batches that a new one displaces. No other call chooses them until they are dropped."""
        ended = [batch for batch in self.of(tenant) if batch.is_ended and batch.id not in self._dropped]
        num_open = self._limit(tenant).taken  # with those that are being written
        dropped = ended[: max(len(ended) + num_open - MAX_KEPT, 0)]
        self._dropped.update(batch.id for batch in dropped)
        return dropped

    def _limit(self, tenant: str) -> AdmissionLimit:
        return self._limits.setdefault(tenant, AdmissionLimit(MAX_OPEN))

    def _path(self, batch: StoredBatch) -> Path:
        return self._directory / (batch.id + _DESCRIPTION)

    def _scan(self) -> list[StoredBatch]:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.glob("*" + NEW):
            path.unlink()
        found: list[StoredBatch] = []
        for path in (*self._directory.glob("*" + _DESCRIPTION), *self._directory.glob("*" + _STOPPED)):
            is_stopped = path.suffix == _STOPPED
            if is_stopped and path.with_suffix(_DESCRIPTION).exists():
                path.unlink()  # what the batch became afterwards is written
                continue
            try:
                batch = msgspec.json.decode(unsealed(path.read_bytes()), type=StoredBatch)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
                batch = None
            if batch is not None and batch.id == path.stem and "validating" in batch.times:
                if is_stopped:
                    batch.begin("cancelling", path.stat().st_ctime)
                found.append(batch)
            else:  # of another version, or damaged: it is left for the operator
                log.warning("%s describes no batch and is ignored", path.name)
        return found
