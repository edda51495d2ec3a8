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
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenloom.process.fall_backs import OF_PROCESS

from ..data.request import ParkedTokens
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.prefix_search import find_prefix, group_key
from ..kv_cache.state_slots import StateSlotPool
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


class TierHits(msgspec.Struct):
    """Lists what a request would load. The three lists are parallel, in the order of the block table."""

    num_blocks: int
    """Blocks of tokens in the prefix that the pool and the tier serve together."""
    positions: list[int]
    """Entries of the request's block table."""
    slots: list[int]
    keys: list[bytes]


def find_tier_hits(
    hash_of: Callable[[int], bytes],
    pool: BlockPool,
    find_slot: Callable[[bytes], int | None],
    first_block: int,
    limit: int,
    block_size: int,
) -> TierHits:
    """Return the longest prefix of which each group has the blocks that its window needs, in the pool or in the tier.

    Args:
        hash_of: Returns the hash of the block of tokens at an index below ``limit``.
        find_slot: Returns the tier's slot with a block's key.
        first_block: Blocks of tokens that the pool serves alone; the prefix is at least as long.
        limit: Most blocks of tokens that may be hit.
        block_size: Tokens per block.
    """

    def find(key: bytes) -> int | None:
        if (block_id := pool.find(key)) is not None:
            return block_id
        slot = find_slot(key)
        return None if slot is None else -1 - slot  # negative, so that it is no block of the pool

    # Blocks that a window left are evicted first, so the pool often has a prefix for full attention and the file has it
    # for the windows: only both together make a hit.
    table = find_prefix(hash_of, find, pool.windows, limit, block_size)
    begin = first_block * pool.num_groups
    positions = [position for position, found in enumerate(table[begin:], begin) if found < 0]
    return TierHits(
        num_blocks=len(table) // pool.num_groups,
        positions=positions,
        slots=[-1 - table[position] for position in positions],
        keys=[group_key(hash_of(position // pool.num_groups), position % pool.num_groups) for position in positions],
    )


class SavedStates:
    """Says which states the file has, and follows those that the pool evicts. Implements ``EvictionListener``."""

    def __init__(self, states: StateSlotPool, save: Callable[[int, bytes], None]) -> None:
        self.states = states
        self.index = TierIndex(0)
        self._save = save
        states.pool.listeners.append(self)

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        if self.index.find(block_hash) is not None:
            self.index.touch(block_hash)
        else:
            self._save(block_id, block_hash)

    def forgot(self, block_hash: bytes) -> None:
        self.index.remove(block_hash)

    def forgot_all(self) -> None:
        self.index.clear()


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
    is_parked: bool = False
    """Whether it is what a preempted request had."""


_PROMPT_TOKENS = 64
"""Steps of fewer tokens take the time of reading weights, and say little of what a token costs."""
_WEIGHT = 1 / 8
_IN_FLIGHT = 16
"""Steps in flight at most that are timed."""


class MoveCosts:
    """Learns what it takes to move bytes to the file and back, and to compute tokens, from what has ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` returns seconds."""
        self.clock = clock
        self.written = self.read = 0.0
        """Seconds a byte; 0: not measured."""
        self.computed = 0.0
        """Seconds a token."""
        self._begun: deque[tuple[int, int, float]] = deque(maxlen=_IN_FLIGHT)
        """Of steps in flight: number, tokens, and when it began."""
        self._ended = 0.0

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Learn from a write."""
        self.written = _learn(self.written, seconds / max(1, nbytes))

    def has_read(self, nbytes: int, seconds: float) -> None:
        """Learn from a read."""
        self.read = _learn(self.read, seconds / max(1, nbytes))

    def step_begins(self, step: int, num_tokens: int) -> None:
        """Note that a step begins when those before it have ended."""
        self._begun.append((step, num_tokens, self.clock()))

    def step_ended(self, step: int) -> None:
        """Learn from a step; those before it that have not ended have failed."""
        while self._begun and self._begun[0][0] <= step:
            number, num_tokens, begun = self._begun.popleft()
            if number == step:
                begun, self._ended = max(begun, self._ended), self.clock()
                if num_tokens >= _PROMPT_TOKENS:
                    self.computed = _learn(self.computed, (self._ended - begun) / num_tokens)

    def moves(self, nbytes: int, num_tokens: int) -> bool:
        """Return whether to write and to read so many bytes takes less time than to compute so many tokens again. What
        was not measured yet takes none, except for tokens."""
        return not self.computed or nbytes * (self.written + self.read) < num_tokens * self.computed


def _learn(known: float, found: float) -> float:
    return known + _WEIGHT * (found - known) if known else found


class ParkedFile:
    """Implements ``ParkedStore`` with a file: what a preempted request has computed goes there when the pools give it
    up, where that takes less time than to compute it again."""

    def __init__(
        self, costs: MoveCosts, is_kept: Callable[[ParkedTokens], bool], forget: Callable[[bytes], None]
    ) -> None:
        """``is_kept`` says whether all of a request's content is in the pools or in the file; ``forget`` gives up what
        the file has under a name of one request."""
        self._costs = costs
        self.has = is_kept
        self._forget = forget
        self.block_bytes = self.slot_bytes = 0

    def chooses(self, num_blocks: int, num_tokens: int) -> bool:
        return self._costs.moves(num_blocks * self.block_bytes + self.slot_bytes, num_tokens)

    def drop(self, parked: ParkedTokens) -> None:
        for name in (*parked.blocks, parked.slot):
            self._forget(name)


class OffloadTier:
    """Owns the file and its thread."""

    def __init__(
        self,
        directory: Path,
        num_slots: int,
        pool: KVPool,
        on_loaded: Callable[[TierLoad, int, str], None],
        num_states: int = 0,
        costs: MoveCosts | None = None,
    ) -> None:
        """
        Args:
            directory: The folder of the file, which is sparse until slots are used.
            num_slots: Those of blocks.
            num_states: Slots of states, whose numbers follow those of the blocks.
            on_loaded: Called on the tier's thread with each load, the number of its blocks that were read, and the
                reason if not all were, one of ``KV_FAILURES``.
            costs: Learns how long transfers take; None: they are not measured.

        Raises ``OSError`` if the file cannot be created.
        """
        self._pool = pool
        self._costs = MoveCosts() if costs is None else costs
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
        begun = self._costs.clock()
        try:
            _write(self._file.fileno(), transfer.data, self._offset(transfer.slot))
            self._costs.wrote(len(transfer.data), self._costs.clock() - begun)
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
        begun = self._costs.clock()
        for count, (slot, block_hash, block_id) in enumerate(columns):
            if failure := self._load_block(slot, block_hash, block_id):
                return count, failure
        if nbytes := self._pool.nbytes_of(transfer.block_ids):
            self._costs.has_read(nbytes, self._costs.clock() - begun)
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
            self._note_failure("a block came back with other bytes than were written")
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
