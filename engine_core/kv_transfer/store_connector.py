"""Shares prefix blocks with other engines through a store: saves them when they are computed, and loads what the pool
lacks.

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


class StoreMetadata(KVConnectorMetadata):
    """Lists what a step loads."""

    step: int
    """The number of the step, as in :attr:`BlockPool.step`."""
    loads: list[StoreJob]


class _Search:
    """Is what a request looks for, and the answer."""

    def __init__(self, job: StoreJob, first: int, names: Sequence[bytes], valid_until: float) -> None:
        self.job = job
        self.first = first
        """The first block that it looked for."""
        self.key_of = dict(zip(names, job.keys, strict=True))
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
        self._pool: KVPool | None = None
        self.queue: StoreQueue | None = None
        self._fresh: dict[int, bytes] = {}
        """By block: the hash of content that was registered and is not yet given to the queue."""
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
        self._fresh.clear()
        for search in self._searches.values():
            search.valid_until = 0.0
            search.key_of.clear()

    # Scheduler side

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        if states is not None:
            raise ValueError("kv_connector: layers of this model keep a state, which stores do not share; leave it out")
        self._blocks = pool
        pool.listeners.append(self)
        register, fresh = pool.register, self._fresh

        def note_registered(block_id: int, block_hash: bytes) -> bool:
            is_new = register(block_id, block_hash)
            if is_new and self._namespace:
                fresh[block_id] = block_hash
            return is_new

        # In its place, so that a pool whose blocks are not shared makes no further call.
        pool.register = note_registered  # type: ignore[method-assign]

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """Called by the block pool: what the queue has not got by now is not saved."""
        self._fresh.pop(block_id, None)

    def forgot(self, block_hash: bytes) -> None:
        """Called by the block pool when content proved wrong: no engine must get it."""
        if self._namespace and self.queue is not None:
            self.queue.remove(store_key(self._namespace, block_hash))

    def forgot_all(self) -> None:
        """Called by the block pool when it forgets what it has, which :meth:`share` says of the store."""
        self._fresh.clear()

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
        self._loads = []
        return metadata

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        self._searches.pop(request.request_id, None)
        self._matches.pop(request.request_id, None)
        return False  # blocks are saved while they are in the pool, held or not

    # Worker side

    def register_kv_caches(self, pool: KVPool) -> None:
        value_bytes = pool.block_bytes + HEAD_BYTES
        if self._most_value_bytes is not None and value_bytes > self._most_value_bytes:
            raise ValueError(
                f"kv_store: a block takes {value_bytes} bytes there, and it holds {self._most_value_bytes} bytes"
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
        if self._fresh:
            self._save_fresh()

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

    # Parts

    def _begin_search(self, request: RequestKV, first: int) -> tuple[int | None, bool]:
        assert self._blocks is not None, "bind_block_pool comes first"
        self._searches.pop(request.request_id, None)
        if self.queue is None or self.queue.is_away or first >= (request.num_tokens - 1) // self._block_size:
            return 0, False
        if self._num_open >= MOST_SEARCHES:
            return None, False
        if not (names := self._names(request, first, self._blocks)):
            return 0, False
        keys = [store_key(self._namespace, name) for name in names]
        job = StoreJob(request.request_id, keys, in_order=self._blocks.num_groups == 1)
        self._searches[request.request_id] = _Search(job, first, names, time.monotonic() + LEASE_SECONDS / 2)
        self._num_open += 1
        self.queue.submit(job)
        return None, True

    def _names(self, request: RequestKV, first: int, pool: BlockPool) -> list[bytes]:
        """Return the names of the blocks from ``first`` on that the pool lacks, without that of the last token, which
        is computed."""
        limit = (request.num_tokens - 1) // self._block_size
        hashes = [self._block_hash(request, index) for index in range(limit)]
        if pool.num_groups == 1:
            return hashes[first:]
        names = [group_key(block_hash, group) for block_hash in hashes for group in range(pool.num_groups)]
        return [name for name in names if pool.find(name) is None]

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
        if pool.num_groups > 1:
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

    def _save_fresh(self) -> None:
        pool, queue = self._blocks, self.queue
        assert pool is not None
        assert queue is not None
        if queue.is_away:
            self._fresh.clear()
            return
        given = []
        # Only the first ones are looked at: while the store is slower than the steps, nearly all of the pool waits.
        for block_id, name in self._fresh.items():
            if pool.registered_in[block_id] > self._last_ended:
                break  # its step has not ended, nor have those of the blocks behind it
            key = store_key(self._namespace, name)
            if not queue.save(SavedBlock(pool, block_id, name, key, pool.generations[block_id])):
                break
            given.append(block_id)
        for block_id in given:
            del self._fresh[block_id]

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
