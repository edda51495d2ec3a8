"""A second tier for KV blocks, and for states: a file of slots, each as large as a block or, behind those, as a state,
and the thread that reads and writes it.

Jobs are processed in order, so a slot may be assigned to another block while a read of its old content is still
waiting: the read comes first. The file has no name, so it disappears with the engine in any case.
"""

import os
import queue
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenloom.process.fall_backs import OF_PROCESS

from .kv_transport import KVPool

# A disk slower than the evictions would otherwise fill the host's memory with copies of blocks.
MAX_PENDING_BYTES = 64 << 20
"""Limit of saves that wait for the file; further ones are dropped, because a save must not slow the engine down."""
RECOVERED_SECONDS = 60.0
"""After so long without a failure, a block that is written shows that the file works again."""
_JOIN_SECONDS = 30.0


class TierIndex:
    """Maps content to slots, least recently used first. Used from one thread."""

    def __init__(self, num_slots: int, first: int = 0) -> None:
        """``first``: the lowest of the slots."""
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(first + num_slots - 1, first - 1, -1))
        self.find: Callable[[bytes], int | None] = self._slots.get
        """Returns the slot of this content; None if it has none."""
        self.touch: Callable[[bytes], None] = self._slots.move_to_end
        """Marks this content as recently used."""

    def add(self, block_hash: bytes) -> int:
        """Assign a slot to new content, replacing the least recently used content if necessary."""
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[block_hash] = slot
        return slot

    def remove(self, block_hash: bytes) -> None:
        """Remove content that cannot be read."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Remove all content."""
        self._free.extend(self._slots.values())
        self._slots.clear()


class TierSave(msgspec.Struct):
    """Writes the content of a block or a state, which the caller has copied out of the pool."""

    slot: int
    block_hash: bytes
    data: bytes


class TierLoad(msgspec.Struct):
    """Reads slots into blocks of the pool, in order, until one fails."""

    request_id: str
    slots: list[int]
    block_hashes: list[bytes]
    block_ids: list[int]
    positions: Sequence[int]
    """Entries of the request's block table that the blocks fill; a state fills the one behind the blocks."""


class OffloadTier:
    """Owns the file and its thread."""

    def __init__(
        self,
        directory: Path,
        num_slots: int,
        pool: KVPool,
        on_loaded: Callable[[TierLoad, int, str], None],
        num_states: int = 0,
    ) -> None:
        """
        Args:
            directory: The folder of the file, which is sparse until slots are used.
            num_slots: Those of blocks.
            num_states: Slots of states, whose numbers follow those of the blocks.
            on_loaded: Called on the tier's thread with each load, the number of its blocks that were read, and the
                reason if not all were, one of ``KV_FAILURES``.

        Raises ``OSError`` if the file cannot be created.
        """
        self._pool = pool
        self._num_slots = num_slots
        self._on_loaded = on_loaded
        # close() closes it: the file lives as long as the tier.
        self._file: BinaryIO = tempfile.TemporaryFile(dir=directory, buffering=0, prefix="tokenloom-kv-")  # noqa: SIM115
        self._contents: dict[int, tuple[bytes, int]] = {}
        """By slot: (hash, CRC-32) of the written content. Only the tier's thread uses it."""
        self._failed_at: float | None = None
        self._pending_bytes = 0
        self._lock = threading.Lock()
        # Saves are bounded by their bytes, loads by the requests that wait for them.
        self._transfers: queue.SimpleQueue[TierSave | TierLoad | None] = queue.SimpleQueue()
        self._closed = False
        os.ftruncate(self._file.fileno(), self._offset(num_slots + num_states))
        self._thread = threading.Thread(target=self._run, name="kv-offload", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether transfers wait for the file."""
        return not self._transfers.empty()

    def has_room(self, nbytes: int) -> bool:
        """Return whether saves of so many more bytes may wait. A state may be larger than the limit, and then waits
        alone."""
        return self._pending_bytes + nbytes <= max(MAX_PENDING_BYTES, self._pool.slot_bytes)

    def save(self, transfer: TierSave) -> None:
        """Write a block after all earlier transfers."""
        with self._lock:
            self._pending_bytes += len(transfer.data)
        self._transfers.put(transfer)

    def load(self, transfer: TierLoad) -> None:
        """Read blocks after all earlier transfers."""
        self._transfers.put(transfer)

    def close(self) -> None:
        """Drop waiting transfers and wait for the one in progress. Idempotent."""
        self._closed = True
        self._transfers.put(None)
        self._thread.join(_JOIN_SECONDS)
        self._file.close()

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None and not self._closed:
            if isinstance(transfer, TierLoad):
                self._on_loaded(transfer, *self._load(transfer))
            else:
                self._save(transfer)

    def _save(self, transfer: TierSave) -> None:
        # First: a write that fails halfway must leave a slot that no load takes for its old content.
        self._contents.pop(transfer.slot, None)
        try:
            _write(self._file.fileno(), transfer.data, self._offset(transfer.slot))
            self._contents[transfer.slot] = (transfer.block_hash, zlib.crc32(transfer.data))
            self._note_success()
        except OSError as error:
            # Loads of this block will fail, and its tokens will be computed instead.
            self._note_failure(f"it could not be written: {error}")
        finally:
            with self._lock:
                self._pending_bytes -= len(transfer.data)

    def _load(self, transfer: TierLoad) -> tuple[int, str]:
        columns = zip(transfer.slots, transfer.block_hashes, transfer.block_ids, strict=True)
        for count, (slot, block_hash, block_id) in enumerate(columns):
            if failure := self._load_block(slot, block_hash, block_id):
                return count, failure
        return len(transfer.slots), ""

    def _load_block(self, slot: int, block_hash: bytes, block_id: int) -> str:
        written_hash, crc = self._contents.get(slot, (b"", 0))
        # The slot was given to other content after this load was planned. The transfer order makes that rare and not
        # impossible.
        if written_hash != block_hash:
            return "not_found"
        # Read directly into the block: a mapping of the file would stall the reader page by page.
        rows = [row.data for row in self._pool.rows(block_id)]
        try:
            count = os.preadv(self._file.fileno(), rows, self._offset(slot))
        except OSError as error:
            self._note_failure(f"it could not be read: {error}")
            return "transport"
        if count != self._offset(slot + 1) - self._offset(slot):
            return "transport"
        # Wrong KV would show only as wrong text, so what comes back from the disk is compared with what was written.
        if self._pool.checksums([block_id]) != [crc]:
            return "checksum"
        self._pool.spread([block_id])
        return ""

    def _offset(self, slot: int) -> int:
        """Return where a slot begins in the file."""
        num_states = max(0, slot - self._num_slots)
        return (slot - num_states) * self._pool.block_bytes + num_states * self._pool.slot_bytes

    def _note_failure(self, detail: str) -> None:
        self._failed_at = time.monotonic()
        OF_PROCESS.begin("offload_file", detail)

    def _note_success(self) -> None:
        # Blocks that were written already can be written again on a disk that is full: the sign would come and go, with
        # two lines in the log each time.
        if self._failed_at is not None and time.monotonic() - self._failed_at > RECOVERED_SECONDS:
            self._failed_at = None
            OF_PROCESS.end("offload_file")


def _write(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count
