"""Computes content hashes of full KV blocks, chained so that equal hashes mean equal prefixes.

Engines index their KV blocks by them, and the coordinator places prompts by them; both use this one rule.
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import cache

_TOKEN_BYTES = 4


@cache
def _token_packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}I")


def hash_block(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
    """Return SHA-256 over the parent's hash (first: the seed), the ids as little-endian u32, and the salt."""
    return hashlib.sha256(parent + _token_packer(len(token_ids)).pack(*token_ids) + salt).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, seed: bytes = b"", salt: bytes = b"") -> list[bytes]:
    """Return the hash of each full block of ``token_ids``. Equal hashes mean equal prefixes under an equal salt."""
    num_tokens = len(token_ids) // block_size * block_size
    data = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    block_bytes, sha256 = _TOKEN_BYTES * block_size, hashlib.sha256
    hashes: list[bytes] = []
    parent = seed
    for start in range(0, len(data), block_bytes):
        # A salt of 16 bytes costs nothing: 32 bytes of the parent and 64 of a block of 16 tokens take two blocks of
        # SHA-256 with it and without it.
        parent = sha256(parent + data[start : start + block_bytes] + salt).digest()
        hashes.append(parent)
    return hashes


def specimen_hash(block_size: int, seed: bytes = b"") -> bytes:
    """Return the hash of the block of the ids 0, 1, 2 and so on: processes that agree on it agree on all hashes."""
    return block_hashes(range(block_size), block_size, seed)[0]
