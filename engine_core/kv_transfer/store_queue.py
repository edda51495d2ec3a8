"""The threads between a connector and a store of KV blocks, and of states of layers that keep one: searches, loads and
saves each have one, so that none waits behind another kind, and a fourth gives up on what a store does not answer.

No thread but these waits for the store. A store that fails, or is silent for its timeout, is left alone for a while:
what it would have had is computed.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom.process.fall_backs import OF_PROCESS

from ..kv_cache.block_pool import BlockPool
from .block_store import HEAD_BYTES, BlockStore, StoreError, StoreFullError, opened, seal
from .kv_transport import KVPool

log = logging.getLogger(__name__)

MAX_SAVES = 1024
"""Blocks that wait to be saved. They are named and not copied; more wait with the connector until they are evicted."""
RETRY_SECONDS = 5.0
"""For so long a store that failed is left alone, and twice as long after each further failure, up to a minute."""
MOST_RETRY_SECONDS = 60.0
_SEARCHED_AT_ONCE = 64
"""A long prompt is looked for in so many calls that each of them is an answer: a store that is slow is not silent."""
_MOST_WRONG = 4096
_JOIN_SECONDS = 10.0


class StoreJob:
    """Is a search, or a load. It ends once: with its result, or because the store takes too long."""

    def __init__(
        self,
        request_id: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int] = (),
        *,
        in_order: bool = True,
        followers: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """``block_ids``: the blocks to fill, one for each key; none: it is a search. ``in_order``: as in
        :meth:`BlockStore.find`. ``followers``: keys that are looked for if so many of the first ``keys`` were found."""
        self.request_id = request_id
        self.keys = keys
        self.block_ids = block_ids
        self.in_order = in_order
        self.followers = followers
        self.found = set[bytes]()
        """Of a search: the keys that have values. One that was given up has those that were found until then."""
        self.num_loaded = 0
        """Of a load: how many of its blocks are filled, the first ones."""
        self.failure = ""
        """One of ``KV_FAILURES`` if a load did not fill all of its blocks, or a search has no answer."""
        self.is_ended = False
        self.ends_at = 0.0
        """When it is given up in any case, a time of the queue's clock."""
        self.lock = threading.Lock()
        """Held while a block is filled, and while the job ends: nothing writes to its blocks after its end."""


class SavedBlock(NamedTuple):
    """Names a block, or a slot of states, that is to be saved.

    Attributes:
        pool: Of blocks, or of slots.
        name: The hash of its content.
        key: The store's key for that.
        generation: That of the block with this content.
        place: Its id in the :class:`.KVPool`.
    """

    pool: BlockPool
    block_id: int
    name: bytes
    key: bytes
    generation: int
    place: int

    @property
    def is_current(self) -> bool:
        """Whether the block has this content. Any thread may ask, before and after it copies the block: a new holder
        is given a new generation before it writes."""
        return (
            self.pool.content_of(self.block_id) == self.name and self.pool.generations[self.block_id] == self.generation
        )


class _Lane:
    """Is a thread with jobs of one kind."""

    def __init__(self, work: Callable[["_Lane", BlockStore, StoreJob], None]) -> None:
        self.work = work
        self.jobs: queue.SimpleQueue[StoreJob | None] = queue.SimpleQueue()  # one for each request that waits for it
        self.open = dict[StoreJob, None]()
        self.beat = 0.0
        """The latest time at which the thread had nothing to do, or the store answered."""


class StoreQueue:
    """Owns the threads. Each opens a store of its own."""

    def __init__(
        self,
        open_store: Callable[[], BlockStore],
        pool: KVPool,
        on_ended: Callable[[StoreJob], None],
        *,
        timeout: float,
        load_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_ended: Gets each job when it has ended, on one of the threads.
            timeout: Seconds without an answer after which the store is given up, and seconds that a search may take.
            load_timeout: Seconds that a load may take as long as blocks arrive.
        """
        self._open_store = open_store
        self._pool = pool
        self._on_ended = on_ended
        self._timeout, self._load_timeout = timeout, load_timeout
        self._clock = clock
        self.num_saved = 0
        """Blocks that this engine has added to the store."""
        self._away_until = 0.0
        self._num_failures = 0
        self._wrong_at: float | None = None
        """When a value was wrong, while the fall-back says so."""
        self._is_full = False
        self._closed = False
        self._changed = threading.Condition()
        """Guards the open jobs; the clock's thread waits on it."""
        self._searches, self._loads = _Lane(self._search), _Lane(self._load)
        self._saves: queue.Queue[SavedBlock | None] = queue.Queue(MAX_SAVES)
        self._wrong: deque[bytes] = deque(maxlen=_MOST_WRONG)
        """Keys whose values are to be removed."""
        self._threads = [
            threading.Thread(target=run, args=arguments, name=f"kv-store-{name}", daemon=True)
            for name, run, arguments in (
                ("search", self._run_lane, (self._searches,)),
                ("load", self._run_lane, (self._loads,)),
                ("save", self._run_saves, ()),
                ("clock", self._run_clock, ()),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_away(self) -> bool:
        """Whether the store is left alone because it has failed."""
        return self._clock() < self._away_until

    def submit(self, job: StoreJob) -> None:
        """Begin a search or a load."""
        lane, seconds = (self._loads, self._load_timeout) if job.block_ids else (self._searches, self._timeout)
        with self._changed:
            now = self._clock()
            job.ends_at = now + seconds
            if not lane.open:
                lane.beat = now
            lane.open[job] = None
            self._changed.notify()
        lane.jobs.put(job)

    def save(self, block: SavedBlock) -> bool:
        """Save a block. Returns False, and does nothing, if too many wait."""
        try:
            self._saves.put_nowait(block)
        except queue.Full:
            return False
        return True

    def remove(self, key: bytes) -> None:
        """Let no engine use the value of this key."""
        self._wrong.append(key)
        self._wake_saves()

    def is_wrong(self, key: bytes) -> bool:
        """Return whether the value of this key is to be removed, and is perhaps still there."""
        return key in self._wrong

    def close(self) -> None:
        """Drop what waits, and wait for what is in progress, but not for ever: the store may hang. Idempotent."""
        self._closed = True
        with self._changed:
            self._changed.notify()
        for lane in (self._searches, self._loads):
            lane.jobs.put(None)
        self._wake_saves()
        deadline = time.monotonic() + _JOIN_SECONDS  # of all threads together
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _wake_saves(self) -> None:
        with contextlib.suppress(queue.Full):  # then the thread has work, and looks after it
            self._saves.put_nowait(None)

    # The threads of searches and loads

    def _run_lane(self, lane: _Lane) -> None:
        store: BlockStore | None = None
        while (job := lane.jobs.get()) is not None and not self._closed:
            if job.is_ended:
                continue
            try:
                store = store or self._open_store()
                lane.work(lane, store, job)
                self._works()
            except Exception as error:
                self._fails(error)
                job.failure = job.failure or "transport"
            self._end(job)
        if store is not None:
            store.close()

    def _search(self, lane: _Lane, store: BlockStore, job: StoreJob) -> None:
        self._find(lane, store, job, job.keys, in_order=job.in_order)
        if job.followers and not job.is_ended:
            num_found = len(job.found)
            followers = [key for num_needed, key in job.followers if num_needed <= num_found]
            self._find(lane, store, job, followers, in_order=False)

    def _find(self, lane: _Lane, store: BlockStore, job: StoreJob, wanted: Sequence[bytes], *, in_order: bool) -> None:
        for begin in range(0, len(wanted), _SEARCHED_AT_ONCE):
            keys = wanted[begin : begin + _SEARCHED_AT_ONCE]
            found = store.find(keys, in_order=in_order)
            lane.beat = self._clock()
            with job.lock:
                if job.is_ended:
                    return
                job.found |= found
            if in_order and len(found) < len(keys):
                return

    def _load(self, lane: _Lane, store: BlockStore, job: StoreJob) -> None:
        # A state comes last, and has another size than the blocks before it.
        num_blocks = sum(each < self._pool.num_blocks for each in job.block_ids) if self._pool.num_slots else None
        self._read(lane, store, job, slice(num_blocks), self._pool.block_bytes)
        if num_blocks is not None and job.num_loaded == num_blocks:
            self._read(lane, store, job, slice(num_blocks, None), self._pool.slot_bytes)

    def _read(self, lane: _Lane, store: BlockStore, job: StoreJob, part: slice, nbytes: int) -> None:
        """Fill a part of a load's blocks, each of so many bytes, up to the first one that the store lacks."""
        keys = job.keys[part]
        with contextlib.closing(store.read(keys, HEAD_BYTES + nbytes)) as values:
            for key, block_id, value in zip(keys, job.block_ids[part], values, strict=True):
                lane.beat = self._clock()
                data = None if value is None else opened(key, value)
                if data is None:
                    # Wrong KV would show only as wrong text, so nothing is used that is not what was saved.
                    job.failure = "not_found" if value is None else "checksum"
                    if value is not None:
                        self.remove(key)
                    if value:  # not one that another engine has removed, or that is torn
                        self._wrong_at = self._clock()
                        OF_PROCESS.begin("kv_store", "a block had other bytes than were saved; it is removed")
                    return
                with job.lock:
                    if job.is_ended:  # another request may have its blocks by now
                        return
                    self._fill(block_id, data)
                    job.num_loaded += 1

    def _fill(self, block_id: int, data: memoryview) -> None:
        begin = 0
        for row in self._pool.rows(block_id):
            row[:] = np.frombuffer(data, np.uint8, len(row), begin)
            begin += len(row)
        self._pool.spread([block_id])

    def _end(self, job: StoreJob, failure: str = "") -> None:
        with job.lock:
            if job.is_ended:
                return
            job.is_ended = True
            job.failure = failure or job.failure
        with self._changed:
            for lane in (self._searches, self._loads):
                lane.open.pop(job, None)
        self._on_ended(job)

    # The clock's thread

    def _run_clock(self) -> None:
        while not self._closed:
            with self._changed:
                now = self._clock()
                late = list(self._late(now))
                times = [self._ends_at(lane, job) for lane in (self._searches, self._loads) for job in lane.open]
                if not late:
                    self._changed.wait(max(0.0, min(times) - now) if times else None)
            for job in late:
                self._end(job, "timeout")

    def _ends_at(self, lane: _Lane, job: StoreJob) -> float:
        return min(job.ends_at, lane.beat + self._timeout)

    def _late(self, now: float) -> Iterable[StoreJob]:
        """Yield the jobs that are given up now. A store without an answer for so long is left alone."""
        for lane in (self._searches, self._loads):
            if lane.open and lane.beat + self._timeout <= now:
                self._fails(StoreError(f"it has not answered for {self._timeout:g} s"))
                lane.beat = now  # of the jobs that come when it is tried again
                yield from lane.open
            else:
                yield from (job for job in lane.open if job.ends_at <= now)

    # The thread of saves

    def _run_saves(self) -> None:
        store: BlockStore | None = None
        buffer = np.empty(max(self._pool.block_bytes, self._pool.slot_bytes), np.uint8)
        while True:
            block = self._saves.get()
            if self._closed:
                break
            if self.is_away:
                continue
            try:
                store = store or self._open_store()
                while self._wrong:
                    store.remove(self._wrong[0])
                    self._wrong.popleft()
                if block is not None:
                    self._save(store, block, buffer)
            except StoreFullError as error:  # searches and loads go on
                self._is_full = True
                OF_PROCESS.begin("kv_store", str(error))
            except Exception as error:
                self._fails(error)
        if store is not None:
            store.close()

    def _save(self, store: BlockStore, block: SavedBlock, buffer: npt.NDArray[np.uint8]) -> None:
        if not block.is_current:
            return
        end = 0
        for row in self._pool.rows(block.place):
            buffer[end : end + len(row)] = row
            end += len(row)
        if block.is_current:  # after the copy: a block that has a new holder may have been written to meanwhile
            data = buffer[:end].data
            is_saved = store.write(block.key, [seal(block.key, data), data])
            self.num_saved += is_saved
            if is_saved and self._is_full:
                self._is_full = False
                OF_PROCESS.end("kv_store")
            self._works()

    def _fails(self, error: Exception) -> None:
        if not isinstance(error, StoreError):
            log.exception("the store of KV blocks failed because of a bug", exc_info=error)
        if not self.is_away:  # otherwise it is the same failure, seen by another thread
            seconds = min(RETRY_SECONDS * 2 ** min(self._num_failures, 8), MOST_RETRY_SECONDS)
            self._num_failures += 1
            self._away_until = self._clock() + seconds
            OF_PROCESS.begin("kv_store", str(error))

    def _works(self) -> None:
        was_wrong = self._wrong_at is not None and self._clock() - self._wrong_at > MOST_RETRY_SECONDS
        if was_wrong or (self._num_failures and not self.is_away):
            self._num_failures, self._wrong_at = 0, None
            OF_PROCESS.end("kv_store")
