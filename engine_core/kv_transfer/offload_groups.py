"""Finds the blocks that the offload tier adds to those in the pool of a model with several KV groups."""

from collections.abc import Callable

import msgspec

from ..kv_cache.block_pool import BlockPool
from ..kv_cache.group_events import group_key
from ..kv_cache.prefix_search import find_prefix


class TierHits(msgspec.Struct):
    """Lists what a request would load. The three lists are parallel, in the order of the block table."""

    num_blocks: int
    """Blocks of tokens in the prefix that the pool and the tier serve together."""
    positions: list[int]
    """Entries of the request's block table."""
    slots: list[int]
    keys: list[bytes]


def find_tier_hits(
    hash_of: Callable[[int], bytes],
    pool: BlockPool,
    find_slot: Callable[[bytes], int | None],
    first_block: int,
    limit: int,
    block_size: int,
) -> TierHits:
    """Return the longest prefix of which each group has the blocks that its window needs, in the pool or in the tier.

    Args:
        hash_of: Returns the hash of the block of tokens at an index below ``limit``.
        find_slot: Returns the tier's slot with a block's key.
        first_block: Blocks of tokens that the pool serves alone; the prefix is at least as long.
        limit: Most blocks of tokens that may be hit.
        block_size: Tokens per block.
    """

    def find(key: bytes) -> int | None:
        if (block_id := pool.find(key)) is not None:
            return block_id
        slot = find_slot(key)
        return None if slot is None else -1 - slot  # negative, so that it is no block of the pool

    # Blocks that a window left are evicted first, so the pool often has a prefix for full attention and the file has it
    # for the windows: only both together make a hit.
    table = find_prefix(hash_of, find, pool.windows, limit, block_size)
    begin = first_block * pool.num_groups
    positions = [position for position, found in enumerate(table[begin:], begin) if found < 0]
    return TierHits(
        num_blocks=len(table) // pool.num_groups,
        positions=positions,
        slots=[-1 - table[position] for position in positions],
        keys=[group_key(hash_of(position // pool.num_groups), position % pool.num_groups) for position in positions],
    )
