"""Hashes the full KV blocks of a prompt, for placement. Engines compute their own hashes by the same rule."""

import hashlib
import struct
from collections.abc import Sequence


def block_hashes(token_ids: Sequence[int], block_size: int, seed: bytes = b"", salt: bytes = b"") -> list[bytes]:
    """Return one SHA-256 for each full block: over the parent's hash (``seed`` for the first), the block's ids as
    little-endian u32, and ``salt``. Equal hashes mean equal prefixes with an equal salt."""
    packer = struct.Struct(f"<{block_size}I")
    hashes: list[bytes] = []
    parent = seed
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + packer.pack(*token_ids[start : start + block_size]) + salt).digest()
        hashes.append(parent)
    return hashes
