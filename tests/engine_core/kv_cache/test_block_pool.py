import pytest

from tokenloom.engine_core.data.kv_groups import NULL_BLOCK
from tokenloom.engine_core.kv_cache.block_pool import BlockPool


def fill(pool: BlockPool, *hashes: bytes) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.register(block_id, block_hash)
    return block_ids


def test_counts_and_usage() -> None:
    pool = BlockPool(4)
    assert (pool.num_free, pool.usage) == (4, 0.0)
    block_ids = pool.allocate(3)
    assert len(set(block_ids)) == 3
    assert (pool.num_free, pool.usage) == (1, 0.75)
    pool.release(block_ids)
    assert (pool.num_free, pool.usage) == (4, 0.0)


def test_blank_blocks_go_first_then_the_longest_free() -> None:
    pool = BlockPool(5)
    old, new = fill(pool, b"old"), fill(pool, b"new")
    blank = pool.allocate(1)
    pool.release(old)
    pool.release(new)
    pool.release(blank)
    order = pool.allocate(5)
    assert order[0] == blank[0]
    assert order[3:] == old + new


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    sequence = fill(pool, b"1", b"2", b"3")
    pool.release(sequence)
    assert pool.allocate(1) == sequence[2:]
    assert pool.find(b"3") is None
    assert [pool.find(b"1"), pool.find(b"2")] == sequence[:2]


def test_a_hit_takes_a_block_off_the_free_list() -> None:
    pool = BlockPool(2)
    (block_id,) = fill(pool, b"x")
    pool.release([block_id])
    assert pool.find(b"x") == block_id
    assert pool.count_free([block_id]) == 1
    pool.share([block_id])
    assert (pool.num_free, pool.count_free([block_id])) == (1, 0)
    assert pool.allocate(1) != [block_id]


def test_a_shared_block_is_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(1)
    block_ids = fill(pool, b"x")
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 0
    pool.release(block_ids)
    assert pool.num_free == 1


def test_equal_content_keeps_its_first_block() -> None:
    pool = BlockPool(3)
    first, second = fill(pool, b"x"), fill(pool, b"x")
    assert pool.find(b"x") == first[0]
    pool.release(second)
    assert pool.allocate(1) == second, "a private copy is worth nothing once it is free"
    assert pool.find(b"x") == first[0]


def test_a_generation_ends_when_the_block_is_given_out_anew() -> None:
    pool = BlockPool(1)
    block_ids = fill(pool, b"x")
    generation = pool.generations[block_ids[0]]
    pool.release(block_ids)
    pool.share(block_ids)
    assert pool.generations[block_ids[0]] == generation
    pool.release(block_ids)
    pool.allocate(1)
    assert pool.generations[block_ids[0]] != generation


def test_forgetting_leaves_holders_alone() -> None:
    pool = BlockPool(3)
    held, free = fill(pool, b"held"), fill(pool, b"free")
    pool.release(free)
    pool.forget_all()
    assert pool.find(b"held") is None
    assert pool.find(b"free") is None
    assert pool.num_free == 2
    pool.release(held)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_wrong_content_is_forgotten_wherever_it_is() -> None:
    forgotten: list[bytes] = []

    class Listener:
        def evicted(self, block_id: int, block_hash: bytes) -> None:
            raise AssertionError("it would be saved elsewhere")

        def forgot(self, block_hash: bytes) -> None:
            forgotten.append(block_hash)

        def forgot_all(self) -> None:
            raise AssertionError("the rest is right")

    pool = BlockPool(4)
    pool.listeners.append(Listener())
    wrong, right = fill(pool, b"1", b"2"), fill(pool, b"3")
    blank = pool.allocate(1)
    pool.forget([*wrong, *blank])
    assert forgotten == [b"1", b"2"]
    assert [pool.find(each) for each in (b"1", b"2", b"3")] == [None, None, right[0]]
    pool.release([*wrong, *blank])
    assert sorted(pool.allocate(3)) == sorted([*wrong, *blank])


def test_misuse_is_detected() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 are free"):
        pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block_ids)


def test_the_null_block_of_groups_is_never_free() -> None:
    pool = BlockPool(4, (None, 8))
    assert (pool.num_blocks, pool.num_free, pool.usage) == (3, 3, 0.0)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    pool.share([NULL_BLOCK, 1])
    pool.release([NULL_BLOCK, NULL_BLOCK, 1, 1])
    assert pool.num_free == 1
    assert pool.allocate(1) == [1]


def test_a_null_block_for_dummy_batches_is_never_free() -> None:
    pool = BlockPool(4, has_null_block=True)
    assert (pool.num_blocks, pool.num_free, pool.num_groups) == (3, 3, 1)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
