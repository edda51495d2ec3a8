"""Gives requests blocks for the keys and values of the rows that stand beside their prompts, as those of a sound do."""

from typing import Final

from ..data.config import CacheConfig
from ..data.kv_events import KVEventLog
from ..data.kv_groups import KVCacheConfig
from ..data.request import RequestKV, SessionReturn
from .block_pool import EvictionListener
from .kv_cache_manager import KVCacheManager

_HASH_BYTES: Final = 32


# Blocks of the pool, and not slots beside it: their keys and values have the same shape as those of tokens, so one
# budget serves both, and what is free of one kind is room for the other.
class CrossKVCacheManager(KVCacheManager):
    """Keeps, beside the block table of each request, the same number of blocks for the rows beside its prompt.

    The step that computes the first tokens of a request writes them, and no later one. They are named by what the rows
    are, from the time when that step is planned: other requests with the same rows share them, in that step too.
    """

    def __init__(self, kv_cache: KVCacheConfig, config: CacheConfig, events: KVEventLog | None = None) -> None:
        """Make an empty pool. ``events`` records which blocks of tokens can be hit, if given."""
        super().__init__(kv_cache.num_blocks, config)
        self._events = events
        if events is not None:
            self.pool.listeners.append(_TokenEvents(events))
        self._num_cross = kv_cache.cross_blocks
        self.num_slots -= self._num_cross * config.block_size

    def lacks_cross(self, request: RequestKV) -> bool:
        """Return whether the keys and values of the rows beside a waiting request's prompt have to be written."""
        return not self._find_cross(request)

    def can_admit(
        self, request: RequestKV, hits: list[int], num_tokens: int, num_spare: int, num_external_tokens: int = 0
    ) -> bool:
        """Return whether the tokens of a waiting request and the rows beside it fit, as
        :meth:`.KVCacheManager.can_admit` says it."""
        found = self._find_cross(request)
        num_cross = self.pool.count_free(found) if found else self._num_cross
        return super().can_admit(request, hits, num_tokens, num_spare + num_cross, num_external_tokens)

    def admit(self, request: RequestKV, hits: list[int]) -> None:
        """Start the block table of a request with the cached blocks that it shares, and give it those of its rows."""
        found = self._find_cross(request)
        self.pool.share(found)  # before anything that is allocated could evict them
        super().admit(request, hits)
        request.lacks_cross = not found
        request.cross_block_ids = found or self.pool.allocate(self._num_cross)
        if request.lacks_cross and self.enable_prefix_caching:
            for block_id, name in zip(request.cross_block_ids, self._names(request), strict=True):
                self.pool.register(block_id, name)

    def forget(self, request: RequestKV) -> None:
        """Let nothing be hit that a request computed or shared, because it may be wrong."""
        super().forget(request)
        # By name: a request that was preempted while the step was in flight that proved it wrong has no blocks.
        self.pool.forget_content(self._names(request))

    def free(self, request: RequestKV, turn: SessionReturn | None = None) -> None:
        """Take all blocks of a request back; their content can be hit until the blocks are needed."""
        super().free(request, turn)
        self.pool.release(request.cross_block_ids)
        request.cross_block_ids, request.lacks_cross = [], False

    def _names(self, request: RequestKV) -> list[bytes]:
        # The salt of a request with rows beside it stands for these rows: see ``beside_salt``.
        return [request.cache_salt + index.to_bytes(2, "little") for index in range(self._num_cross)]

    def _find_cross(self, request: RequestKV) -> list[int]:
        """Return the blocks with the keys and values of a request's rows; empty unless all of them are there."""
        found = [block_id for name in self._names(request) if (block_id := self.pool.find(name)) is not None]
        return found if len(found) == self._num_cross else []


class _TokenEvents(EvictionListener):
    """Records what happens to the blocks of tokens: subscribers know nothing of others."""

    def __init__(self, events: KVEventLog) -> None:
        self._events = events

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        if len(block_hash) == _HASH_BYTES:
            self._events.evicted(block_id, block_hash)

    def forgot(self, block_hash: bytes) -> None:
        if len(block_hash) == _HASH_BYTES:
            self._events.forgot(block_hash)

    def forgot_all(self) -> None:
        self._events.forgot_all()
