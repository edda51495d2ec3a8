"""Lists the layouts of KV pools whose blocks a benchmark moves."""

from dataclasses import dataclass

import numpy as np

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import IntArray, KVPool, KVRegion


@dataclass(frozen=True)
class Shape:
    """Describes a pool's layout, and how much of the pool moves at once."""

    name: str
    num_regions: int
    block_bytes: int
    """The bytes of a block in each region."""
    pool_bytes: int = 256 << 20

    @property
    def num_blocks(self) -> int:
        return self.pool_bytes // (self.num_regions * self.block_bytes)

    def make_pool(self, shared: bool) -> KVPool:
        size = self.num_blocks * self.block_bytes
        memory = PoolMemory.allocate(self.num_regions * size, shared)
        regions = tuple(KVRegion(index * size, self.block_bytes) for index in range(self.num_regions))
        return KVPool(memory, regions, self.num_blocks, self.name)

    def fill(self, pool: KVPool) -> None:
        """Write each block's number into every region of it."""
        for region, view in enumerate(pool.views):
            view.view(np.uint32)[:] = (np.arange(self.num_blocks, dtype=np.uint32) * 64 + region)[:, None]

    def scatter(self, seed: int) -> IntArray:
        """Return a quarter of the blocks, in random order."""
        return np.random.default_rng(seed).permutation(self.num_blocks)[: self.num_blocks // 4]


SHAPES = (
    Shape("28 layers x 2 x 32 KiB (0.6b)", 56, 32 << 10),
    Shape("6 layers x 2 x 4 KiB", 12, 4 << 10),
    Shape("2 MiB in one piece", 1, 2 << 20),
    Shape("64 KiB in one piece", 1, 64 << 10),
)
