"""Which blocks are named by hashes."""

from tokenloom.request.prefix_schedule import (
    LEADING_BLOCKS,
    MAX_BLOCKS,
    MAX_HASHES,
    MediaTokens,
    block_hashes,
    hash_block,
    media_salt,
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


IMAGE = [MediaTokens(2, 4, 0, b"k"), MediaTokens(6, 1, 4, b"k"), MediaTokens(9, 12, 0, b"other")]


def test_the_salt_of_a_block_covers_key_row_and_place() -> None:
    at = {start: media_salt(b"s", IMAGE, start, start + 4) for start in range(0, 28, 4)}
    assert at[24] == b"s"
    assert len(set(at.values())) == 7
    moved = [span._replace(position=span.position + 4) for span in IMAGE]
    assert media_salt(b"s", moved, 0, 4) == b"s"
    assert media_salt(b"s", moved, 4, 8) == at[0]
    for changed in ({"key": b"l"}, {"row_offset": 1}, {"num_tokens": 1}, {"position": 3}):
        assert media_salt(b"s", [IMAGE[0]._replace(**changed)], 0, 4) != at[0]
    assert media_salt(b"", IMAGE, 0, 4) != at[0]
    assert media_salt(b"s", [], 0, 4) == b"s"


def test_images_change_the_blocks_that_hold_them_and_those_behind() -> None:
    ids = list(range(28))
    plain, image = block_hashes(ids, 4, b"seed", b"s"), block_hashes(ids, 4, b"seed", b"s", [IMAGE[2]])
    assert [one == other for one, other in zip(plain, image, strict=True)] == [True] * 2 + [False] * 5
    parent = b"seed"
    for start, found in zip(range(0, 28, 4), image, strict=True):
        salt = media_salt(b"s", [IMAGE[2]], start, start + 4)
        parent = hash_block(parent, ids[start : start + 4], salt)
        assert found == parent
    assert prefix_hashes(ids, 4, b"s", IMAGE) == [
        int.from_bytes(each[:8], "little") for each in block_hashes(ids, 4, salt=b"s", media=IMAGE)
    ]
