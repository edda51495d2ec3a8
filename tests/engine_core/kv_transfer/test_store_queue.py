"""The threads of a store: each job ends once, whatever the store does, and nothing writes to its blocks afterwards."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine_core.kv_transfer.storing_core import MemoryStore
from tokenloom.engine_core.kv_cache.block_pool import BlockPool
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer import store_queue
from tokenloom.engine_core.kv_transfer.block_store import StoreError, StoreFullError, seal
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion
from tokenloom.engine_core.kv_transfer.store_queue import SavedBlock, StoreJob, StoreQueue
from tokenloom.process.fall_backs import OF_PROCESS

KEYS = [bytes((index,)) * 32 for index in range(6)]
BLOCK_BYTES = 88


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """A queue over a pool of eight blocks in three regions, and what has ended."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.clock = Clock()
        memory = PoolMemory.allocate(4096, shared=False)
        memory.buffer[:] = np.random.default_rng(0).bytes(4096)
        self.pool = KVPool(memory, (KVRegion(0, 24), KVRegion(1000, 24), KVRegion(2000, 40)), 8, "test")
        self.blocks = BlockPool(8)
        self.ended: queue.Queue[StoreJob] = queue.Queue()
        self.queue = StoreQueue(
            lambda: store, self.pool, self.ended.put, timeout=1.0, load_timeout=5.0, clock=self.clock
        )

    def ask(self, keys: list[bytes], block_ids: list[int] | None = None) -> StoreJob:
        job = StoreJob("request", keys, block_ids or ())
        self.queue.submit(job)
        return job

    def end(self) -> StoreJob:
        return self.ended.get(timeout=30)

    def pass_time(self, seconds: float) -> None:
        with self.queue._changed:
            self.clock.now += seconds
            self.queue._changed.notify()

    def content(self, block_id: int) -> bytes:
        return b"".join(row.tobytes() for row in self.pool.rows(block_id))

    def named(self, block_id: int, key: bytes) -> SavedBlock:
        return SavedBlock(self.blocks, block_id, key, key, self.blocks.generations[block_id], block_id)

    def settle(self) -> None:
        done = threading.Event()

        class Last:
            @property
            def is_current(self) -> bool:
                done.set()
                return False

        assert self.queue.save(Last())  # type: ignore[arg-type]
        assert done.wait(30)


@pytest.fixture
def make() -> Iterator[Callable[[], Asked]]:
    made = []

    def make() -> Asked:
        made.append(Asked(MemoryStore({})))
        return made[-1]

    yield make
    for asked in made:
        asked.store.may_answer.set()
        asked.queue.close()
        asked.queue.close()
        OF_PROCESS.end("kv_store")


@pytest.fixture
def asked(make: Callable[[], Asked]) -> Asked:
    return make()


def put(asked: Asked, *keys: bytes) -> list[bytes]:
    datas = [bytes((key[0],)) * BLOCK_BYTES for key in keys]
    asked.store.values.update({key: seal(key, data) + data for key, data in zip(keys, datas, strict=True)})
    return datas


def test_a_search_and_a_load(asked: Asked) -> None:
    one, other = put(asked, KEYS[0], KEYS[2])
    job = asked.ask(KEYS[:3])
    assert asked.end() is job
    assert job.found == {KEYS[0], KEYS[2]}
    load = asked.ask([KEYS[0], KEYS[2]], [5, 1])
    assert asked.end() is load
    assert (load.num_loaded, load.failure) == (2, "")
    assert (asked.content(5), asked.content(1)) == (one, other)


@pytest.mark.parametrize(("change", "failure"), [("absent", "not_found"), ("wrong", "checksum")])
def test_a_load_ends_at_the_first_block_that_is_missing_or_wrong(asked: Asked, change: str, failure: str) -> None:
    put(asked, *KEYS[:3])
    if change == "absent":
        del asked.store.values[KEYS[1]]
    else:
        asked.store.values[KEYS[1]] = asked.store.values[KEYS[2]]
    before = [asked.content(block_id) for block_id in (6, 7)]
    load = asked.ask(KEYS[:3], [5, 6, 7])
    asked.end()
    assert (load.num_loaded, load.failure) == (1, failure)
    assert [asked.content(block_id) for block_id in (6, 7)] == before
    asked.settle()
    assert KEYS[1] not in asked.store.values


def test_a_late_block_is_not_written_after_the_load_was_given_up(asked: Asked) -> None:
    put(asked, *KEYS[:2])
    before = asked.content(5)
    asked.store.may_answer.clear()
    load = asked.ask(KEYS[:2], [5, 6])
    asked.pass_time(1.5)
    assert asked.end() is load
    assert (load.num_loaded, load.failure) == (0, "timeout")
    asked.store.may_answer.set()
    asked.clock.now += 100
    later = asked.ask(KEYS[:2], [1, 2])  # behind it, on the same thread
    assert asked.end() is later
    assert later.num_loaded == 2
    assert asked.content(5) == before
    assert asked.ended.empty(), "each job ends once"


def test_a_silent_store_is_left_alone_and_tried_again(asked: Asked) -> None:
    asked.store.may_answer.clear()
    first, second = asked.ask(KEYS[:1]), asked.ask(KEYS[:1])
    assert not asked.queue.is_away
    asked.pass_time(1.5)
    assert {asked.end(), asked.end()} == {first, second}
    assert first.failure == second.failure == "timeout"
    assert asked.queue.is_away
    assert dict(OF_PROCESS.own())["kv_store"] == "it has not answered for 1 s"
    asked.pass_time(store_queue.RETRY_SECONDS)
    assert not asked.queue.is_away
    asked.store.may_answer.set()
    third = asked.ask(KEYS[:1])
    assert asked.end() is third
    assert third.failure == ""
    assert "kv_store" not in dict(OF_PROCESS.own())


def test_a_store_that_fails_again_is_left_alone_for_longer(asked: Asked) -> None:
    asked.store.fails = True
    for seconds in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        job = asked.ask(KEYS[:1])
        assert asked.end() is job
        assert job.failure == "transport"
        asked.clock.now += seconds - 0.1
        assert asked.queue.is_away
        asked.clock.now += 0.2
        assert not asked.queue.is_away


def test_a_fault_of_ours_ends_no_thread(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    asked.store.values[KEYS[0]] = None  # type: ignore[assignment]
    asked.store.read = lambda keys, nbytes: 1 / 0  # type: ignore[assignment, method-assign]
    load = asked.ask(KEYS[:1], [1])
    assert asked.end() is load
    assert load.failure == "transport"
    assert "because of a bug" in caplog.text
    search = asked.ask(KEYS[:1])
    assert asked.end() is search


def test_a_load_of_many_blocks_takes_its_time_as_long_as_they_arrive(asked: Asked) -> None:
    """But no search and no load lasts for ever."""
    asked.store.may_answer.clear()
    load = asked.ask(KEYS[:1], [1])
    for _ in range(5):
        asked.pass_time(0.9)
        assert not load.is_ended
        with asked.queue._changed:
            asked.queue._loads.beat = asked.clock.now  # as when a block has arrived
    asked.pass_time(0.9)
    assert asked.end() is load
    assert not asked.queue.is_away, "the store is not to blame"


def test_a_long_search_of_a_slow_store_is_no_silence(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found until it was given up is used."""
    keys = [index.to_bytes(32) for index in range(1000)]
    searches = []

    def find(part: list[bytes], *, in_order: bool) -> set[bytes]:
        searches.append(part)
        for _ in range(0, len(part), 64):
            asked.pass_time(0.6)
        while any(job.ends_at <= asked.clock.now for job in list(asked.queue._searches.open)):
            os.sched_yield()  # until it is given up
        return set(part)

    monkeypatch.setattr(asked.store, "find", find)
    search = asked.ask(keys)
    assert asked.end() is search
    assert search.failure == "timeout"
    assert search.found == set(keys[:64])
    assert not asked.queue.is_away, "it has answered all the time"
    again = asked.ask(keys[:1])
    assert asked.end() is again
    assert len(searches) == 3, "nobody waits for the rest"


def test_a_search_in_order_ends_at_the_first_key_without_a_value(asked: Asked) -> None:
    keys = [index.to_bytes(32) for index in range(300)]
    asked.store.values = dict.fromkeys(keys[:100] + keys[200:], b"")
    asked.ask(keys)
    assert asked.end().found == set(keys[:100])
    assert asked.store.num_searches == 2
    job = StoreJob("request", keys, in_order=False)
    asked.queue.submit(job)
    assert asked.end().found == set(keys[:100] + keys[200:])


def test_only_what_is_still_there_is_saved(asked: Asked) -> None:
    (first, second) = asked.blocks.allocate(2)
    for block_id, key in ((first, KEYS[0]), (second, KEYS[1])):
        asked.blocks.register(block_id, key)
    asked.store.may_write.clear()
    for block_id, key in ((first, KEYS[0]), (second, KEYS[1])):
        asked.queue.save(asked.named(block_id, key))
    asked.blocks.release([second])
    while asked.blocks.find(KEYS[1]) is not None:
        asked.blocks.allocate(1)
    asked.store.may_write.set()
    asked.settle()
    data = asked.content(first)
    assert asked.store.values == {KEYS[0]: seal(KEYS[0], data) + data}
    assert asked.queue.num_saved == 1


def test_a_block_that_gets_a_new_holder_while_it_is_copied_is_not_saved(asked: Asked) -> None:
    (block_id,) = asked.blocks.allocate(1)
    asked.blocks.register(block_id, KEYS[0])
    rows = asked.pool.rows

    def give_away(index: int) -> list[np.ndarray]:
        if index == block_id:
            asked.blocks.generations[block_id] += 1
        return rows(index)

    object.__setattr__(asked.pool, "rows", give_away)
    asked.queue.save(asked.named(block_id, KEYS[0]))
    asked.settle()
    assert asked.store.values == {}


def test_more_saves_than_may_wait_are_refused(asked: Asked) -> None:
    asked.store.may_write.clear()
    (block_id,) = asked.blocks.allocate(1)
    asked.blocks.register(block_id, KEYS[0])
    taken = 0
    while asked.queue.save(asked.named(block_id, KEYS[0])):
        taken += 1
    assert store_queue.MAX_SAVES <= taken <= store_queue.MAX_SAVES + 1
    asked.store.may_write.set()


def test_a_store_that_is_full_is_still_read(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    (block_id,) = asked.blocks.allocate(1)
    asked.blocks.register(block_id, KEYS[0])

    def write(key: bytes, parts: object) -> bool:
        raise StoreFullError("No space left")

    with monkeypatch.context() as patch:
        patch.setattr(asked.store, "write", write)
        asked.queue.save(asked.named(block_id, KEYS[0]))
        asked.settle()
    assert not asked.queue.is_away
    assert OF_PROCESS.of("") == {"kv_store": "No space left"}
    put(asked, KEYS[1])
    asked.ask(KEYS[1:2])
    assert asked.end().found == {KEYS[1]}
    asked.queue.save(asked.named(block_id, KEYS[0]))
    asked.settle()
    assert OF_PROCESS.of("") == {}, "there is room again"


def test_the_end_waits_once_for_all_threads_that_hang(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends = threading.Barrier(4), threading.Event()

    def hang(*arguments: object, **options: object) -> None:
        begun.wait(30)
        ends.wait(30)
        raise StoreError("it hung")

    for method in ("find", "read", "write"):
        monkeypatch.setattr(asked.store, method, hang)
    (block_id,) = asked.blocks.allocate(1)
    asked.blocks.register(block_id, KEYS[0])
    asked.queue.save(asked.named(block_id, KEYS[0]))
    asked.ask(KEYS[:1])
    asked.ask(KEYS[:1], [1])
    begun.wait(30)
    waits: list[float] = []

    def join(seconds: float) -> None:
        waits.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(store_queue, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
        for thread in asked.queue._threads:
            patch.setattr(thread, "join", join)
        asked.queue.close()
    assert waits[0] > 0
    assert waits[1:] == [0.0] * (len(asked.queue._threads) - 1)
    ends.set()
