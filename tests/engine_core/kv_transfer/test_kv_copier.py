import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokenloom.engine_core.data.kv_messages import KVTarget
from tokenloom.engine_core.kv_transfer.block_loads import CopyTask
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.kv_copier import KVCopier
from tokenloom.engine_core.kv_transfer.kv_transport import BlockIds, KVPool, KVReader


class FakeReader:
    is_open = True

    def __init__(self, may_end: threading.Event) -> None:
        self._may_end = may_end

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        assert self._may_end.wait(30)

    def close(self) -> None:
        self.is_open = False


class FakeTransport:
    """Opens readers that read at once, unless :attr:`may_end` is cleared."""

    name = "shm"
    serves_on_demand = False

    def __init__(self) -> None:
        self.may_open, self.may_end = threading.Event(), threading.Event()
        self.may_open.set()
        self.may_end.set()
        self.opening = threading.Event()
        self.opened: list[FakeReader] = []

    @property
    def num_open(self) -> int:
        return sum(reader.is_open for reader in self.opened)

    def serve(self, pool: KVPool) -> bytes | None:
        return None

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        self.opening.set()
        assert self.may_open.wait(30)
        self.opened.append(FakeReader(self.may_end))
        return self.opened[-1]

    def attend(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


class FakePool:
    layout = "layout"
    apart = None

    def spread(self, block_ids: BlockIds) -> None:
        pass


class Copies:
    """A copier over a fake transport, on two threads."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.executor = ThreadPoolExecutor(2)
        self.copier = KVCopier(
            FakePool(),  # type: ignore[arg-type]
            [self.transport],
            self.executor,
            Failpoints(()),
            checksum=False,
        )

    def begin(self, owner: str, endpoint: bytes = b"there") -> threading.Event:
        """Begin a copy, and return what is set when it has ended."""
        ended = threading.Event()
        task = CopyTask("a", KVTarget(b"", "shm", endpoint, [0], [0], 1, owner=owner), [0], [0])
        self.copier.copy(task, lambda checksums, error: ended.set())
        return ended

    def copy(self, owner: str, endpoint: bytes = b"there") -> None:
        assert self.begin(owner, endpoint).wait(30)


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies()
    yield made
    made.copier.close()
    made.executor.shutdown()


def test_a_copy_that_comes_after_the_end_is_dropped() -> None:
    """The KV thread runs on while the thread that steps closes: it must not fail, which would end the process."""
    executor = ThreadPoolExecutor(1)
    copier = KVCopier(FakePool(), (), executor, Failpoints(()), checksum=True)  # type: ignore[arg-type]
    copier.close()
    executor.shutdown()
    done: list[object] = []
    copier.copy(CopyTask("a", KVTarget(b"", "shm", b"", [], [], 0), [], []), lambda *outcome: done.append(outcome))
    copier.checksums([0], done.append)
    assert not done


def test_pools_of_dead_owners_are_closed_one_after_the_other(copies: Copies) -> None:
    """A limit of their number kept 64 of them mapped, each of many gigabytes."""
    for epoch in range(20):
        copies.copy(f"prefill-0@{epoch}", b"pool %d" % epoch)
        assert copies.transport.num_open == 1
        copies.copier.forget_owners([f"prefill-0@{epoch}"])
        assert copies.transport.num_open == 0


def test_pools_of_living_owners_stay_open_however_many_they_are(copies: Copies) -> None:
    """One that was closed for another's sake ended a copy from it."""
    for number in range(100):
        copies.copy(f"prefill-{number}@1", b"pool %d" % number)
    copies.copier.forget_owners(["prefill-7@1"])
    assert copies.transport.num_open == 99


def test_the_pool_of_another_incarnation_at_the_same_endpoint_stays_open(copies: Copies) -> None:
    copies.copy("prefill-0@1")
    copies.copy("prefill-0@2")
    copies.copier.forget_owners(["prefill-0@1"])
    assert [reader.is_open for reader in copies.transport.opened] == [False, True]


def test_a_copy_that_opens_a_pool_when_its_owner_has_left_closes_it(copies: Copies) -> None:
    """A load that was given up ends before its copy does."""
    copies.transport.may_open.clear()
    ended = copies.begin("prefill-0@1")
    assert copies.transport.opening.wait(30)
    copies.copier.forget_owners(["prefill-0@1"])
    copies.transport.may_open.set()
    assert ended.wait(30)
    assert copies.transport.opened
    assert copies.transport.num_open == 0
    assert not copies.copier._left
    assert not copies.copier._copying


def test_a_copy_that_waits_for_a_thread_when_its_owner_leaves_keeps_no_pool(copies: Copies) -> None:
    copies.transport.may_open.clear()
    others = [copies.begin(f"prefill-{number}@1") for number in range(2)]
    ended = copies.begin("prefill-7@1")
    copies.copier.forget_owners(["prefill-7@1"])
    copies.transport.may_open.set()
    assert all(each.wait(30) for each in (*others, ended))
    assert copies.transport.num_open == 2
    assert not copies.copier._left
    assert not copies.copier._copying
