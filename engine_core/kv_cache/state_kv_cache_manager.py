"""Gives requests of a model whose layers keep a state KV blocks and slots."""

from collections.abc import Sequence

from ..data.config import CacheConfig
from ..data.kv_events import KVEventLog, StateEvents
from ..data.kv_groups import KVCacheConfig
from ..data.request import ParkedTokens, RequestKV, SessionReturn
from .block_pool import MOVED
from .kv_cache_manager import KVCacheManager
from .state_slots import StateSlotPool

PARKED = b"parked "
"""Begins the names of content that one preempted request looks for, until others need its memory."""


class StateKVCacheManager(KVCacheManager):
    """Has the interface of :class:`.KVCacheManager`, for models whose layers keep a state beside KV, or instead of it.

    A hit of n blocks needs the KV of all n and the state at their end.
    """

    keeps_partial_loads = False

    def __init__(self, kv_cache: KVCacheConfig, cache: CacheConfig, events: KVEventLog | None = None) -> None:
        """Make pools of the sizes in ``kv_cache``. ``events``: see :class:`.KVCacheManager`."""
        super().__init__(kv_cache.num_blocks, cache, events, has_null_block=kv_cache.has_null_block)
        self.states: StateSlotPool = StateSlotPool(kv_cache, cache, self.pool, self.cache_accepted)
        if events is not None:
            self.states.events = StateEvents(events)
            self.states.pool.listeners.append(self.states.events)
        self._looked = ("", 0)
        self._num_parked = 0
        # Without a state at its end KV is worth nothing. In strict mode decoded tokens have other KV than a prompt with
        # the same tokens, and under the hash only one of them can be found.
        self._registers_output = self.states.keeps_all and not self.states.is_strict

    def find_cached_blocks(self, request: RequestKV, start: int = 0) -> list[int]:
        """Return the blocks of the longest cached prefix of a waiting request that ends with a state."""
        assert not start, "a hit ends with a state wherever the search begins"
        if request.parked is not None:
            if (table := self._find_parked(request.parked)) is not None:
                return table
            self._give_up_parked(request, request.parked)  # others needed a part of it, which nothing has kept
            self.states.preempted["computed"] += 1
        hits = super().find_cached_blocks(request)
        return hits[: self.states.longest(request, len(hits))]

    def finds_more(self, request: RequestKV, num_hits: int) -> bool:
        """Return whether a waiting request would find more than ``num_hits`` cached blocks."""
        looked = (request.request_id, self.states.num_kept)
        if looked == self._looked:
            return False
        # This runs in every step in which the head of the queue does not fit, and a search walks its whole prompt.
        self._looked = looked
        return len(self.find_cached_blocks(request)) > num_hits

    def can_admit(
        self, request: RequestKV, hits: list[int], num_tokens: int, num_spare: int, num_external_tokens: int = 0
    ) -> bool:
        """Return whether a waiting request gets a slot and blocks; the arguments are those of
        :meth:`.KVCacheManager.can_admit`. One whose beginning another request computes waits for its state."""
        num_here = self.num_hit_tokens(hits, request) + num_external_tokens
        return self.states.can_begin(request, num_here, loads=num_external_tokens > 0) and super().can_admit(
            request, hits, num_tokens, num_spare, num_external_tokens
        )

    def admit(self, request: RequestKV, hits: list[int]) -> None:
        """Start the block table of a request with the cached blocks that it shares, and the state after them."""
        if (parked := request.parked) is not None:
            super().admit(request, hits)
            self.pool.unpark(hits)
            contents = [self.pool.content_of(block_id) for block_id in hits]
            request.num_registered_blocks = contents.index(None) if None in contents else len(contents)
            if len(hits) < len(parked.blocks):
                self.states.begin_parked(request)  # it loads the rest
                return
            request.parked, request.num_computed_tokens = None, parked.num_tokens
            self.states.resume(request, parked.slot)
            self.states.preempted["kept"] += 1
            return
        more = super().find_cached_blocks(request, len(hits))
        super().admit(request, hits)
        self.states.begin(request, len(hits), len(hits) + len(more))

    def num_hit_tokens(self, hits: list[int], request: RequestKV | None = None) -> int:
        """Return how many tokens the blocks of a table hold that was found for a request."""
        parked = request.parked if request is not None and hits else None
        if parked is None or len(hits) < len(parked.blocks):
            return super().num_hit_tokens(hits)
        return parked.num_tokens

    def park(self, request: RequestKV) -> None:
        """Let a request that is about to be preempted find what it has computed, until others need the memory.

        Neither KV nor a state of decoded tokens is found by prompts, and its state lies within a block.
        """
        state, count = request.state, request.num_computed_tokens
        is_whole = state is not None and state.slot >= 0 and not self.states.is_pending(state.slot)
        # Where drafts are in flight the worker alone knows which of two slots has the state.
        skips = request.skip_reading_prefix_cache or request.routed_rows is not None or self.states.defers
        if not (self.enable_prefix_caching and is_whole and count) or skips or self.pool.wrong:
            self.states.preempted["computed"] += 1
            return
        assert state is not None
        if state.draft_slot >= 0:
            # A step in flight verifies drafts (pipeline stages): the slot has the state before them, wherever they end.
            count -= state.num_drafts
        self._num_parked += 1
        blocks, store = request.block_ids[: -(-count // self.block_size)], self.states.parked_store
        num_lost = count - state.last if state.last <= count else count
        is_moved = store is not None and store.chooses(len(blocks), num_lost)
        stem = (MOVED if is_moved else PARKED) + b"%d" % self._num_parked
        names = [
            self.pool.park(block_id, stem + b" %d" % index, self.pool.step - 1) for index, block_id in enumerate(blocks)
        ]
        # The pool of states counts one step less: a state is registered after the step that writes it.
        slot = self.states.pool.park(state.slot, stem, self.states.pool.step)
        request.parked = ParkedTokens(count, names, slot)

    def _find_parked(self, parked: ParkedTokens) -> list[int] | None:
        """Return the table of a preempted request, or without its last blocks if those are to be loaded; None: a part
        of what it had is lost."""
        table = list[int]()
        for name in parked.blocks:
            if (block_id := self.pool.find(name)) is None:
                break
            table.append(block_id)
        store, slot = self.states.parked_store, self.states.pool.find(parked.slot)
        if len(table) == len(parked.blocks) and slot is not None:
            return table
        if store is None or not store.has(parked):
            return None
        if slot is not None:
            self.states.pool.evict(parked.slot)  # a load brings the state with the blocks, out of one place
            if not store.has(parked):
                return None
        return table[: len(parked.blocks) - 1]

    def _give_up_parked(self, request: RequestKV, parked: ParkedTokens) -> None:
        """Let what only this request could have found be the first that others get."""
        request.parked = None
        if self.states.parked_store is not None:
            self.states.parked_store.drop(parked)
        for name in parked.blocks:
            if name in self.pool.parked:
                self.pool.evict(name, is_useless=True)
        if parked.slot in self.states.pool.parked:
            self.states.pool.evict(parked.slot, is_useless=True)

    def reserve(self, request: RequestKV) -> list[int]:
        """Choose the blocks of an admitted request that another engine will read, and the slot for the state after
        all of its tokens. Returns its table of these."""
        return [*super().reserve(request), self.pool_id(self.states.lend(request, request.num_tokens))]

    def lend(self, request: RequestKV, num_tokens: int) -> list[int] | None:
        """Choose the blocks and the slot of a running request that another engine goes on with after ``num_tokens``
        tokens, more than it has. Returns its table of these; None if there is no room."""
        # Another slot stays free for what the next steps keep.
        if self.states.pool.num_free < 2 or (table := super().lend(request, num_tokens)) is None:
            return None
        return [*table, self.pool_id(self.states.lend(request, num_tokens))]

    def end_lending(self, request: RequestKV) -> None:
        """Give the slot back that was chosen for a lease."""
        assert request.state is not None, "it runs"
        if request.state.lent_slot >= 0:
            self.states.pool.release([request.state.lent_slot])
            request.state.lent_slot = -1

    def reserve_load(self, request: RequestKV, num_external_tokens: int) -> None:
        """Allocate the blocks that an admitted request loads after its hits, and a slot. Blocks that the pool has are
        shared unless another engine sends them, as in :meth:`.GroupedKVCacheManager.reserve_load`."""
        end = request.num_computed_tokens + num_external_tokens
        if (parked := request.parked) is not None:
            request.parked = None
            self.states.preempted["loaded"] += 1
            self.pool.unpark(self._share_or_allocate(request, parked.blocks[len(request.block_ids) :]))
        elif request.remote is not None and request.remote.target is None:
            self._share_or_allocate(request, request.block_hashes[len(request.block_ids) : end // self.block_size])
        super().reserve_load(request, num_external_tokens)
        self.states.begin_load(request)

    def _share_or_allocate(self, request: RequestKV, names: Sequence[bytes]) -> list[int]:
        """Add blocks to the table of a request, those that the pool has under these names, or new ones. Returns those
        that it has."""
        table = [self.pool.find(name) for name in names]
        found = [block_id for block_id in table if block_id is not None]
        self.pool.share(found)  # before they can be evicted
        fresh = iter(self.pool.allocate(table.count(None)))
        request.block_ids += [next(fresh) if block_id is None else block_id for block_id in table]
        return found

    def load_table(self, request: RequestKV, num_tokens: int) -> list[int]:
        """Return where a request that loads its first ``num_tokens`` tokens has them: its blocks, and its slot."""
        assert request.state is not None, "it was admitted"
        return [*request.block_ids[: -(-num_tokens // self.block_size)], self.pool_id(request.state.slot)]

    def pool_id(self, slot: int) -> int:
        """Return the id of a slot in transfers, as in :class:`.KVPool`."""
        return len(self.pool.ref_counts) + slot

    def finish_load(self, request: RequestKV, num_tokens: int) -> None:
        """Count the first ``num_tokens`` tokens, which were loaded, as computed."""
        super().finish_load(request, num_tokens)
        self.states.finish_load(request)

    def allocate(self, request: RequestKV, num_new_tokens: int) -> list[int] | None:
        """Make room for a request's next tokens, and plan which slots they use. Returns the blocks added, or None if
        there is no room. Called once in a step for each of its requests."""
        states, state = self.states, request.state
        assert state is not None, "the request was admitted"
        end = request.num_computed_tokens + num_new_tokens
        # Not only a decoded token comes alone: a prompt behind a longer one gets what that one leaves of a step.
        keeps_none = end % states.boundary or (end > request.num_prompt_tokens and not states.keeps_all)
        if num_new_tokens == 1 and not state.is_kept and keeps_none and state.lent_slot < 0:
            new_block_ids = super().allocate(request, 1)
            if new_block_ids is not None:
                states.add_decode(request, state.slot)
            return new_block_ids
        if not states.can_run(state) or (new_block_ids := super().allocate(request, num_new_tokens)) is None:
            return None
        states.add(request, num_new_tokens)
        return new_block_ids

    def extend(self, request: RequestKV, num_scheduled: int, count: int) -> list[int] | None:
        """Make room for tokens after those of the step, without a plan of slots."""
        request.num_computed_tokens -= num_scheduled
        new_block_ids = super().allocate(request, num_scheduled + count)
        request.num_computed_tokens += num_scheduled
        return new_block_ids

    def free(self, request: RequestKV, turn: SessionReturn | None = None) -> None:
        """Take all blocks and the slot of a request back."""
        if request.parked is not None and not request.block_ids:
            self._give_up_parked(request, request.parked)  # it ends, or all that is cached is forgotten
        super().free(request, turn)
        self.states.give_back(request)

    def _register_blocks(self, request: RequestKV, num_full_blocks: int) -> None:
        if not self._registers_output:
            num_full_blocks = min(num_full_blocks, request.num_prompt_tokens // self.block_size)
        if num_full_blocks > request.num_registered_blocks:
            super()._register_blocks(request, num_full_blocks)
