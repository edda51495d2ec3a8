"""Gives requests the KV blocks for their tokens, and finds the blocks that hold them already."""

from ..config import CacheConfig
from ..scheduling.request import Request
from .block_hash import hash_block
from .block_pool import BlockPool
from .kv_events import KVEventLog


class KVCacheManager:
    """Block tables over a :class:`BlockPool`.

    A full block can be hit as soon as its tokens are scheduled: within a step every layer writes the KV of all rows
    before it attends, so a later request of the same step reads what an earlier one writes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_seed: bytes = b"",
        events: KVEventLog | None = None,
    ) -> None:
        """``events``: where changes of what can be hit are told."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._hash_seed = hash_seed
        self._events = events
        if events is not None:
            self.pool.listeners.append(events)

    @classmethod
    def of(cls, config: CacheConfig, num_blocks: int, events: KVEventLog | None) -> "KVCacheManager":
        """As it is configured, over a pool of so many blocks."""
        return cls(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_seed=config.block_hash_seed,
            events=events,
        )

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether the empty pool has room for this many tokens."""
        return self._blocks_for(num_tokens) <= self.pool.num_blocks

    def find_cached_blocks(self, request: Request) -> list[int]:
        """The blocks that hold the longest known prefix of a waiting request.

        Never all of its tokens: the last one must be computed, for its logits are the next token.
        """
        hits: list[int] = []
        while (block_id := self.find_cached_block(request, len(hits))) is not None:
            hits.append(block_id)
        return hits

    def find_cached_block(self, request: Request, index: int) -> int | None:
        """The block that holds the tokens of a waiting request's block ``index``; those before it were found."""
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return None
        if index >= (request.num_tokens - 1) // self.block_size:
            return None
        return self.pool.find(self._block_hash(request, index))

    def can_admit(self, request: Request, hits: list[int], num_tokens: int, num_spare: int) -> bool:
        """Whether a waiting request's first ``num_tokens`` tokens fit beside ``num_spare`` blocks left to others."""
        num_new = self._blocks_for(num_tokens) - max(len(hits), len(request.block_ids))
        return num_new + self.pool.count_free(hits) + num_spare <= self.pool.num_free

    def admit(self, request: Request, hits: list[int]) -> None:
        """Starts the block table of a request with the blocks it shares."""
        assert not request.block_ids
        self.pool.share(hits)
        request.block_ids = list(hits)
        request.num_registered_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size

    def reserve(self, request: Request) -> None:
        """Makes room for all tokens of an admitted request at once, whoever is to compute or load them."""
        num_missing = self._blocks_for(request.num_tokens) - len(request.block_ids)
        request.block_ids += self.pool.allocate(num_missing)

    def finish_load(self, request: Request, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens are in the request's blocks, for good: full blocks can be hit from now on."""
        request.num_computed_tokens = num_tokens
        if self.enable_prefix_caching:
            self._register_blocks(request, num_tokens // self.block_size)

    def allocate(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Makes room for a request's next tokens; returns the blocks added, None if too few are free."""
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % self.block_size < self.block_size - 1:
            return []  # within a block: nothing to add, nothing filled
        end = request.num_computed_tokens + num_new_tokens
        num_missing = self._blocks_for(end) - len(request.block_ids)
        new_block_ids: list[int] = []
        if num_missing > 0:
            if num_missing > self.pool.num_free:
                return None
            new_block_ids = self.pool.allocate(num_missing)
            request.block_ids += new_block_ids
        if self.enable_prefix_caching and end // self.block_size > request.num_registered_blocks:
            # Of tokens in flight there is no hash yet.
            self._register_blocks(request, min(end, request.num_tokens) // self.block_size)
        return new_block_ids

    def free(self, request: Request) -> None:
        """Takes all blocks of a request back; what they hold can be hit until they are needed."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _register_blocks(self, request: Request, num_full_blocks: int) -> None:
        for index in range(self._first_to_register(request), num_full_blocks):
            is_new = self.pool.register(request.block_ids[index], self._block_hash(request, index))
            if is_new and self._events is not None:
                self._events.stored(*self._content(request, index))
        request.num_registered_blocks = num_full_blocks

    def _first_to_register(self, request: Request) -> int:
        """Behind the last block that is found: an equal one of somebody else had the name of ours, and went."""
        index = request.num_registered_blocks
        while index and self.pool.find(request.block_hashes[index - 1]) is None:
            index -= 1
        return index

    def _content(self, request: Request, index: int) -> tuple[bytes, bytes | None, list[int]]:
        """Hash, hash of the block before, token ids of a full block."""
        hashes = request.block_hashes
        start = index * self.block_size
        parent = hashes[index - 1] if index else None
        return hashes[index], parent, request.all_token_ids[start : start + self.block_size]

    def _block_hash(self, request: Request, index: int) -> bytes:
        """Of the block at ``index``; each is computed once, after the one before it."""
        hashes = request.block_hashes
        if index == len(hashes):
            start = index * self.block_size
            token_ids = request.all_token_ids[start : start + self.block_size]
            hashes.append(hash_block(hashes[-1] if hashes else self._hash_seed, token_ids, request.cache_salt))
        return hashes[index]
