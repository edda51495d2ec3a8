"""Which blocks are named by hashes."""

from tokenloom.request.prefix_schedule import (
    LEADING_BLOCKS,
    MAX_BLOCKS,
    MAX_HASHES,
    block_hashes,
    prefix_hashes,
    scheduled,
)


def test_a_short_prompt_is_named_block_by_block() -> None:
    assert scheduled(range(100)) == list(range(100))


def test_a_long_prompt_is_named_to_beyond_32_k_tokens_with_256_hashes() -> None:
    named = scheduled(range(3000))
    assert (len(named), MAX_HASHES, len(LEADING_BLOCKS)) == (256, 256, 257)
    assert named[:130] == [*range(128), 129, 131]
    assert named[-1] == MAX_BLOCKS - 1
    assert MAX_BLOCKS * 16 > 32_768
    assert [block + 1 for block in named] == list(LEADING_BLOCKS[1:])


def test_no_hash_stands_for_blocks_that_the_prompt_does_not_have() -> None:
    assert scheduled(range(129)) == list(range(128))
    assert scheduled(range(130)) == [*range(128), 129]
    assert scheduled([]) == []


def test_hashes_travel_as_their_first_eight_bytes_of_the_blocks_that_are_named() -> None:
    token_ids = list(range(4 * (MAX_BLOCKS + 2)))
    hashes = block_hashes(token_ids, 4, salt=b"s")
    found = prefix_hashes(token_ids, 4, b"s")
    assert found == [int.from_bytes(hashes[blocks - 1][:8], "little") for blocks in LEADING_BLOCKS[1:]]
    assert prefix_hashes(token_ids[:3], 4) == []
