"""Shares prefix blocks with other engines through a store: saves them when they are computed, and loads what the pool
lacks. Where layers keep a state, the states that are kept go there, too, under the hashes of the blocks that they
follow: a prompt loads one state, and those blocks before it that the pool lacks.

A block's key says all that engines must share to use each other's blocks: weights and numerics (:meth:`share`), the
layout of the pool, and the hash of its tokens, into which tenant, adapter and images are salted. Before the weights are
known, and while they change, nothing is looked for and nothing saved.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence

from ..data.config import CacheConfig
from ..data.request import RequestKV
from ..data.scheduler_output import SchedulerOutput
from ..kv_cache.block_pool import BlockPool, hash_next_block
from ..kv_cache.prefix_search import group_key
from ..kv_cache.state_slots import StateSlotPool
from .block_store import HEAD_BYTES, LEASE_SECONDS, BlockStore, store_key
from .kv_connector import HoldsNothing, KVConnectorMetadata, KVConnectorStats
from .kv_transport import KVPool
from .offload_tier import find_tier_hits
from .store_queue import SavedBlock, StoreJob, StoreQueue

MOST_SEARCHES = 32
"""Requests that wait for answers at the same time. Those behind them wait in the queue, unhashed: a step that looked at
all of them would take long."""


_OF_STATE = b"state "
"""Precedes the hash of a block in the name of the state that follows it."""


class _Fresh:
    """Notes what a pool of blocks, or of slots, registers until the queue has its name. Implements
    ``EvictionListener``."""

    def __init__(self, pool: BlockPool, kind: bytes, first: int, connector: "StoreConnector") -> None:
        """``kind``: precedes hashes in names. ``first``: the id of its first block in the :class:`.KVPool`."""
        self._pool, self._kind, self._first, self._connector = pool, kind, first, connector
        self.contents: dict[int, bytes] = {}
        """By block: the hash of content that was registered and is not yet given to the queue."""
        pool.listeners.append(self)
        register, contents = pool.register, self.contents

        def note_registered(block_id: int, block_hash: bytes) -> bool:
            is_new = register(block_id, block_hash)
            if is_new and connector.shares:
                contents[block_id] = block_hash
            return is_new

        # In its place, so that a pool whose blocks are not shared makes no further call.
        pool.register = note_registered  # type: ignore[method-assign]

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """Called by the pool: what the queue has not got by now is not saved."""
        self.contents.pop(block_id, None)

    def forgot(self, block_hash: bytes) -> None:
        """Called by the pool when content proved wrong: no engine must get it."""
        self._connector.remove(self._kind + block_hash)

    def forgot_all(self) -> None:
        """Called by the pool when it forgets what it has, which :meth:`StoreConnector.share` says of the store."""
        self.contents.clear()

    def save(self, queue: StoreQueue, last_ended: int, key_of: Callable[[bytes], bytes]) -> None:
        """Give the queue what steps up to ``last_ended`` have filled."""
        pool, given = self._pool, list[int]()
        # Only the first ones are looked at: while the store is slower than the steps, nearly all of the pool waits.
        for block_id, name in self.contents.items():
            if pool.registered_in[block_id] > last_ended:
                break  # its step has not ended, nor have those of the blocks behind it
            if name not in pool.parked:  # which one preempted request looks for, and no prompt
                key, generation = key_of(self._kind + name), pool.generations[block_id]
                if not queue.save(SavedBlock(pool, block_id, name, key, generation, self._first + block_id)):
                    break
            given.append(block_id)
        for block_id in given:
            del self.contents[block_id]


class StoreMetadata(KVConnectorMetadata):
    """Lists what a step loads."""

    step: int
    """The number of the step, as in :attr:`BlockPool.step`."""
    loads: list[StoreJob]


class _Search:
    """Is what a request looks for, and the answer."""

    def __init__(self, job: StoreJob, first: int, key_of: dict[bytes, bytes], valid_until: float) -> None:
        """``key_of``: the store's key of each name that is looked for."""
        self.job = job
        self.first = first
        """The first block that it looked for."""
        self.key_of = key_of
        self.valid_until = valid_until
        """A time of ``time.monotonic``: later, the store may have given up what it had."""


class StoreConnector(HoldsNothing):
    """Implements :class:`tokenloom.engine_core.kv_transfer.kv_connector.KVConnector` with a store."""

    def __init__(
        self,
        cache: CacheConfig,
        open_store: Callable[[], BlockStore],
        label: str,
        *,
        timeout: float,
        load_timeout: float,
        most_value_bytes: int | None = None,
    ) -> None:
        """
        Args:
            open_store: Called by each thread that uses the store, which closes what it gets.
            label: Names the kind of store in metrics.
            timeout: Seconds, as for :class:`StoreQueue`, with ``load_timeout``.
            most_value_bytes: What the store can hold; a pool whose blocks are larger is refused. None: anything.
        """
        self._block_size = cache.block_size
        self._hash_seed = cache.block_hash_seed
        self._open_store = open_store
        self._label = label
        self._timeouts = timeout, load_timeout
        self._most_value_bytes = most_value_bytes
        self._namespace = b""
        """What the keys of all blocks have in common; empty: nothing is shared now."""
        self._blocks: BlockPool | None = None
        self._states: StateSlotPool | None = None
        self._pool: KVPool | None = None
        self.queue: StoreQueue | None = None
        self._fresh: list[_Fresh] = []
        """What was registered, of blocks and, where layers keep a state, of slots."""
        self._last_ended = -1
        """The latest step that has ended."""
        self._searches: dict[str, _Search] = {}
        """By request, until it loads, runs or ends."""
        self._num_open = 0
        """Searches without an answer, those of ended requests too."""
        self._matches: dict[str, tuple[Sequence[bytes], Sequence[int]]] = {}
        """By request: the keys that it would load, and their places in its block table."""
        self._loads: list[StoreJob] = []  # of this step
        self._lock = threading.Lock()
        self._ended: list[StoreJob] = []
        """Jobs that have ended since ``get_finished``; bounded by the waiting requests."""
        self._reported: list[StoreJob] = []
        """The loads of the latest ``get_finished``."""
        self._on_update: Callable[[], None] = lambda: None

    def share(self, identity: bytes) -> None:
        """Use blocks of engines with this identity from now on: a digest of weights, numerics and what else decides the
        content of blocks. Empty: share nothing, because it is not known which weights the model has."""
        assert self._pool is not None, "register_kv_caches comes first"
        about = f"{self._pool.layout}/{self._pool.region_bytes}/{self._block_size}".encode()
        self._namespace = hashlib.sha256(identity + self._hash_seed + about).digest() if identity else b""
        for fresh in self._fresh:
            fresh.contents.clear()
        for search in self._searches.values():
            search.valid_until = 0.0
            search.key_of.clear()

    # Scheduler side

    @property
    def shares(self) -> bool:
        """Whether it is known with whom."""
        return bool(self._namespace)

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        self._blocks, self._states = pool, states
        self._fresh = [_Fresh(pool, b"", 0, self)]
        if states is not None:
            self._fresh.append(_Fresh(states.pool, _OF_STATE, len(pool.ref_counts), self))

    def remove(self, name: bytes) -> None:
        """Let no engine use what has this name."""
        if self._namespace and self.queue is not None:
            self.queue.remove(store_key(self._namespace, name))

    def get_num_new_matched_tokens(self, request: RequestKV, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._matches.pop(request.request_id, None)
        # A request whose load has failed computes: it would find the same blocks, and fail again.
        if not self._namespace or request.is_decode_leg or (request.remote is not None and request.remote.failure):
            return 0, False
        first = num_computed_tokens // self._block_size
        search = self._searches.get(request.request_id)
        if search is not None:
            if not search.job.is_ended:
                return None, True
            if search.first <= first and time.monotonic() < search.valid_until:
                return self._match(request, search, first)
        return self._begin_search(request, first)

    def update_state_after_alloc(self, request: RequestKV, block_ids: list[int], num_external_tokens: int) -> None:
        self._searches.pop(request.request_id, None)
        match = self._matches.pop(request.request_id, None)
        if match is None or not num_external_tokens:
            return
        keys, positions = match
        targets = [block_ids[position] for position in positions]
        self._loads.append(StoreJob(request.request_id, keys, targets))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StoreMetadata:
        assert self._blocks is not None, "bind_block_pool comes first"
        metadata = StoreMetadata(self._blocks.step, self._loads)
        self._blocks.step += 1
        if self._states is not None:
            # A state can be hit, and counts as registered, a step after the one that writes it.
            self._states.pool.step = self._blocks.step - 1
        self._loads = []
        return metadata

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        self._searches.pop(request.request_id, None)
        self._matches.pop(request.request_id, None)
        return False  # blocks are saved while they are in the pool, held or not

    # Worker side

    def register_kv_caches(self, pool: KVPool) -> None:
        for kind, nbytes in (("block", pool.block_bytes), ("state", pool.slot_bytes)):
            if self._most_value_bytes is not None and (value_bytes := nbytes + HEAD_BYTES) > self._most_value_bytes:
                raise ValueError(
                    f"kv_store: a {kind} takes {value_bytes} bytes there, and it holds {self._most_value_bytes} bytes"
                )
        self._pool = pool
        timeout, load_timeout = self._timeouts
        self.queue = StoreQueue(self._open_store, pool, self._note_ended, timeout=timeout, load_timeout=load_timeout)

    def save_overwritten_kv(self, metadata: KVConnectorMetadata) -> None:
        pass

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, StoreMetadata)
        assert self.queue is not None
        for load in metadata.loads:
            self.queue.submit(load)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        """Let blocks be saved that steps have filled which have ended; nothing is copied here."""
        assert isinstance(metadata, StoreMetadata)
        self._last_ended = metadata.step
        for fresh in self._fresh:
            if fresh.contents:
                self._save_fresh(fresh)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        with self._lock:
            ended, self._ended = self._ended, []
        self._reported = [job for job in ended if job.block_ids]
        self._num_open -= len(ended) - len(self._reported)
        return set(), {job.request_id for job in ended}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block_id for job in self._reported for block_id in job.block_ids[job.num_loaded :]}

    def get_kv_connector_stats(self) -> KVConnectorStats:
        assert self._pool is not None
        stats = KVConnectorStats()
        for job in self._reported:
            if job.num_loaded:
                stats.add_received(self._label, job.block_ids[: job.num_loaded], self._pool)
            if job.failure:
                stats.failures[job.request_id] = job.failure
        return stats

    def has_updates(self) -> bool:
        return bool(self._ended)

    def on_update(self, callback: Callable[[], None]) -> None:
        self._on_update = callback

    def shutdown(self) -> None:
        if self.queue is not None:
            self.queue.close()

    def _begin_search(self, request: RequestKV, first: int) -> tuple[int | None, bool]:
        assert self._blocks is not None, "bind_block_pool comes first"
        self._searches.pop(request.request_id, None)
        if self.queue is None or self.queue.is_away or first >= (request.num_tokens - 1) // self._block_size:
            return 0, False
        if self._num_open >= MOST_SEARCHES:
            return None, False
        names, states = self._names(request, first, self._blocks), list[tuple[int, bytes]]()
        if self._states is not None:
            states = self._state_names(request, first, self._blocks, self._states)
        if not names and not states:
            return 0, False
        keys = [store_key(self._namespace, name) for name in names]
        followers = [(num_needed, store_key(self._namespace, name)) for num_needed, name in states]
        job = StoreJob(request.request_id, keys, in_order=self._blocks.num_groups == 1, followers=followers)
        key_of = dict(zip(names, keys, strict=True))
        key_of |= {name: key for (_, name), (_, key) in zip(states, followers, strict=True)}
        self._searches[request.request_id] = _Search(job, first, key_of, time.monotonic() + LEASE_SECONDS / 2)
        self._num_open += 1
        self.queue.submit(job)
        return None, True

    def _names(self, request: RequestKV, first: int, pool: BlockPool) -> list[bytes]:
        """Return the names of the blocks from ``first`` on that the pool lacks, without that of the last token, which
        is computed."""
        limit = (request.num_tokens - 1) // self._block_size
        hashes = [self._block_hash(request, index) for index in range(limit)]
        if self._states is not None:
            return [name for name in hashes[first:] if pool.find(name) is None]
        if pool.num_groups == 1:
            return hashes[first:]
        names = [group_key(block_hash, group) for block_hash in hashes for group in range(pool.num_groups)]
        return [name for name in names if pool.find(name) is None]

    def _state_names(
        self, request: RequestKV, first: int, pool: BlockPool, states: StateSlotPool
    ) -> list[tuple[int, bytes]]:
        """Return the names of the states that may follow more than ``first`` blocks, the last first, and how many of
        the blocks that the pool lacks lie before each."""
        limit, needed = (request.num_tokens - 1) // self._block_size, [0]
        for index in range(first, limit):
            needed.append(needed[-1] + (pool.find(self._block_hash(request, index)) is None))
        ends = [end for end in states.ends(request, limit) if end > first]
        return [(needed[end - first], _OF_STATE + self._block_hash(request, end - 1)) for end in ends]

    def _match(self, request: RequestKV, search: _Search, first: int) -> tuple[int, bool]:
        """Note what a request would load after its ``first`` blocks of those that were found."""
        assert self._blocks is not None
        assert self.queue is not None
        pool, found, key_of = self._blocks, search.job.found, search.key_of
        wrong = {key for key in found if self.queue.is_wrong(key)}

        def find(name: bytes) -> int | None:
            key = key_of.get(name)
            return 0 if key is not None and key in found and key not in wrong else None

        limit = (request.num_tokens - 1) // self._block_size
        if self._states is not None:
            end, names, positions = self._match_state(request, self._states, find, first, limit)
        elif pool.num_groups > 1:
            hits = find_tier_hits(
                lambda index: self._block_hash(request, index), pool, find, first, limit, self._block_size
            )
            end, names, positions = hits.num_blocks, hits.keys, list(hits.positions)
        else:
            end = first
            while end < limit and find(self._block_hash(request, end)) is not None:
                end += 1
            positions = list(range(first, end))
            names = [self._block_hash(request, index) for index in positions]
        if end <= first:
            return 0, False
        self._matches[request.request_id] = [key_of[name] for name in names], positions
        return (end - first) * self._block_size, True

    def _match_state(
        self,
        request: RequestKV,
        states: StateSlotPool,
        find: Callable[[bytes], int | None],
        first: int,
        limit: int,
    ) -> tuple[int, list[bytes], list[int]]:
        """Return after how many blocks the last state lies that was found, with the names of what the pool lacks up to
        there, and their places in the block table: the state's is behind those of its blocks."""
        assert self._blocks is not None
        count, lacking = first, list[int]()
        while count < limit:
            name = self._block_hash(request, count)
            if self._blocks.find(name) is None:
                if find(name) is None:
                    break
                lacking.append(count)
            count += 1
        for end in states.ends(request, count):
            if end <= first:
                break
            if find(name := _OF_STATE + self._block_hash(request, end - 1)) is not None:
                positions = [index for index in lacking if index < end]
                return end, [*(self._block_hash(request, index) for index in positions), name], [*positions, end]
        return first, [], []

    def _save_fresh(self, fresh: _Fresh) -> None:
        assert self.queue is not None
        if self.queue.is_away:
            fresh.contents.clear()
            return
        fresh.save(self.queue, self._last_ended, lambda name: store_key(self._namespace, name))

    def _block_hash(self, request: RequestKV, index: int) -> bytes:
        """Return the hash of the block at ``index``; the request keeps the computed hashes."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            hash_next_block(request, self._block_size, self._hash_seed)
        return hashes[index]

    def _note_ended(self, job: StoreJob) -> None:
        with self._lock:
            self._ended.append(job)
        self._on_update()
