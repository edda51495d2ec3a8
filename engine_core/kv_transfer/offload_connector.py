"""Keeps prefix blocks that the pool evicts in a file, and loads them when a prompt needs them again.

For a model with several KV groups it finds the blocks that the file adds to those in the pool. Where layers keep a
state, the file has states too, under the hashes of the blocks that they follow: a prompt loads one state, and those
blocks before it that the pool lacks.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..data.config import CacheConfig
from ..data.request import ParkedTokens, RequestKV
from ..data.scheduler_output import SchedulerOutput
from ..kv_cache.block_pool import MOVED, BlockPool, hash_next_block
from ..kv_cache.state_slots import StateSlotPool
from .kv_connector import HoldsNothing, KVConnectorMetadata, KVConnectorStats
from .kv_transport import KVPool
from .offload_tier import MoveCosts, OffloadTier, ParkedFile, SavedStates, TierIndex, TierLoad, TierSave, find_tier_hits

BLANK_SHARE = 4
"""Blocks of sessions are saved ahead of their eviction once less than this part of the pool is blank."""
AHEAD_BYTES = 8 << 20
"""So much is copied ahead in a step, about a millisecond, and one block in any case."""
_NAMED_BLOCKS = 1 << 20
"""Blocks that the file names at most where they hold no bytes."""
MAX_AHEAD = 256
"""Blocks looked at in a step; most of a returned session's are in the file already."""


class OffloadEviction(msgspec.Struct):
    """Names a block, or a slot of states, whose content is saved into a slot of the file."""

    block_id: int
    """As in :class:`.KVPool`."""
    block_hash: bytes
    slot: int


class OffloadMetadata(KVConnectorMetadata):
    """Lists what a step evicts and loads."""

    step: int
    """The number of the step, as in :attr:`BlockPool.step`."""
    num_tokens: int
    """Those that the step computes."""
    evictions: list[OffloadEviction]
    loads: list[TierLoad]


class OffloadConnector(HoldsNothing):
    """Implements :class:`tokenloom.engine_core.kv_transfer.kv_connector.KVConnector` with a file."""

    def __init__(self, cache: CacheConfig, directory: Path, capacity_bytes: int) -> None:
        """``capacity_bytes`` limits the file. If no block fits, :meth:`register_kv_caches` raises ``ValueError``."""
        self._block_size = cache.block_size
        self._hash_seed = cache.block_hash_seed
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._index = TierIndex(0)
        self._states: SavedStates | None = None
        self.costs = MoveCosts()
        self.parked = ParkedFile(self.costs, self._is_kept, self._forget_parked)
        """What becomes of requests that are preempted, where layers keep a state."""
        self._matches: dict[str, TierLoad] = {}
        """By request: what it would load, still without blocks, until it loads or has ended."""
        self._evictions: list[OffloadEviction] = []  # of this step, as are their bytes and the loads
        self._evicted_bytes = 0
        self._loads: list[TierLoad] = []
        self._last_ended = -1
        """The latest step that has ended."""
        self._blocks: BlockPool | None = None
        self._pool: KVPool | None = None
        self._tier: OffloadTier | None = None
        self._lock = threading.Lock()
        self._loaded: list[tuple[TierLoad, int, str]] = []
        """Ended loads: blocks read, and the reason if not all were; bounded by the waiting requests."""
        self._reported: list[tuple[TierLoad, int, str]] = []
        """The loads of the latest ``get_finished``."""
        self._on_update: Callable[[], None] = lambda: None

    # Scheduler side

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        self._blocks = pool
        pool.listeners.append(self)
        pool.kept.unsaved = OrderedDict()
        if states is not None:
            self._states = SavedStates(states, self._save_state)
            states.parked_store = self.parked
            pool.save_parked = self._save_parked_block
            states.pool.save_parked = self._save_parked_state

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """Called by the block pool while a step is planned: save the block if the tier has room, unless a step in
        flight may still compute its content."""
        assert self._blocks is not None, "bind_block_pool comes first"
        if self._index.find(block_hash) is not None:
            self._index.touch(block_hash)
        elif self._blocks.registered_in[block_id] > self._last_ended:
            # With overlapping steps a block can be filled, hit, freed and evicted before the step that fills it has
            # run: what lies there now is another prompt's KV.
            return
        else:
            self._save(block_id, block_hash, self._index)

    def forgot(self, block_hash: bytes) -> None:
        """Called by the block pool when content proved wrong: the tier must not bring it back."""
        self._index.remove(block_hash)

    def forgot_all(self) -> None:
        """Called by the block pool when all cached content became useless, for example because the weights changed."""
        self._index.clear()
        self._evictions.clear()
        self._evicted_bytes = 0

    def share(self, identity: bytes) -> None:
        pass

    def get_num_new_matched_tokens(self, request: RequestKV, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._matches.pop(request.request_id, None)
        first = num_computed_tokens // self._block_size
        assert self._blocks is not None, "bind_block_pool comes first"
        if self._states is not None:
            if request.parked is not None:
                return self._match_parked(request, request.parked, self._blocks, self._states)
            return self._match_state(request, self._blocks, self._states, first)
        if self._blocks.num_groups > 1:
            return self._match_groups(request, self._blocks, first)
        slots = self._find_slots(request, first)
        if not slots:
            return 0, False
        hashes = request.block_hashes[first : first + len(slots)]
        for block_hash in hashes:
            self._index.touch(block_hash)
        self._matches[request.request_id] = TierLoad(
            request.request_id, slots, hashes, [], range(first, first + len(slots))
        )
        return len(slots) * self._block_size, True

    def update_state_after_alloc(self, request: RequestKV, block_ids: list[int], num_external_tokens: int) -> None:
        load = self._matches.pop(request.request_id, None)
        if load is None or not num_external_tokens:
            return
        # Allocating blocks may have evicted one whose save took over a slot of this load; the tier notices that.
        load.block_ids = [block_ids[position] for position in load.positions]
        self._loads.append(load)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMetadata:
        assert self._blocks is not None, "bind_block_pool comes first"
        if self._blocks.kept.unsaved:
            self._save_ahead(self._blocks, self._blocks.kept.unsaved)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        metadata = OffloadMetadata(self._blocks.step, num_tokens, self._evictions, self._loads)
        self._blocks.step += 1
        if self._states is not None:
            # A state can be hit, and counts as registered, a step after the one that writes it.
            self._states.states.pool.step = self._blocks.step - 1
        self._evictions, self._loads, self._evicted_bytes = [], [], 0
        return metadata

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        self._matches.pop(request.request_id, None)
        return False  # cached blocks are saved when they are evicted

    # Worker side

    def register_kv_caches(self, pool: KVPool) -> None:
        num_slots, num_states = self._divide(pool)
        if num_slots < 1:
            raise ValueError(
                f"an offload file of {self._capacity_bytes} bytes is smaller than one block of {pool.block_bytes} bytes"
                + (f" and one state of {pool.slot_bytes}" if pool.num_slots else "")
            )
        self._pool = pool
        self.parked.block_bytes, self.parked.slot_bytes = pool.block_bytes, pool.slot_bytes
        self._index = TierIndex(num_slots)
        if self._states is not None:
            self._states.index = TierIndex(num_states, num_slots)
        self._tier = OffloadTier(self._directory, num_slots, pool, self._note_loaded, num_states, self.costs)

    def _divide(self, pool: KVPool) -> tuple[int, int]:
        """Return how many blocks and how many states the file holds: in the proportion of the pool's memory."""
        if not pool.num_slots:
            return self._capacity_bytes // pool.block_bytes, 0
        of_blocks, of_states = pool.num_blocks * pool.block_bytes, pool.num_slots * pool.slot_bytes
        num_states = max(1, self._capacity_bytes * of_states // (of_blocks + of_states) // pool.slot_bytes)
        rest = self._capacity_bytes - num_states * pool.slot_bytes
        # Where no layer attends, blocks have no bytes: they only name what the states were computed from.
        return (rest // pool.block_bytes if pool.block_bytes else _NAMED_BLOCKS * (rest >= 0)), num_states

    def save_overwritten_kv(self, metadata: KVConnectorMetadata) -> None:
        """Copy the evicted blocks. The file is written next to the steps."""
        assert isinstance(metadata, OffloadMetadata)
        assert self._pool is not None
        assert self._tier is not None
        if self._states is not None:
            self.costs.step_begins(metadata.step, metadata.num_tokens)
        for eviction in metadata.evictions:
            # Copied here and not by the tier's thread: the step that is about to run overwrites the block.
            data = b"".join(row.data for row in self._pool.rows(eviction.block_id))
            self._tier.save(TierSave(eviction.slot, eviction.block_hash, data))

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, OffloadMetadata)
        assert self._tier is not None
        for load in metadata.loads:
            self._tier.load(load)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, OffloadMetadata)
        self._last_ended = metadata.step
        if self._states is not None:
            self.costs.step_ended(metadata.step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        with self._lock:
            self._reported, self._loaded = self._loaded, []
        for load, count, failure in self._reported:
            if failure:
                is_state = self._states is not None and count == len(load.slots) - 1  # it is the last of a load
                index = self._index if self._states is None or not is_state else self._states.index
                index.remove(load.block_hashes[count])
            if load.is_parked:
                for name in load.block_hashes:
                    self._forget_parked(name)
        return set(), {load.request_id for load, _, _ in self._reported}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block_id for load, count, _ in self._reported for block_id in load.block_ids[count:]}

    def get_kv_connector_stats(self) -> KVConnectorStats:
        assert self._pool is not None
        stats = KVConnectorStats()
        for load, count, failure in self._reported:
            if count:
                stats.add_received("offload", load.block_ids[:count], self._pool)
            if failure:
                stats.failures[load.request_id] = failure
        return stats

    def has_updates(self) -> bool:
        return bool(self._loaded)

    def on_update(self, callback: Callable[[], None]) -> None:
        self._on_update = callback

    def shutdown(self) -> None:
        if self._tier is not None:
            self._tier.close()

    def _save_ahead(self, pool: BlockPool, unsaved: OrderedDict[int, None]) -> None:
        """Save free blocks of sessions, a few in each step, once the pool is about to evict some."""
        assert self._pool is not None
        # Not while others wait for the file: a session that returns would wait for them too.
        if self._tier is None or self._tier.is_busy or pool.num_blank * BLANK_SHARE > pool.num_blocks:
            return
        # A long prompt evicts more in a step than may wait for the file: 2,048 tokens of a model of 0.6 B parameters
        # are 230 MB. What is dropped then breaks the chain, and a session would have to compute all that follows.
        most = len(self._evictions) + max(AHEAD_BYTES // max(1, self._pool.block_bytes), 1)
        for _ in range(min(len(unsaved), MAX_AHEAD)):
            if len(self._evictions) >= most or not self._has_room(self._pool.block_bytes):
                return
            block_id, _ = unsaved.popitem(last=False)
            block_hash = pool.content_of(block_id)
            if block_hash is None or self._index.find(block_hash) is not None:
                continue
            if pool.registered_in[block_id] > self._last_ended:
                unsaved[block_id] = None  # its step has not run
            else:
                self._save(block_id, block_hash, self._index)

    def _save(self, block_id: int, block_hash: bytes, index: TierIndex) -> None:
        """Save a block or a state in this step, if the tier has room."""
        nbytes = 0 if self._pool is None else self._pool.nbytes_of([block_id])
        if self._has_room(nbytes):
            self._evicted_bytes += nbytes
            self._evictions.append(OffloadEviction(block_id, block_hash, index.add(block_hash)))

    def _save_state(self, slot: int, block_hash: bytes) -> None:
        """Save the state of a slot in this step, unless a step in flight may still compute it."""
        assert self._states is not None
        assert self._blocks is not None
        if self._states.states.pool.registered_in[slot] <= self._last_ended:
            self._save(len(self._blocks.ref_counts) + slot, block_hash, self._states.index)

    def _save_parked_block(self, block_id: int, name: bytes) -> None:
        """Called by the block pool when it gives up a block that one preempted request looks for."""
        assert self._blocks is not None
        if name.startswith(MOVED) and self._blocks.registered_in[block_id] <= self._last_ended:
            self._save(block_id, name, self._index)

    def _save_parked_state(self, slot: int, name: bytes) -> None:
        if name.startswith(MOVED):
            self._save_state(slot, name)

    def _is_kept(self, parked: ParkedTokens) -> bool:
        """Return whether all content of a preempted request is in the pools or in the file."""
        pool, saved = self._blocks, self._states
        assert pool is not None
        assert saved is not None
        has_state = saved.states.pool.find(parked.slot) is not None or saved.index.find(parked.slot) is not None
        return has_state and all(
            pool.find(name) is not None or self._index.find(name) is not None for name in parked.blocks
        )

    def _forget_parked(self, name: bytes) -> None:
        """Let the file not have what only one request has looked for."""
        if name.startswith(MOVED) and self._states is not None:
            self._index.remove(name)
            self._states.index.remove(name)

    def _match_parked(
        self, request: RequestKV, parked: ParkedTokens, pool: BlockPool, saved: SavedStates
    ) -> tuple[int, bool]:
        """Note what a preempted request would load of what it had: the blocks that the pool lacks, and its state."""
        here = 0
        while here < len(parked.blocks) - 1 and pool.find(parked.blocks[here]) is not None:
            here += 1
        slots, keys, positions = list[int](), list[bytes](), list[int]()
        for position in range(here, len(parked.blocks)):
            if pool.find(name := parked.blocks[position]) is None:
                slot = self._index.find(name)
                assert slot is not None, "the manager has asked whether all is kept"
                slots.append(slot)
                keys.append(name)
                positions.append(position)
                self._index.touch(name)
        state = saved.index.find(parked.slot)
        assert state is not None, "the manager has asked whether all is kept"
        saved.index.touch(parked.slot)
        self._matches[request.request_id] = TierLoad(
            request.request_id,
            [*slots, state],
            [*keys, parked.slot],
            [],
            [*positions, len(parked.blocks)],
            is_parked=True,
        )
        return parked.num_tokens - here * self._block_size, True

    def _has_room(self, nbytes: int) -> bool:
        """Return whether so many more bytes of this step may wait for the file."""
        return self._tier is not None and self._tier.has_room(self._evicted_bytes + nbytes)

    def _match_state(self, request: RequestKV, pool: BlockPool, saved: SavedStates, first: int) -> tuple[int, bool]:
        """Note which state a request would load that follows more than its ``first`` blocks, with the blocks before it
        that the pool lacks. A request whose load has failed computes instead, because nothing of it was kept."""
        if request.remote is not None and request.remote.failure:
            return 0, False
        count, limit = first, (request.num_tokens - 1) // self._block_size
        slots = list[int | None]()
        while count < limit:
            block_hash = self._block_hash(request, count)
            slot = None if pool.find(block_hash) is not None else self._index.find(block_hash)
            if slot is None and pool.find(block_hash) is None:
                break
            slots.append(slot)
            count += 1
        for end in saved.states.ends(request, count):
            if end <= first:
                break
            if (state := saved.index.find(request.block_hashes[end - 1])) is not None:
                self._note_match(request, first, slots[: end - first], state, saved.index)
                return (end - first) * self._block_size, True
        return 0, False

    def _note_match(
        self, request: RequestKV, first: int, slots: Sequence[int | None], state: int, states: TierIndex
    ) -> None:
        end = first + len(slots)
        positions = [position for position, slot in enumerate(slots, first) if slot is not None]
        keys = [request.block_hashes[position] for position in positions]
        for key in keys:
            self._index.touch(key)
        last = request.block_hashes[end - 1]
        states.touch(last)
        found = [slot for slot in slots if slot is not None]
        self._matches[request.request_id] = TierLoad(
            request.request_id, [*found, state], [*keys, last], [], [*positions, end]
        )

    def _find_slots(self, request: RequestKV, first_block: int) -> list[int]:
        """Return the slots of the blocks from ``first_block`` on, without the last token, which is computed."""
        slots = []
        for index in range(first_block, (request.num_tokens - 1) // self._block_size):
            slot = self._index.find(self._block_hash(request, index))
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _match_groups(self, request: RequestKV, pool: BlockPool, first_block: int) -> tuple[int, bool]:
        """Note what a request of a grouped model would load after its first blocks; it may share more of the pool's.
        A request whose load has failed computes instead, because nothing of that load was kept."""
        # Else the same slots would be found, and fail, in every step.
        if request.remote is not None and request.remote.failure:
            return 0, False
        limit = (request.num_tokens - 1) // self._block_size
        found = find_tier_hits(
            lambda index: self._block_hash(request, index), pool, self._index.find, first_block, limit, self._block_size
        )
        if not found.slots:
            return 0, False
        for key in found.keys:
            self._index.touch(key)
        self._matches[request.request_id] = TierLoad(request.request_id, found.slots, found.keys, [], found.positions)
        return (found.num_blocks - first_block) * self._block_size, True

    def _block_hash(self, request: RequestKV, index: int) -> bytes:
        """Return the hash of the block at ``index``; the request keeps the computed hashes."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            hash_next_block(request, self._block_size, self._hash_seed)
        return hashes[index]

    def _note_loaded(self, load: TierLoad, count: int, failure: str) -> None:
        with self._lock:
            self._loaded.append((load, count, failure))
        self._on_update()
