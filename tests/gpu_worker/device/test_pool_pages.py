"""The pages of a pool are ready before requests need them, and no more of them than that."""

import ctypes
import mmap
import threading

import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion
from tokenloom.gpu_worker.device.pool_pages import PoolPages

_BLOCK = mmap.PAGESIZE
_NUM_BLOCKS = 64


def _pool(num_blocks=_NUM_BLOCKS, shared=False):
    memory = PoolMemory.allocate(2 * num_blocks * _BLOCK, shared)
    return KVPool(memory, (KVRegion(0, _BLOCK), KVRegion(num_blocks * _BLOCK, _BLOCK)), num_blocks, "test")


def _step(new=(), appended=()):
    params = CoreSamplingParams(max_tokens=1, seed=0)
    requests = [NewRequestData(f"new {i}", [1], [], params, list(ids), 0) for i, ids in enumerate(new)]
    known = [f"known {i}" for i in range(len(appended))]
    cached = CachedRequestData(known, [list(ids) for ids in appended], [16] * len(known), {})
    return SchedulerOutput(requests, cached, {}, 0, [], [])


class _Idle(threading.Thread):
    """Stands for a thread that has ended, or runs until ``end``."""

    def __init__(self, runs=False):
        super().__init__()
        self._runs = runs

    def is_alive(self):
        return self._runs

    def end(self):
        self._runs = False

    def join(self, timeout=None):
        self._runs = False


class _Populated:
    """Notes which bytes get pages; the thread of each call ends at once, unless ``is_slow``."""

    def __init__(self, pool, *, works=True, first_blocks=None):
        self.calls = []
        self.is_slow = False
        self.thread = _Idle()
        self._works = works
        ahead = 2 * 8 * _BLOCK
        self.pages = PoolPages(pool, ahead, first_blocks=first_blocks, populate=self._populate, start=self._start)

    def _populate(self, memory, start, end):
        self.calls.append((start // _BLOCK, end // _BLOCK))
        return self._works

    def _start(self, work):
        work()
        self.thread = _Idle(self.is_slow)
        return self.thread

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def test_it_begins_with_the_first_blocks_of_every_region():
    seen = _Populated(_pool())
    seen.pages.begin()
    assert seen.take() == [(0, 8), (64, 72)]
    seen.pages.begin()
    assert seen.take() == []


def test_a_pool_without_requests_has_only_the_blocks_of_a_first_step():
    seen = _Populated(_pool(), first_blocks=3)
    seen.pages.begin()
    assert seen.take() == [(0, 3), (64, 67)]
    seen.pages.follow(_step())
    assert seen.take() == []
    seen.pages.follow(_step(new=[[1]]))
    assert seen.take() == [(3, 10), (67, 74)]


def test_the_first_blocks_are_never_more_than_with_requests():
    seen = _Populated(_pool(), first_blocks=1000)
    seen.pages.begin()
    assert seen.take() == [(0, 8), (64, 72)]


def test_it_makes_more_ready_when_requests_have_used_half_of_them():
    seen = _Populated(_pool())
    seen.pages.begin()
    seen.take()
    seen.pages.follow(_step())
    seen.pages.follow(_step(new=[[0, 1]], appended=[[], [3]]))
    assert seen.take() == []
    seen.pages.follow(_step(appended=[[2], [], [4]]))
    assert seen.take() == [(8, 13), (72, 77)]


def test_it_skips_what_lies_far_below_the_blocks_of_a_request():
    seen = _Populated(_pool())
    seen.pages.begin()
    seen.take()
    seen.pages.follow(_step(new=[[40]]))
    assert seen.take() == [(33, 49), (97, 113)]


def test_it_ends_with_the_pool():
    seen = _Populated(_pool())
    seen.pages.begin()
    seen.pages.follow(_step(new=[[60]]))
    assert seen.take()[-2:] == [(53, 64), (117, 128)]
    seen.pages.follow(_step(new=[[63]]))
    assert seen.take() == []


def test_one_thread_runs_at_a_time():
    seen = _Populated(_pool())
    seen.is_slow = True
    seen.pages.begin()
    seen.take()
    seen.pages.follow(_step(new=[[7]]))
    assert seen.take() == []
    seen.thread.end()
    seen.pages.follow(_step(new=[[8]]))
    assert seen.take() == [(8, 17), (72, 81)]


def test_it_gives_up_where_the_system_cannot_do_it():
    seen = _Populated(_pool(), works=False)
    seen.pages.begin()
    assert len(seen.take()) == 1
    seen.pages.follow(_step(new=[[30]]))
    assert seen.take() == []


def test_large_ranges_are_made_ready_in_pieces():
    block = 3 << 20
    memory = PoolMemory.allocate(4 * block, shared=False)
    calls = []

    def populate(_, start, end):
        calls.append((start, end))
        return True

    def start(work):
        work()
        return _Idle()

    PoolPages(KVPool(memory, (KVRegion(0, block),), 4, "test"), 2 * block, populate=populate, start=start).begin()
    assert calls == [(0, 2 << 20), (2 << 20, 4 << 20), (4 << 20, 6 << 20)]


def _resident(pool):
    """Return which pages of the pool are in memory."""
    memory = pool.host
    states = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(memory.nbytes), states) == 0
    return [bool(state & 1) for state in states]


@pytest.mark.parametrize("shared", [False, True])
def test_the_pages_are_there_without_a_write_and_gone_after_a_drop(shared):
    pool = _pool(shared=shared)
    pool.host.buffer[3] = 9
    pages = PoolPages(pool, 2 * 8 * _BLOCK, start=lambda work: (work(), _Idle())[1])
    pages.begin()
    ready = [*range(8), *range(64, 72)]
    assert all(_resident(pool)[page] for page in ready)
    assert pool.host.buffer[3] == 9
    if shared:  # others may be parts of huge pages
        assert sum(_resident(pool)) == len(ready)
    pages.drop()
    assert not any(_resident(pool))
    assert pool.host.buffer[3] == 0
    pages.begin()
    assert all(_resident(pool)[page] for page in ready)


def test_a_drop_waits_for_the_thread():
    seen = _Populated(_pool())
    seen.is_slow = True
    seen.pages.begin()
    seen.pages.drop()
    assert not seen.thread.is_alive()


def test_closing_waits_for_the_thread_that_touches_the_pool():
    populated = _Populated(_pool())
    populated.is_slow = True
    populated.pages.begin()
    assert populated.thread.is_alive()
    populated.pages.close()
    assert not populated.thread.is_alive()
