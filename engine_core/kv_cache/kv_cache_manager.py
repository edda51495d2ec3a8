"""Gives requests KV blocks for their tokens, and finds blocks that already hold them; also those for the rows beside a
prompt, as of a sound."""

from abc import ABC, abstractmethod
from typing import Final

from ..data.config import CacheConfig
from ..data.kv_events import KVEventLog
from ..data.kv_groups import KVCacheConfig
from ..data.request import RequestKV, SessionReturn
from .block_pool import BlockPool, EvictionListener, RequestHasher
from .state_slots import StateSlotPool

_HASH_BYTES: Final = 32


class PooledKV(ABC):
    """Does what the managers have in common."""

    num_groups = 1
    states: StateSlotPool | None = None
    """Slots of layers that keep a state; None: no layer does."""

    def __init__(self, pool: BlockPool, config: CacheConfig, events: KVEventLog | None) -> None:
        self.pool = pool
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self._hasher = RequestHasher(config.block_size, config.block_hash_seed)
        self._events = events

    @abstractmethod
    def _register_blocks(self, request: RequestKV, num_full_blocks: int) -> None:
        """Let the first full blocks be found by their content."""

    def num_hit_tokens(self, hits: list[int], request: RequestKV | None = None) -> int:
        """Return how many tokens the blocks of a table hold that was found for a request."""
        return len(hits) // self.num_groups * self.block_size

    def park(self, request: RequestKV) -> None:  # noqa: B027
        """Do nothing: what a preempted request has computed is found by its tokens."""

    def end_lending(self, request: RequestKV) -> None:  # noqa: B027
        """Do nothing: blocks that were chosen for a lease are the request's next ones."""

    def load_table(self, request: RequestKV, num_tokens: int) -> list[int]:
        """Return where a request that loads its first ``num_tokens`` tokens has them."""
        return request.block_ids

    def finish_load(self, request: RequestKV, num_tokens: int) -> None:
        """Count the first ``num_tokens`` tokens, which were loaded, as computed; full blocks can be hit from now on."""
        request.num_computed_tokens = num_tokens
        if self.enable_prefix_caching:
            self._register_blocks(request, num_tokens // self.block_size)

    def cache_accepted(self, request: RequestKV) -> None:
        """Let full blocks be hit whose last tokens were drafts when they were computed, and are accepted now."""
        num_full_blocks = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if self.enable_prefix_caching and num_full_blocks > request.num_registered_blocks:
            self._register_blocks(request, num_full_blocks)

    def lacks_cross(self, request: RequestKV) -> bool:
        """Return whether the keys and values of the rows beside a waiting request's prompt have to be written."""
        return False

    @abstractmethod
    def allocate(self, request: RequestKV, num_new_tokens: int) -> list[int] | None:
        """Make room for a request's next tokens. Returns the blocks added, or None if too few are free."""

    def extend(self, request: RequestKV, num_scheduled: int, count: int) -> list[int] | None:
        """Make room for ``count`` tokens after the ``num_scheduled`` of the step. Returns the blocks added; None if too
        few are free."""
        # The manager takes back what no token from the first new one on sees; the step's own tokens see more.
        # Asked with the position after the step, the manager once gave up blocks of a window that the step itself still
        # read, and another request could write to them in the same step.
        request.num_computed_tokens -= num_scheduled
        new_block_ids = self.allocate(request, num_scheduled + count)
        request.num_computed_tokens += num_scheduled
        return new_block_ids

    def _report_stored(self, request: RequestKV, index: int) -> None:
        """Record that the block of tokens at ``index`` can be hit from now on."""
        if self._events is not None:
            token_ids = request.all_token_ids[index * self.block_size : (index + 1) * self.block_size]
            self._events.stored(request.block_hashes, index, token_ids)


class KVCacheManager(PooledKV):
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
        super().__init__(BlockPool(num_blocks, has_null_block=has_null_block), config, events)
        self.num_slots = self.pool.num_blocks * config.block_size
        """Tokens that the empty pool has room for."""
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
        """Allocate blocks for all tokens of an admitted request that another engine will read. Returns its table of
        these."""
        # A reader pulls while the prefill runs, so it has to know all ids with the first chunk, not one chunk at a
        # time.
        return self._fill(request, request.num_tokens)

    def lend(self, request: RequestKV, num_tokens: int) -> list[int] | None:
        """Choose blocks for the first ``num_tokens`` tokens of a running request, more than it has. Returns its table
        of these; None if too few are free."""
        total = -(-num_tokens // self.block_size)
        num_new = max(0, total - len(request.block_ids) - len(request.reserved_block_ids))
        if num_new > self.pool.num_free:
            return None
        # Not in its table yet: the worker knows that, and gets each block with the step that needs it.
        request.reserved_block_ids += self.pool.allocate(num_new)
        return (request.block_ids + request.reserved_block_ids)[:total]

    def reserve_load(self, request: RequestKV, num_external_tokens: int) -> None:
        """Allocate blocks for all tokens of an admitted request, and for the ``num_external_tokens`` that it will load
        behind those it has: of a running request that another engine lends, the last ones are not known yet."""
        self._fill(request, max(request.num_tokens, request.num_computed_tokens + num_external_tokens))

    def _fill(self, request: RequestKV, num_tokens: int) -> list[int]:
        """Give a request blocks for its first ``num_tokens`` tokens. Returns its table of these."""
        total = -(-num_tokens // self.block_size)
        request.block_ids += self.pool.allocate(total - len(request.block_ids))
        return request.block_ids[:total]

    def allocate(self, request: RequestKV, num_new_tokens: int) -> list[int] | None:
        """Make room for a request's next tokens. Returns the blocks added, or None if too few are free."""
        # 14 of 16 decode steps of a request with blocks of 16 end here; planning such a request costs a quarter less.
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % self.block_size < self.block_size - 1:
            return []  # within a block: nothing to add, nothing filled
        end = request.num_computed_tokens + num_new_tokens
        num_missing = -(-end // self.block_size) - len(request.block_ids)
        new_block_ids: list[int] = []
        if num_missing > 0:
            reserved = request.reserved_block_ids
            if num_missing - len(reserved) > self.pool.num_free:
                return None
            if reserved:  # which another engine reads as soon as they are filled
                new_block_ids, request.reserved_block_ids = reserved[:num_missing], reserved[num_missing:]
                num_missing -= len(new_block_ids)
            new_block_ids += self.pool.allocate(num_missing)
            request.block_ids += new_block_ids
        if self.enable_prefix_caching and end // self.block_size > request.num_registered_blocks:
            # A token in flight is not known yet, so its block has no hash.
            self._register_blocks(request, min(end, len(request.all_token_ids)) // self.block_size)
        return new_block_ids

    def forget(self, request: RequestKV) -> None:
        """Let nothing be hit that a request computed or shared, because it may be wrong."""
        if request.block_ids:
            self.pool.forget(request.block_ids)
        else:  # it was preempted while the step was in flight that proved it wrong
            self.pool.forget_content(request.block_hashes)

    def free(self, request: RequestKV, turn: SessionReturn | None = None) -> None:
        """Take all blocks of a request back; their content can be hit until the blocks are needed.

        Called when the request ends (``EndedRequests.end``) or is preempted (``StepPlanner.requeue``), and when one
        that waits gives up what it has loaded; if another engine still reads the blocks, when that has ended. ``turn``:
        of the session whose next turn is likely to hit it; None: nothing says that any request will.
        """
        if request.reserved_block_ids:
            self.pool.release(request.reserved_block_ids)
            request.reserved_block_ids = []
        if turn is None:
            self.pool.release(request.block_ids)
        else:
            self.pool.release_turn(request.block_ids, turn)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = request.num_unverified = 0

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
                self._report_stored(request, index)
        request.num_registered_blocks = num_full_blocks


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
