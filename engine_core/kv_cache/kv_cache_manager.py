"""Gives requests KV blocks for their tokens, and finds blocks that already hold them; chooses a model's manager."""

from typing import TypeAlias

from ..data.config import CacheConfig, SchedulerConfig
from ..data.kv_events import KVEventLog
from ..data.kv_groups import KVCacheConfig
from ..data.request_kv import RequestKV
from .block_pool import BlockPool
from .grouped_kv_cache_manager import GroupedKVCacheManager
from .request_hashes import RequestHasher


class KVCacheManager:
    """Keeps the block tables of requests over a :class:`BlockPool`.

    A full block can be hit as soon as its tokens are scheduled: within a step every layer writes the KV of all rows
    before it attends, so a later request of the same step reads what an earlier one writes.
    """

    keeps_partial_loads = True
    """Whether the blocks that a load filled before it failed can be used."""

    def __init__(
        self, num_blocks: int, config: CacheConfig, events: KVEventLog | None = None, *, has_null_block: bool = False
    ) -> None:
        """Make a pool of ``num_blocks`` blocks. ``events`` records which blocks can be hit, if given.
        ``has_null_block``: see :class:`.BlockPool`."""
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.pool = BlockPool(num_blocks, has_null_block=has_null_block)
        self.num_slots = self.pool.num_blocks * config.block_size
        """Tokens that the empty pool has room for."""
        self._hasher = RequestHasher(config.block_size, config.block_hash_seed)
        self._events = events
        if events is not None:
            self.pool.listeners.append(events)

    def find_cached_blocks(self, request: RequestKV, start: int = 0) -> list[int]:
        """Return the blocks that hold the longest cached prefix of a waiting request, from its block ``start`` on.

        They never cover all of its tokens: the last one must be computed, because its logits are the next token.
        """
        hits: list[int] = []
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return hits
        hashes, find = request.block_hashes, self.pool.find
        # Hashes are computed one at a time as the search goes on: a prompt of 32 k tokens that misses at its first
        # block costs one hash instead of 2,000.
        for index in range(start, request.num_cacheable_tokens // self.block_size):
            if index == len(hashes):
                self._hasher.add_next(request)
            if (block_id := find(hashes[index])) is None:
                break
            hits.append(block_id)
        return hits

    def finds_more(self, request: RequestKV, num_hits: int) -> bool:
        """Return whether a waiting request would find more than ``num_hits`` cached blocks."""
        return bool(self.find_cached_blocks(request, num_hits))

    def num_hit_tokens(self, hits: list[int]) -> int:
        """Return how many tokens the found blocks hold."""
        return len(hits) * self.block_size

    def can_admit(
        self, request: RequestKV, hits: list[int], num_tokens: int, num_spare: int, num_external_tokens: int = 0
    ) -> bool:
        """Return whether ``num_tokens`` tokens of a waiting request fit and leave ``num_spare`` blocks free. The
        ``num_external_tokens`` tokens that it loads are among them."""
        num_new = -(-num_tokens // self.block_size) - max(len(hits), len(request.block_ids))
        num_shared = self.pool.count_free(hits) if hits else 0
        return num_new + num_shared + num_spare <= self.pool.num_free

    def admit(self, request: RequestKV, hits: list[int]) -> None:
        """Start the block table of a request with the cached blocks that it shares."""
        assert not request.block_ids
        if hits:
            self.pool.share(hits)
        request.block_ids = hits.copy()
        request.num_registered_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size

    def reserve(self, request: RequestKV) -> list[int]:
        """Allocate blocks for all tokens of an admitted request that another engine will read. Returns its table."""
        num_missing = -(-len(request.all_token_ids) // self.block_size) - len(request.block_ids)
        # A reader pulls while the prefill runs, so it has to know all ids with the first chunk, not one chunk at a
        # time.
        request.block_ids += self.pool.allocate(num_missing)
        return request.block_ids

    def reserve_load(self, request: RequestKV, num_external_tokens: int) -> None:
        """Allocate blocks for all tokens of an admitted request, of which ``num_external_tokens`` will be loaded."""
        self.reserve(request)

    def finish_load(self, request: RequestKV, num_tokens: int) -> None:
        """Count the first ``num_tokens`` tokens, which were loaded, as computed; full blocks can be hit from now on."""
        request.num_computed_tokens = num_tokens
        if self.enable_prefix_caching:
            self._register_blocks(request, num_tokens // self.block_size)

    def allocate(self, request: RequestKV, num_new_tokens: int) -> list[int] | None:
        """Make room for a request's next tokens. Returns the blocks added, or None if too few are free."""
        # 14 of 16 decode steps of a request with blocks of 16 end here; planning such a request costs a quarter less.
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % self.block_size < self.block_size - 1:
            return []  # within a block: nothing to add, nothing filled
        end = request.num_computed_tokens + num_new_tokens
        num_missing = -(-end // self.block_size) - len(request.block_ids)
        new_block_ids: list[int] = []
        if num_missing > 0:
            if num_missing > self.pool.num_free:
                return None
            new_block_ids = self.pool.allocate(num_missing)
            request.block_ids += new_block_ids
        if self.enable_prefix_caching and end // self.block_size > request.num_registered_blocks:
            # A token in flight is not known yet, so its block has no hash.
            self._register_blocks(request, min(end, len(request.all_token_ids)) // self.block_size)
        return new_block_ids

    def cache_accepted(self, request: RequestKV) -> None:
        """Let full blocks be hit whose last tokens were drafts when they were computed, and are accepted now."""
        num_full_blocks = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if self.enable_prefix_caching and num_full_blocks > request.num_registered_blocks:
            self._register_blocks(request, num_full_blocks)

    def forget(self, request: RequestKV) -> None:
        """Let nothing be hit that a request computed or shared, because it may be wrong."""
        self.pool.forget(request.block_ids)

    def free(self, request: RequestKV) -> None:
        """Take all blocks of a request back; their content can be hit until the blocks are needed."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def _register_blocks(self, request: RequestKV, num_full_blocks: int) -> None:
        # What attends to a wrong block is wrong as well, and so is every later block of the request: none gets a name.
        if self.pool.wrong and not self.pool.wrong.isdisjoint(request.block_ids):
            return
        hashes = request.block_hashes
        first = request.num_registered_blocks
        while first and self.pool.find(hashes[first - 1]) is None:
            first -= 1  # an equal block of another request had this hash when ours was full, and was evicted
        for index in range(first, num_full_blocks):
            if index == len(hashes):
                self._hasher.add_next(request)
            if self.pool.register(request.block_ids[index], hashes[index]) and self._events is not None:
                start = index * self.block_size
                token_ids = request.all_token_ids[start : start + self.block_size]
                self._events.stored(hashes, index, token_ids)
        request.num_registered_blocks = num_full_blocks


KVManager: TypeAlias = KVCacheManager | GroupedKVCacheManager


def make_kv_manager(
    kv_cache: KVCacheConfig, cache: CacheConfig, scheduler: SchedulerConfig, events: KVEventLog | None, *, lends: bool
) -> KVManager:
    """Return the manager of an empty pool. ``events`` records which blocks can be hit, if given. ``lends``: whether
    other engines may read blocks."""
    if not kv_cache.groups:
        return KVCacheManager(kv_cache.num_blocks, cache, events, has_null_block=kv_cache.has_null_block)
    return GroupedKVCacheManager(
        kv_cache.num_blocks, kv_cache.groups, cache, largest_chunk(scheduler), events, lends=lends
    )


def largest_chunk(scheduler: SchedulerConfig) -> int:
    """Return most tokens that one request computes in a step."""
    return scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
