"""The pools of ranks in processes of their own are one pool to other engines."""

import mmap
import os

import numpy as np
import pytest

from tokenloom.engine_core.executor.ranks import RankPool, RankPools
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion

REGIONS = [KVRegion(0, 8), KVRegion(80, 16)]
PART = RankPool(REGIONS, 10, "a")


def test_the_merged_pool_has_the_regions_of_all_ranks() -> None:
    pools = RankPools(2)
    part_bytes = pools.allocate(240)
    assert part_bytes == mmap.PAGESIZE
    pool = pools.merge([PART, RankPool(REGIONS, 10, "b")])
    assert pool.regions == (
        *REGIONS,
        KVRegion(part_bytes, 8),
        KVRegion(part_bytes + 80, 16),
    )
    assert (pool.num_blocks, pool.layout, pool.block_bytes) == (10, "a+b", 48)
    pools.close()


def test_a_rank_and_the_core_see_the_same_bytes() -> None:
    pools = RankPools(2)
    part_bytes = pools.allocate(240)
    pool = pools.merge([PART, PART])
    second = KVPool(PoolMemory.of_part(pools.fd, part_bytes, part_bytes), tuple(REGIONS), 10, "a")
    second.views[1][3] = 7
    assert (pool.views[3][3] == 7).all()
    pool.views[2][9] = 5
    assert (second.views[0][9] == 5).all()
    pool.views[0][0] = 1
    second.memory.discard()  # as a rank does when it goes to sleep
    assert not np.frombuffer(second.memory.buffer, dtype=np.uint8).any()
    assert not pool.views[3].any()
    assert (pool.views[0][0] == 1).all(), "the other rank's part"
    pools.close()


def test_readers_get_a_descriptor_that_cannot_write() -> None:
    pools = RankPools(1)
    pools.allocate(240)
    memory = pools.merge([PART]).memory
    assert memory.fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, memory.nbytes)
    pools.close()
    pools.close()
    assert memory.fd is None


def test_ranks_that_differ_in_their_blocks_are_refused() -> None:
    pools = RankPools(2)
    pools.allocate(240)
    with pytest.raises(ValueError, match=r"have \[\(8, 0\), \(10, 0\)\] blocks and slots"):
        pools.merge([PART, RankPool(REGIONS, 8, "a")])
    pools.close()


def test_memory_that_was_never_allocated_is_closed_too() -> None:
    pools = RankPools(1)
    fd = pools.fd
    pools.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_slots_of_the_ranks_are_one_slot() -> None:
    pools = RankPools(2)
    part_bytes = pools.allocate(240)
    part = RankPool([*REGIONS, KVRegion(300, 24, is_state=True)], 10, "a", num_slots=3)
    pool = pools.merge([part, part])
    assert (pool.num_slots, pool.slot_bytes, pool.block_bytes) == (3, 48, 48)
    pool.rows(10 + 2)[1][:] = 9
    assert bytes(pool.host.buffer[part_bytes + 348 : part_bytes + 372]) == b"\x09" * 24
    pools.close()
