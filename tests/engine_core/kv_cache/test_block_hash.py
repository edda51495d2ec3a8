import hashlib
import struct

from tokenloom.engine_core.kv_cache.block_hash import block_hashes, hash_block
from tokenloom.request.prompt_block_hash import block_hashes as placement_hashes


def test_the_rule_is_sha256_over_parent_tokens_and_salt() -> None:
    first = hashlib.sha256(b"seed" + struct.pack("<2I", 1, 2) + b"salt").digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**32 - 1) + b"salt").digest()
    assert block_hashes([1, 2, 3, 2**32 - 1, 5], 2, b"seed", b"salt") == [first, second]


def test_only_full_blocks_have_a_hash() -> None:
    assert block_hashes([], 4) == []
    assert block_hashes([1, 2, 3], 4) == []
    assert len(block_hashes([1, 2, 3, 4], 4)) == 1


def test_equal_blocks_after_different_prefixes_differ() -> None:
    assert block_hashes([1, 2, 9, 9], 2)[1] != block_hashes([3, 4, 9, 9], 2)[1]


def test_salt_and_seed_separate() -> None:
    assert hash_block(b"", [1, 2], b"a") != hash_block(b"", [1, 2], b"b")
    assert block_hashes([1, 2], 2, b"a") != block_hashes([1, 2], 2, b"b")


def test_placement_uses_the_same_rule() -> None:
    token_ids = list(range(1000, 1050))
    assert block_hashes(token_ids, 16, b"seed", b"salt") == placement_hashes(token_ids, 16, b"seed", b"salt")
