"""Gives requests KV blocks where layers see different windows, and takes back blocks that no layer of a group sees any
more.

The block table of a request is one list: entry ``index * num_groups + group`` is the block of that group for the block
of tokens ``index``, or ``NULL_BLOCK`` if the group does not keep it.
"""

from collections.abc import Sequence

from ..data.config import CacheConfig
from ..data.kv_events import KVEventLog
from ..data.kv_groups import NULL_BLOCK, KVGroup, KVNeed, first_seen_block
from ..data.request import RequestKV, SessionReturn
from .block_pool import BlockPool
from .kv_cache_manager import PooledKV
from .prefix_search import FirstGroupEvents, find_prefix, group_key


class GroupedKVCacheManager(PooledKV):
    """Has the interface of :class:`~.kv_cache_manager.KVCacheManager`, for models whose layers see different windows.

    Blocks that left the windows of their group can be hit until they are needed. A hit of n blocks of tokens needs all
    of them in the groups of full attention, and the last window of them in every other group.
    """

    keeps_partial_loads = False
    """A load that failed in part is of no use: a window's blocks before the failure were not loaded."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        config: CacheConfig,
        max_chunk: int,
        events: KVEventLog | None = None,
        *,
        lends: bool = False,
    ) -> None:
        """Make a pool of ``num_blocks`` blocks, one of which is ``NULL_BLOCK``. The other arguments are those of
        :class:`~.kv_cache_manager.KVCacheManager` and :class:`~..data.kv_groups.KVNeed`."""
        self.num_groups = len(groups)
        self._windows = [group.window for group in groups]
        super().__init__(BlockPool(num_blocks, self._windows), config, events)
        self._need = KVNeed(groups, config.block_size, max_chunk, lends=lends)
        self.num_slots = self._need.capacity(self.pool.num_blocks) * config.block_size
        """Tokens of the longest request that the empty pool has room for."""
        self._windowed = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        if events is not None:
            self.pool.listeners.append(FirstGroupEvents(events))

    def find_cached_blocks(self, request: RequestKV) -> list[int]:
        """Return the block table of the longest cached prefix of a waiting request, without its last token."""
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return []
        limit = request.num_cacheable_tokens // self.block_size
        return find_prefix(
            lambda index: self._hash(request, index), self.pool.find, self._windows, limit, self.block_size
        )

    def finds_more(self, request: RequestKV, num_hits: int) -> bool:
        """Return whether a waiting request would find a longer table than one of ``num_hits`` entries."""
        index = num_hits // self.num_groups
        if index >= request.num_cacheable_tokens // self.block_size or not self.enable_prefix_caching:
            return False
        # One look before the whole search: this runs in every step in which the head of the queue does not fit.
        is_longer = self.pool.find(group_key(self._hash(request, index), 0)) is not None
        return is_longer and len(self.find_cached_blocks(request)) > num_hits

    def can_admit(
        self, request: RequestKV, hits: list[int], num_tokens: int, num_spare: int, num_external_tokens: int = 0
    ) -> bool:
        """Return whether ``num_tokens`` tokens of a waiting request fit and leave ``num_spare`` blocks free. The blocks
        of the ``num_external_tokens`` tokens that it loads after its hits must fit all at once."""
        if num_external_tokens and not self._has_room_to_load(request, hits, num_spare, num_external_tokens):
            return False
        table = hits or request.block_ids
        num_held = len(table) // self.num_groups
        # A request that loaded its KV has computed tokens and a table but no hits; one that is new has hits and no
        # computed tokens yet. Both begin where their held blocks end.
        position = request.num_computed_tokens or num_held * self.block_size
        total = max(self._blocks_for(num_tokens), num_held)
        is_leased = request.remote is not None and bool(request.remote.lease_id)
        num_new = (total - num_held) * (self.num_groups - len(self._windowed))
        for (_, window), peak, lent in zip(self._windowed, self._need.peaks, self._need.lent, strict=True):
            first = first_seen_block(window, position, self.block_size)
            # A window gives blocks back as its chunks go on, so only its peak has to fit, not the whole prompt. A lease
            # adds the last window, which is chosen before the chunks reach it.
            most = min(total - first, peak + (lent if is_leased else 0))
            num_new += max(0, most - (num_held - first))
        return num_new + self.pool.count_free(hits) + num_spare <= self.pool.num_free

    def admit(self, request: RequestKV, hits: list[int]) -> None:
        """Start the block table of a request with the cached blocks that it shares."""
        assert not request.block_ids
        self.pool.share(hits)
        request.block_ids = hits.copy()
        request.num_registered_blocks = len(hits) // self.num_groups
        request.num_computed_tokens = self.num_hit_tokens(hits)
        request.first_kept_blocks = self._first_seen(request.num_computed_tokens)

    def reserve(self, request: RequestKV) -> list[int]:
        """Choose the blocks of an admitted request that another engine will read. Returns its table of these blocks:
        all of the groups of full attention, and the last window of the others."""
        return self._reserve(request, request.num_tokens)

    def lend(self, request: RequestKV, num_tokens: int) -> list[int] | None:
        """Choose blocks for the first ``num_tokens`` tokens of a running request, more than it has. Returns what
        :meth:`reserve` returns; None if too few are free."""
        num_held = len(request.block_ids) + len(request.reserved_block_ids)
        if self._blocks_for(num_tokens) * self.num_groups - num_held > self.pool.num_free:
            return None
        return self._reserve(request, num_tokens)

    def _reserve(self, request: RequestKV, num_tokens: int) -> list[int]:
        # A reader learns the blocks when the prefill begins, while a window's last blocks would be allocated at its
        # end. Those in between come and go with the chunks: keeping all would take the memory that groups save.
        total, first_lent = self._blocks_for(num_tokens), self._first_seen(num_tokens - 1)
        begin = (len(request.block_ids) + len(request.reserved_block_ids)) // self.num_groups
        request.reserved_block_ids += self._allocate_from(first_lent, begin, total)
        table = request.block_ids + request.reserved_block_ids
        return [
            block_id if index // self.num_groups >= first_lent[index % self.num_groups] else NULL_BLOCK
            for index, block_id in enumerate(table[: total * self.num_groups])
        ]

    def reserve_load(self, request: RequestKV, num_external_tokens: int) -> None:
        """Allocate the blocks that an admitted request loads after its hits; those that it will not see are left out,
        and given up if it hit them. Blocks that another engine does not send are shared if the pool has them."""
        end = request.num_computed_tokens + num_external_tokens
        position = _first_computed(request, end)  # its window decides what stays
        self._give_up_unseen(request, position)
        begin, first = len(request.block_ids) // self.num_groups, self._first_seen(position)
        is_from_tier = request.remote is not None and request.remote.target is None
        if is_from_tier:
            # The tier writes only what the pool lacks. Another engine sends each block that it named, and a copy that
            # fails halfway leaves a torn block: other requests must not share it.
            request.block_ids += self._share_or_allocate(request, first, begin, self._blocks_for(end))
        else:
            request.block_ids += self._allocate_from(first, begin, self._blocks_for(end))

    def allocate(self, request: RequestKV, num_new_tokens: int) -> list[int] | None:
        """Make room for a request's next tokens. Returns the blocks added, or None if too few are free."""
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % self.block_size < self.block_size - 1:
            return []  # within a block: nothing to add, nothing filled
        # Before allocating, so that a request at the edge of a full pool gets its next block from its own window
        # instead of preempting another request. If drafts in flight are wrong, the next token lies before them.
        self._give_up_unseen(request, request.num_computed_tokens - request.num_unverified)
        end = request.num_computed_tokens + num_new_tokens
        num_missing = self._blocks_for(end) * self.num_groups - len(request.block_ids)
        new_block_ids: list[int] = []
        if num_missing > 0:
            # A reader was given these ids when the prefill began; new ones here would make it read blocks that nothing
            # fills.
            reserved = request.reserved_block_ids[:num_missing]
            reserved += [NULL_BLOCK] * (num_missing - len(reserved))
            num_new = reserved.count(NULL_BLOCK)
            if num_new > self.pool.num_free:
                return None
            fresh = iter(self.pool.allocate(num_new))
            new_block_ids = [next(fresh) if block_id == NULL_BLOCK else block_id for block_id in reserved]
            request.reserved_block_ids = request.reserved_block_ids[num_missing:]
            request.block_ids += new_block_ids
        if self.enable_prefix_caching and end // self.block_size > request.num_registered_blocks:
            # A token in flight is not known yet, so its block has no hash.
            self._register_blocks(request, min(end, request.num_tokens) // self.block_size)
        return new_block_ids

    def free(self, request: RequestKV, turn: SessionReturn | None = None) -> None:
        """Take all blocks of a request back; their content can be hit until the blocks are needed. ``turn``: see
        :meth:`.KVCacheManager.free`."""
        table = request.block_ids + request.reserved_block_ids
        if turn is None:
            self.pool.release(table)
        else:
            self.pool.release_turn(table, turn)
        request.block_ids = []
        request.reserved_block_ids = []
        request.first_kept_blocks = ()
        request.num_registered_blocks = 0
        request.num_computed_tokens = request.num_unverified = 0

    def forget(self, request: RequestKV) -> None:
        """Let nothing be hit that a request computed or shared, because it may be wrong; its windows have left some."""
        self.pool.forget_content(
            group_key(block_hash, group) for block_hash in request.block_hashes for group in range(self.num_groups)
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_seen(self, position: int) -> list[int]:
        """Return for each group the first block that a token at ``position`` sees."""
        return [first_seen_block(window, position, self.block_size) for window in self._windows]

    def _give_up_unseen(self, request: RequestKV, position: int) -> None:
        """Release the blocks that no token from ``position`` on sees."""
        table, released = request.block_ids, list[int]()
        # Only entries since the last call: a scan of the whole table each step would make a step grow with the context.
        first, begin = self._first_seen(position), request.first_kept_blocks or [0] * self.num_groups
        for group, _ in self._windowed:
            entries = slice(begin[group] * self.num_groups + group, first[group] * self.num_groups, self.num_groups)
            released += table[entries]
            table[entries] = [NULL_BLOCK] * len(table[entries])
        request.first_kept_blocks = first
        self.pool.release(released)

    def _allocate_from(self, first: Sequence[int], begin: int, end: int) -> list[int]:
        """Return table entries for the blocks of tokens [begin, end): new blocks from ``first`` of each group on."""
        kept = [index >= first[group] for index in range(begin, end) for group in range(self.num_groups)]
        fresh = iter(self.pool.allocate(sum(kept)))
        return [next(fresh) if is_kept else NULL_BLOCK for is_kept in kept]

    def _share_or_allocate(self, request: RequestKV, first: Sequence[int], begin: int, end: int) -> list[int]:
        """Return what :meth:`_allocate_from` returns, with blocks that the pool has instead of new ones."""
        entries: list[int | None] = [
            self.pool.find(group_key(self._hash(request, index), group)) if index >= first[group] else NULL_BLOCK
            for index in range(begin, end)
            for group in range(self.num_groups)
        ]
        self.pool.share(block_id for block_id in entries if block_id)  # before an allocation can evict them
        fresh = iter(self.pool.allocate(entries.count(None)))
        return [next(fresh) if block_id is None else block_id for block_id in entries]

    def _has_room_to_load(self, request: RequestKV, hits: list[int], num_spare: int, num_external_tokens: int) -> bool:
        """Return whether the blocks that a request would load and those of its hits that it would keep fit."""
        end = self.num_hit_tokens(hits) + num_external_tokens
        first = self._first_seen(_first_computed(request, end))
        num_held, total = len(hits) // self.num_groups, self._blocks_for(end)
        num_new = sum(max(0, total - max(num_held, index)) for index in first)
        kept = [
            block_id
            for entry, block_id in enumerate(hits)
            if entry // self.num_groups >= first[entry % self.num_groups]
        ]
        return num_new + self.pool.count_free(kept) + num_spare <= self.pool.num_free

    def _hash(self, request: RequestKV, index: int) -> bytes:
        """Return the hash of the block of tokens at ``index``, which is full; the request keeps the hashes."""
        while len(request.block_hashes) <= index:
            self._hasher.add_next(request)
        return request.block_hashes[index]

    def _register_blocks(self, request: RequestKV, num_full_blocks: int) -> None:
        if self.pool.wrong and not self.pool.wrong.isdisjoint(request.block_ids):
            return
        first = request.num_registered_blocks
        while first and not self._are_found(request, first - 1):
            first -= 1  # an equal block of another request had this hash when ours was full, and was evicted
        for index in range(first, num_full_blocks):
            block_hash = self._hash(request, index)
            for group, block_id in enumerate(self._entries(request, index)):
                is_new = block_id != NULL_BLOCK and self.pool.register(block_id, group_key(block_hash, group))
                if is_new and group == 0:
                    self._report_stored(request, index)
        request.num_registered_blocks = num_full_blocks

    def _entries(self, request: RequestKV, index: int) -> list[int]:
        """Return the block of each group for the block of tokens at ``index``."""
        return request.block_ids[index * self.num_groups : (index + 1) * self.num_groups]

    def _are_found(self, request: RequestKV, index: int) -> bool:
        """Return whether the content of every block that is kept for the block of tokens ``index`` can be hit."""
        block_hash = self._hash(request, index)
        return all(
            block_id == NULL_BLOCK or self.pool.find(group_key(block_hash, group)) is not None
            for group, block_id in enumerate(self._entries(request, index))
        )


def _first_computed(request: RequestKV, end: int) -> int:
    """Return the first position that a request computes which loads its first ``end`` tokens, or an earlier one."""
    # The last token is computed here even if its KV is loaded, because its logits are needed. Of a request that another
    # engine lends, the last tokens that it loads are not known yet, and more will follow.
    if request.remote is not None and request.remote.awaits_tokens:
        return end - 1
    return min(end, request.num_tokens - 1)
