"""A second tier for KV blocks: a file of slots, each as large as a block, and the thread that reads and writes it.

Jobs are done in the order they were given, so a slot may be given to another block while its old content is still being
read: the read was given first. The file has no name: it ends with the engine, however that ends.
"""

import logging
import os
import queue
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from .kv_transport import KVPool

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 64 << 20
"""Of saves that wait for the file; more are dropped, for a save is only worth what it costs while the engine works."""
_JOIN_SECONDS = 30.0


class TierIndex:
    """Which slot holds which content, least recently used first. Used from one thread."""

    def __init__(self, num_slots: int) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))

    def find(self, block_hash: bytes) -> int | None:
        return self._slots.get(block_hash)

    def touch(self, block_hash: bytes) -> None:
        """It was of use."""
        self._slots.move_to_end(block_hash)

    def add(self, block_hash: bytes) -> int:
        """A slot for new content; the least recently used gives way."""
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[block_hash] = slot
        return slot

    def remove(self, block_hash: bytes) -> None:
        """What was written, or was to be, cannot be read."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        self._free.extend(self._slots.values())
        self._slots.clear()


class TierSave(msgspec.Struct):
    """Writes a block's content, which the caller took out of the pool."""

    slot: int
    block_hash: bytes
    data: bytes


class TierLoad(msgspec.Struct):
    """Reads slots into blocks of the pool, one after the other until one fails."""

    request_id: str
    slots: list[int]
    block_hashes: list[bytes]
    block_ids: list[int]
    first_block: int
    """Of the request's."""


class OffloadTier:
    """The file and its thread."""

    def __init__(
        self, directory: Path, num_slots: int, pool: KVPool, on_loaded: Callable[[TierLoad, int, str], None]
    ) -> None:
        """Args:
            directory: Where the file lies, sparse until slots are used.
            on_loaded: Called on the tier's thread with each load, how many of its blocks were read, and, if not all,
                why: one of ``KV_FAILURES``.

        Raises ``OSError`` where no file can be made.
        """
        self._pool = pool
        self._slot_bytes = pool.block_bytes
        self._on_loaded = on_loaded
        # Closed by close(): it lives as long as the tier.
        self._file: BinaryIO = tempfile.TemporaryFile(dir=directory, buffering=0, prefix="tokenloom-kv-")  # noqa: SIM115
        self._contents: dict[int, tuple[bytes, int]] = {}
        """Slot → (hash, CRC-32) of what was written. Touched by the thread only."""
        self._pending_bytes = 0
        self._lock = threading.Lock()
        # Saves are bounded by their bytes, loads by the requests that wait for them.
        self._jobs: queue.SimpleQueue[TierSave | TierLoad | None] = queue.SimpleQueue()
        self._closed = False
        os.ftruncate(self._file.fileno(), num_slots * self._slot_bytes)
        self._thread = threading.Thread(target=self._run, name="kv-offload", daemon=True)
        self._thread.start()

    def has_room(self, num_saves: int) -> bool:
        """Whether the file keeps up, so that so many saves may be given."""
        return self._pending_bytes + num_saves * self._slot_bytes <= MAX_PENDING_BYTES

    def save(self, job: TierSave) -> None:
        """To be written, when all that was given before is done."""
        with self._lock:
            self._pending_bytes += len(job.data)
        self._jobs.put(job)

    def load(self, job: TierLoad) -> None:
        """To be read, when all that was given before is done."""
        self._jobs.put(job)

    def close(self) -> None:
        """Leaves what waits undone and waits for what is being done. Idempotent."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(_JOIN_SECONDS)
        self._file.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            if isinstance(job, TierLoad):
                self._on_loaded(job, *self._load(job))
            else:
                self._save(job)

    def _save(self, job: TierSave) -> None:
        self._contents.pop(job.slot, None)
        try:
            _write(self._file.fileno(), job.data, job.slot * self._slot_bytes)
            self._contents[job.slot] = (job.block_hash, zlib.crc32(job.data))
        except OSError as error:
            # Its loads will fail one by one, and be computed instead.
            logger.warning("could not write a KV block to the offload file: %s", error)
        finally:
            with self._lock:
                self._pending_bytes -= len(job.data)

    def _load(self, job: TierLoad) -> tuple[int, str]:
        columns = zip(job.slots, job.block_hashes, job.block_ids, strict=True)
        for count, (slot, block_hash, block_id) in enumerate(columns):
            if failure := self._load_block(slot, block_hash, block_id):
                return count, failure
        return len(job.slots), ""

    def _load_block(self, slot: int, block_hash: bytes, block_id: int) -> str:
        written_hash, crc = self._contents.get(slot, (b"", 0))
        if written_hash != block_hash:
            return "not_found"
        # A file's mapping would stall the reader page by page; this fills the block where it lies.
        rows = [view[block_id] for view in self._pool.views]
        try:
            count = os.preadv(self._file.fileno(), rows, slot * self._slot_bytes)
        except OSError as error:
            logger.warning("could not read a KV block from the offload file: %s", error)
            return "transport"
        if count != self._slot_bytes:
            return "transport"
        return "" if self._pool.checksum(block_id) == crc else "checksum"


def _write(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count
