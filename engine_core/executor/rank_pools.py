"""Holds the KV pools of workers in processes of their own: one shared memory, of which each rank has an equal part.

The core's process makes the memory, and moves blocks in and out of it. A worker inherits its descriptor, lays its cache
out in its part, and reports where the blocks are. To other engines the parts are one pool, whose block i is block i of
every rank.
"""

import os
from collections.abc import Sequence

import msgspec

from ..data.handshake import WarmUp
from ..data.kv_cache_config import KVCacheConfig
from ..kv_cache.pool_memory import PoolMemory, create_memfd, whole_pages
from ..kv_transfer.kv_transport import KVPool, KVRegion
from .worker import Worker


class RankPool(msgspec.Struct, frozen=True):
    """Describes the pool that one rank has registered, for the core."""

    regions: list[KVRegion]
    """With offsets relative to the rank's part."""
    num_blocks: int
    layout: str
    """``ModelInfo.kv_layout`` of this rank."""
    warm_up: WarmUp = WarmUp()
    """What the rank computed after it had made the pool."""


def make_rank_pool(worker: Worker, kv_cache: KVCacheConfig, memory: PoolMemory) -> RankPool:
    """Make the pool of a rank in its part of the memory, and return where its blocks are."""
    warm_up = worker.initialize_kv_cache(kv_cache, memory)
    pool = worker.kv_pool()
    return RankPool(list(pool.regions), pool.num_blocks, pool.layout, warm_up)


class RankPools:
    """Owns the memory of all ranks' pools."""

    def __init__(self, world_size: int) -> None:
        """Create the memory, which is empty until :meth:`allocate`. Raises ``OSError`` if the system has none.

        Attributes:
            fd: The descriptor that the workers inherit.
        """
        self._world_size = world_size
        # One memory for all ranks, so that the core moves blocks with one set of transports. In vLLM each worker has
        # its own, and a reader connects to every rank. The price: no huge pages on most kernels.
        self.fd = create_memfd()
        self._memory: PoolMemory | None = None
        self._part_bytes = 0

    def allocate(self, nbytes: int) -> int:
        """Give each rank ``nbytes``. Returns the size of a part, in whole pages: that of rank r begins at r times it.
        Called once."""
        # A part begins on a page, because mmap takes no other offset.
        self._part_bytes = whole_pages(nbytes)
        self._memory = PoolMemory.of_memfd(self.fd, self._part_bytes * self._world_size)
        return self._part_bytes

    def merge(self, parts: Sequence[RankPool]) -> KVPool:
        """Return the pool that consists of what the ranks have registered, in order of their ranks.

        Raises ``ValueError`` if the ranks differ in their number of blocks.
        """
        assert self._memory is not None, "allocate comes first"
        counts = {part.num_blocks for part in parts}
        if len(counts) != 1:
            raise ValueError(f"the ranks' KV pools have {sorted(counts)} blocks; all need the same number")
        regions = tuple(
            KVRegion(rank * self._part_bytes + region.offset, region.block_bytes)
            for rank, part in enumerate(parts)
            for region in part.regions
        )
        return KVPool(self._memory, regions, counts.pop(), merged_layout([part.layout for part in parts]))

    def close(self) -> None:
        """Close the descriptors; views of the memory stay valid. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._memory is not None:
            self._memory.close()


def merged_layout(layouts: Sequence[str]) -> str:
    """Return the layout of a pool whose parts have these layouts, in order of their ranks."""
    # Engines exchange blocks by the name of the layout, so those with other numbers of ranks refuse each other.
    return "+".join(layouts)
