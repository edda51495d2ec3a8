"""Pools whose every block says where it is."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion

LAYOUT = "test/3x40+2x96"
SIZES = (40, 40, 40, 96, 96)
"""Bytes of a block in each region: two groups, the second of other size."""

MakePool = Callable[..., KVPool]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """``make(num_blocks, shared=False, layout=…, gap=0)``: random bytes, ``gap`` between regions."""
    memories = []

    def make(num_blocks: int, shared: bool = False, layout: str = LAYOUT, gap: int = 0, seed: int = 0) -> KVPool:
        regions, end = [], 0
        for size in SIZES:
            regions.append(KVRegion(end, size))
            end += size * num_blocks + gap
        memory = PoolMemory.allocate(end, shared)
        memories.append(memory)
        memory.buffer[:] = np.random.default_rng(seed).bytes(memory.nbytes)
        return KVPool(memory, tuple(regions), num_blocks, layout)

    yield make
    for memory in memories:
        memory.close()


def block(pool: KVPool, block_id: int) -> bytes:
    return b"".join(view[block_id].tobytes() for view in pool.views)


def blocks(pool: KVPool) -> list[bytes]:
    return [block(pool, block_id) for block_id in range(pool.num_blocks)]
