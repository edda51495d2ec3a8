import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import (
    KVPool,
    KVRegion,
    KVTransferError,
    checked_pairs,
    copy_blocks,
    region_planes,
)


def make_pool(num_blocks: int, sizes: list[int], gap: int = 0, seed: int = 0) -> KVPool:
    regions, end = [], 0
    for size in sizes:
        regions.append(KVRegion(end, size))
        end += num_blocks * size + gap
    memory = PoolMemory.allocate(end, shared=False)
    memory.buffer[:] = np.random.default_rng(seed).bytes(memory.nbytes)
    return KVPool(memory, tuple(regions), num_blocks, "test")


def content(pool: KVPool, block_id: int) -> bytes:
    regions = [(region.offset + block_id * region.block_bytes, region.block_bytes) for region in pool.regions]
    return b"".join(bytes(pool.memory.buffer[at : at + size]) for at, size in regions)


@pytest.mark.parametrize(
    ("sizes", "gap", "shapes"),
    [
        ([8], 0, [(1, 5, 8)]),
        ([8, 8, 8], 0, [(3, 5, 8)]),
        ([8, 8, 8], 24, [(3, 5, 8)]),
        ([8, 8, 16, 16, 8], 0, [(2, 5, 8), (2, 5, 16), (1, 5, 8)]),
    ],
)
def test_planes_join_regions_of_equal_size_and_distance(
    sizes: list[int], gap: int, shapes: list[tuple[int, int, int]]
) -> None:
    pool = make_pool(5, sizes, gap)
    assert [plane.shape for plane in pool.planes] == shapes
    assert [view.shape for view in pool.views] == [(5, size) for size in sizes]
    for block_id in range(5):
        assert b"".join(view[block_id].tobytes() for view in pool.views) == content(pool, block_id)
        assert pool.checksums([block_id]) == [zlib.crc32(content(pool, block_id))]


def test_regions_that_go_back_or_jump_are_planes_of_their_own() -> None:
    memory = PoolMemory.allocate(4096, shared=False)
    regions = [KVRegion(at, 8) for at in (0, 100, 200, 350, 50)]
    assert [len(plane) for plane in region_planes(memory.buffer, regions, 4)] == [3, 1, 1]


@pytest.mark.parametrize("region", [KVRegion(-1, 8), KVRegion(0, 0), KVRegion(4096 - 39, 8), KVRegion(0, -8)])
def test_a_pool_refuses_regions_beyond_its_memory(region: KVRegion) -> None:
    with pytest.raises(ValueError, match="KV region"):
        KVPool(PoolMemory.allocate(4096, shared=False), (region,), 5, "test")


@pytest.mark.parametrize("region", [KVRegion(-8, 8), KVRegion(4090, 8), KVRegion(0, 1 << 62), KVRegion(1 << 70, 8)])
def test_planes_refuse_regions_beyond_the_buffer(region: KVRegion) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        region_planes(PoolMemory.allocate(4096, shared=False).buffer, [region], 5)


PAIRS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 8)), max_size=12, unique_by=lambda pair: pair[1])


@given(pairs=PAIRS, gap=st.sampled_from([0, 8]), sizes=st.sampled_from([[16], [8, 8], [8, 8, 24]]))
def test_copies_just_the_blocks_named(pairs: list[tuple[int, int]], gap: int, sizes: list[int]) -> None:
    source, target = make_pool(12, sizes, seed=1), make_pool(9, sizes, gap, seed=2)
    expected = [content(target, block_id) for block_id in range(9)]
    for there, here in pairs:
        expected[here] = content(source, there)
    copy_blocks(source.planes, [there for there, _ in pairs], target.planes, [here for _, here in pairs])
    assert [content(target, block_id) for block_id in range(9)] == expected


@given(st.integers(0, 10), st.integers(0, 10), st.integers(1, 8))
def test_copies_runs_at_once(begin: int, to: int, count: int) -> None:
    source, target = make_pool(20, [8, 8], seed=1), make_pool(20, [8, 8], seed=2)
    copy_blocks(source.planes, range(begin, begin + count), target.planes, range(to, to + count))
    assert [content(target, to + i) for i in range(count)] == [content(source, begin + i) for i in range(count)]


def test_copies_between_pools_whose_planes_differ() -> None:
    memory = PoolMemory.allocate(4096, shared=False)
    source = make_pool(4, [8, 8, 8], seed=3)
    target = KVPool(memory, tuple(KVRegion(at, 8) for at in (0, 100, 700)), 4, "test")
    copy_blocks(source.planes, [0, 1, 2], target.planes, [3, 1, 2])
    assert [content(target, i) for i in (3, 1, 2)] == [content(source, i) for i in (0, 1, 2)]


def test_pairs_must_agree() -> None:
    pool = make_pool(4, [8])
    with pytest.raises(KVTransferError, match="cannot read 2 blocks into 1"):
        checked_pairs([0, 1], 9, [0], pool)
    [(is_state, source, target)] = checked_pairs([8], 9, [3], pool)
    assert (is_state, source.tolist(), target.tolist()) == (False, [8], [3])


def test_an_error_names_its_reason() -> None:
    error = KVTransferError("layout", "the owner has A, this engine B")
    assert error.reason == "layout"
    assert str(error) == "layout: the owner has A, this engine B"


def test_slots_have_regions_and_ids_of_their_own() -> None:
    memory = PoolMemory.allocate(4096, shared=False)
    regions = (KVRegion(0, 8), KVRegion(100, 40, is_state=True), KVRegion(300, 16, is_state=True))
    source, target = (KVPool(memory, regions, count, "test", 4) for count in (6, 5))
    assert (source.block_bytes, source.slot_bytes, source.nbytes_of([5, 6, 9])) == (8, 56, 8 + 2 * 56)
    source.rows(6 + 2)[0][:] = 7
    assert (target.rows(5 + 2)[0] == 7).all()
    pairs = checked_pairs([5, 1, 9], 6, [0, 2, 5], target, 4)
    assert [(each.is_state, each.source.tolist(), each.target.tolist()) for each in pairs] == [
        (False, [5, 1], [0, 2]),
        (True, [3], [0]),
    ]
    with pytest.raises(KVTransferError, match="a slot cannot be read into a block"):
        checked_pairs([5, 6], 6, [5, 0], target, 4)
    with pytest.raises(KVTransferError, match="exceed"):
        checked_pairs([10], 6, [5], target, 4)
