"""Tests that block hashes are chained, salted and the same as the engine's."""

import hashlib
import struct

import pytest

from tokenloom.engine_core.kv_cache.kv_cache_manager import hash_block
from tokenloom.request.prompt_block_hash import block_hashes


@pytest.mark.parametrize(("seed", "salt"), [(b"", b""), (b"seed", b""), (b"", b"tenant"), (b"seed", b"tenant")])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 64, 1000])
def test_equal_to_the_engines(length: int, seed: bytes, salt: bytes) -> None:
    token_ids = [(i * 2654435761) % 2**32 for i in range(length)]
    hashes = block_hashes(token_ids, 4, seed, salt)
    assert len(hashes) == length // 4
    parent = seed
    for index, block_hash in enumerate(hashes):
        parent = hash_block(parent, token_ids[4 * index : 4 * index + 4], salt)
        assert block_hash == parent


def test_the_rule_is_sha256_over_parent_tokens_and_salt() -> None:
    first = hashlib.sha256(b"seed" + struct.pack("<2I", 1, 2) + b"salt").digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**32 - 1) + b"salt").digest()
    assert block_hashes([1, 2, 3, 2**32 - 1, 5], 2, b"seed", b"salt") == [first, second]


def test_equal_up_to_the_first_difference() -> None:
    one, two = list(range(16)), [*range(9), 99, *range(10, 16)]
    equal = [a == b for a, b in zip(block_hashes(one, 4), block_hashes(two, 4), strict=True)]
    assert equal == [True, True, False, False]


def test_a_salt_changes_every_block() -> None:
    assert not set(block_hashes(range(16), 4, b"", b"a")) & set(block_hashes(range(16), 4, b"", b"b"))
