"""Moves blocks between a device and the host through pinned memory, one half of which is copied while the other is
sent or filled."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenloom.engine_core.kv_cache.pool_memory import BlockIds, Bytes, DeviceMemory, Wait
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool

HALF_BYTES = 16 << 20
"""A device copies so much in less than a millisecond, which is long next to beginning a copy."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Describes a part of a batch: some blocks in some regions. Parts follow each other as a batch travels on a socket:
    region by region, and in each block by block."""

    regions: slice
    blocks: slice
    """Places in the list of the batch."""
    nbytes: int


def parts_of(num_regions: int, num_blocks: int, block_bytes: int, most_bytes: int) -> Iterator[StagedPart]:
    """Divide a batch of ``num_blocks`` blocks, of ``block_bytes`` in each region, into parts of at most ``most_bytes``,
    or of one block in one region if that is more."""
    if not num_blocks:
        return
    if num_blocks * block_bytes <= most_bytes:
        step = most_bytes // (num_blocks * block_bytes)
        for first in range(0, num_regions, step):
            last = min(first + step, num_regions)
            yield StagedPart(slice(first, last), slice(0, num_blocks), (last - first) * num_blocks * block_bytes)
        return
    step = max(1, most_bytes // block_bytes)
    for region in range(num_regions):
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            yield StagedPart(slice(region, region + 1), slice(first, last), (last - first) * block_bytes)


class Staging:
    """Holds two halves of pinned memory for one pool of a device. Belongs to one thread at a time."""

    def __init__(self, pool: KVPool, memory: DeviceMemory, half_bytes: int = 0) -> None:
        """``half_bytes``: 0: :data:`HALF_BYTES`."""
        self._memory = memory
        self._num_regions = len(pool.regions)
        self._block_bytes = pool.regions[0].block_bytes
        self._half_bytes = max(half_bytes or HALF_BYTES, self._block_bytes)
        self._halves = [memory.staging(self._half_bytes) for _ in range(2)]

    def send(self, block_ids: BlockIds, send: Callable[[Bytes], None]) -> None:
        """Call ``send`` with the bytes of blocks, part by part; the next part is copied meanwhile."""
        waiting: tuple[Wait, Bytes] | None = None
        try:
            for index, part in enumerate(self._parts(len(block_ids))):
                packed = self._halves[index % 2][: part.nbytes]
                begun = self._memory.start_read(block_ids[part.blocks], part.regions, packed), packed
                waiting, ready = begun, waiting
                if ready is not None:
                    ready[0]()
                    send(ready[1])
        finally:
            if waiting is not None:
                waiting[0]()  # nothing may write to the halves from now on, even after an error
        if waiting is not None:
            send(waiting[1])

    def receive(self, block_ids: BlockIds, fill: Callable[[Bytes, StagedPart], None]) -> None:
        """Call ``fill`` for the bytes of each part; the last part is copied meanwhile. Waits for all of them."""
        waits: list[Wait | None] = [None, None]
        try:
            for index, part in enumerate(self._parts(len(block_ids))):
                half = index % 2
                if (wait := waits[half]) is not None:
                    waits[half] = None
                    wait()
                packed = self._halves[half][: part.nbytes]
                fill(packed, part)
                waits[half] = self._memory.start_write(block_ids[part.blocks], part.regions, packed)
        finally:
            for rest in waits:
                if rest is not None:
                    rest()

    def _parts(self, num_blocks: int) -> Iterator[StagedPart]:
        return parts_of(self._num_regions, num_blocks, self._block_bytes, self._half_bytes)


class Stagings:
    """Lends stagings to threads that read into one pool, and keeps them for the next ones."""

    def __init__(self) -> None:
        self._idle: list[tuple[KVPool, Staging]] = []  # as many as threads that copied at once

    def receive(
        self, pool: KVPool, memory: DeviceMemory, ids: BlockIds, fill: Callable[[Bytes, StagedPart], None]
    ) -> None:
        """Do what :meth:`Staging.receive` does."""
        kept = self._take(pool) or Staging(pool, memory)
        try:
            kept.receive(ids, fill)
        finally:
            self._idle.append((pool, kept))

    def _take(self, pool: KVPool) -> Staging | None:
        try:
            found, staging = self._idle.pop()
        except IndexError:
            return None
        return staging if found is pool else None
