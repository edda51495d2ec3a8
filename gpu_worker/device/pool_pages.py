"""Gives the KV pool its pages before a step writes to them: a page that the system must find first stops the step."""

import ctypes
import mmap
import threading
from collections.abc import Callable

from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool

# The system zeroes a huge page in 0.2 ms, and takes 7 to 25 ms where the host of a virtual machine has to find the
# memory; a step that begins blocks in all layers waited for eight of them. With pages ahead 32 streams of tiny-fp32 had
# a p99 between tokens of 51 to 65 ms instead of 88 to 105.
AHEAD_BYTES = 64 << 20
"""How much of the pool is ready behind the highest block of any request."""
_PIECE = 2 << 20
"""Bytes of one call. Meanwhile no other thread can map memory, so it must be short."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14; the mmap module does not name it

Populate = Callable[[PoolMemory, int, int], bool]
"""Gives a pool the pages of bytes [start, end). Returns False where the system cannot do that."""


def populate(memory: PoolMemory, start: int, end: int) -> bool:
    """Do as :data:`Populate` says, without the interpreter's lock. The content of the bytes does not change."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer, start))
    skipped = first % mmap.PAGESIZE
    # Not all pages at the start, as vLLM has them: the default pool is as large as half of the free memory.
    return bool(madvise(ctypes.c_void_p(first - skipped), ctypes.c_size_t(end - start + skipped), _POPULATE_WRITE) == 0)


def on_thread(work: Callable[[], None]) -> threading.Thread:
    """Start ``work`` on a thread, which does not keep the process alive."""
    thread = threading.Thread(target=work, name="pool-pages", daemon=True)
    thread.start()
    return thread


class PoolPages:
    """Follows the blocks that requests get. The scheduler gives out fresh blocks in ascending order, so those that come
    next are known. Belongs to the thread that steps."""

    def __init__(
        self,
        pool: KVPool,
        ahead_bytes: int = AHEAD_BYTES,
        *,
        first_blocks: int | None = None,
        populate: Populate = populate,
        start: Callable[[Callable[[], None]], threading.Thread] = on_thread,
    ) -> None:
        """Args:
        pool: In memory of the host.
        first_blocks: How many a first step may write to, which are all that a pool without requests has ready; None:
            as many as with requests.
        start: Runs a call on another thread.
        """
        self._pool = pool
        self._ahead = max(2, ahead_bytes // max(1, pool.block_bytes))  # blocks only: slots are few, and used soon
        # A small model would have room for thousands of tokens ready that nobody sends.
        self._first = self._ahead if first_blocks is None else min(self._ahead, max(2, first_blocks))
        self._populate = populate
        self._start = start
        self._ready = 0  # blocks below have their pages, or get them now
        self._thread: threading.Thread | None = None
        self._is_possible = True

    def drop(self) -> None:
        """Release all pages to the system."""
        self.close()
        self._pool.host.discard()
        self._ready = 0

    def close(self) -> None:
        """Wait until no thread touches the pool any more."""
        if self._thread is not None:
            self._thread.join()

    def begin(self) -> None:
        """Begin to make the first blocks ready."""
        if not self._ready:
            self._extend(0, self._first)

    def follow(self, step: SchedulerOutput) -> None:
        """Look at the blocks that requests got in this step, and begin to make more ready if few are left."""
        if self._ready < self._pool.num_blocks and self._is_possible:
            cached = step.scheduled_cached_reqs.new_block_ids
            used = 1 + max(map(max, filter(None, cached))) if any(cached) else 0
            for new in step.scheduled_new_reqs:
                used = max(used, 1 + max(new.block_ids, default=-1))
            # Half of the room before it runs out, so that the thread has time: a step must not catch up with it.
            is_short = used > max(0, self._ready - self._ahead // 2)
            if is_short and (self._thread is None or not self._thread.is_alive()):
                self._extend(used, self._ahead)

    def _extend(self, used: int, ahead: int) -> None:
        """Make blocks ready on another thread, up to ``ahead`` more than the ``used`` first ones. Those far before the
        used ones are skipped: where requests get blocks in another order, each would take a large part of the pool."""
        first, last = max(self._ready, used - ahead), min(used + ahead, self._pool.num_blocks)
        self._ready = last
        self._thread = self._start(lambda: self._make_ready(first, last))

    def _make_ready(self, first: int, last: int) -> None:
        for region in self._pool.regions_of(is_state=False):
            end = region.offset + last * region.block_bytes
            for start in range(region.offset + first * region.block_bytes, end, _PIECE):
                if not self._populate(self._pool.host, start, min(start + _PIECE, end)):
                    self._is_possible = False
                    return
