"""Block hashes: chained, salted, and the same block by block."""

import hashlib
import struct

import pytest

from tokenloom.request.prefix_schedule import block_hashes, hash_block


def test_the_rule_is_sha256_over_parent_tokens_and_salt() -> None:
    first = hashlib.sha256(b"seed" + struct.pack("<2I", 1, 2) + b"salt").digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**32 - 1) + b"salt").digest()
    assert block_hashes([1, 2, 3, 2**32 - 1, 5], 2, b"seed", b"salt") == [first, second]


@pytest.mark.parametrize(("seed", "salt"), [(b"", b""), (b"seed", b""), (b"", b"tenant"), (b"seed", b"tenant")])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 64, 1000])
def test_block_by_block_gives_the_same(length: int, seed: bytes, salt: bytes) -> None:
    token_ids = [(i * 2654435761) % 2**32 for i in range(length)]
    hashes = block_hashes(token_ids, 4, seed, salt)
    assert len(hashes) == length // 4
    parent = seed
    for index, found in enumerate(hashes):
        parent = hash_block(parent, token_ids[4 * index : 4 * index + 4], salt)
        assert found == parent


def test_equal_up_to_the_first_difference() -> None:
    one, two = list(range(16)), [*range(9), 99, *range(10, 16)]
    equal = [a == b for a, b in zip(block_hashes(one, 4), block_hashes(two, 4), strict=True)]
    assert equal == [True, True, False, False]


def test_equal_blocks_after_different_prefixes_differ() -> None:
    assert block_hashes([1, 2, 9, 9], 2)[1] != block_hashes([3, 4, 9, 9], 2)[1]


def test_a_salt_changes_every_block() -> None:
    assert not set(block_hashes(range(16), 4, b"", b"a")) & set(block_hashes(range(16), 4, b"", b"b"))


def test_salt_and_seed_are_different_inputs() -> None:
    assert hash_block(b"", [1, 2], b"a") != hash_block(b"", [1, 2], b"b")
    assert block_hashes([1, 2], 2, b"a") != block_hashes([1, 2], 2, b"b")
