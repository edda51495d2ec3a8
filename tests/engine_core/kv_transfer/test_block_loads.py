"""A load's life, without threads: copied as it becomes ready, verified, ended once."""

import pytest

from tests.engine_core.kv_transfer.kv_pair import Clock
from tokenloom.engine_core.data.kv_messages import KVEvent, KVTarget, KVVerdict, KVVerify
from tokenloom.engine_core.kv_transfer.block_loads import CopyTask, LoadOrder, LoadResult, Loads
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError

TARGET = KVTarget(b"acquisition", "memory", b"endpoint", [10, 11, 12, 13], [1, 1, 1, 1], 14)


class Bench:
    """Loads, and everything that they do."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tasks: list[CopyTask] = []
        self.interrupted: list[KVTarget] = []
        self.events: list[KVEvent] = []
        self.results: list[LoadResult] = []
        self.loads = Loads(
            copy=self.tasks.append,
            interrupt=self.interrupted.append,
            send=self.events.append,
            finish=self.results.append,
            timeout_seconds=30.0,
            clock=self.clock,
        )

    def start(self, *, is_complete: bool = True, first_block: int = 0) -> None:
        block_ids = [0, 1, 2, 3][first_block:]
        self.loads.start(LoadOrder("a", TARGET, range(first_block, 4), block_ids, 4, is_complete))

    def copied(self, checksums: list[int] | None = None, error: KVTransferError | None = None) -> CopyTask:
        task = self.tasks.pop(0)
        self.loads.copied(task, checksums or [], error)
        return task

    @property
    def failure(self) -> str | None:
        (result,) = self.results
        assert result.block_ids == [0, 1, 2, 3]
        assert len(self.loads) == 0
        return result.failure


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_complete_prefill_is_copied_at_once(bench: Bench) -> None:
    bench.start()
    task = bench.copied()
    assert (task.source_ids, task.block_ids) == ([10, 11, 12, 13], [0, 1, 2, 3])
    assert bench.events == [KVVerify("a", copied=True)]
    assert not bench.results
    bench.loads.verdict(KVVerdict("a", valid=True))
    assert bench.failure is None


def test_only_whole_blocks_are_copied_until_the_prefill_is_complete(bench: Bench) -> None:
    bench.start(is_complete=False, first_block=1)
    assert not bench.tasks
    bench.loads.progress("a", 7)
    assert not bench.tasks
    bench.loads.progress("a", 9)
    bench.loads.progress("a", 12)
    assert bench.copied().source_ids == [11]
    assert bench.copied().source_ids == [12]
    bench.loads.progress("a", 14)
    assert bench.copied().source_ids == [13]
    assert bench.events == [KVVerify("a", copied=True)]


def test_what_the_front_says_early_is_not_lost(bench: Bench) -> None:
    bench.loads.progress("a", 8)
    bench.start(is_complete=False)
    assert bench.tasks[0].source_ids == [10, 11]


def test_an_owner_lost_before_the_load_began_ends_it(bench: Bench) -> None:
    bench.loads.verdict(KVVerdict("a", valid=False, reason="owner_lost"))
    bench.start()
    assert bench.failure == "owner_lost"
    assert not bench.tasks
    assert bench.events == [KVVerify("a", copied=False, failure="owner_lost")]


def test_a_load_that_fails_keeps_its_blocks_until_the_copy_is_out_of_them(bench: Bench) -> None:
    bench.start()
    bench.loads.verdict(KVVerdict("a", valid=False, reason="lease_revoked"))
    assert bench.events == [KVVerify("a", copied=False, failure="lease_revoked")]
    assert not bench.results
    assert not bench.tasks[0].is_wanted
    bench.copied()
    assert bench.failure == "lease_revoked"


def test_a_request_that_is_not_wanted_ends_its_load_without_a_failure(bench: Bench) -> None:
    bench.start()
    bench.loads.give_up("a")
    bench.loads.give_up("a")
    bench.copied(error=KVTransferError("transport", ""))
    assert bench.failure == ""
    assert bench.events == [KVVerify("a", copied=False)]


def test_a_request_that_never_loads_has_its_lease_released(bench: Bench) -> None:
    bench.loads.give_up("a")
    assert bench.events == [KVVerify("a", copied=False)]


def test_a_copy_that_fails_ends_the_load(bench: Bench) -> None:
    bench.start()
    bench.copied(error=KVTransferError("transport", "the link was cut"))
    assert bench.failure == "transport"
    assert bench.events == [KVVerify("a", copied=False, failure="transport")]


@pytest.mark.parametrize(
    ("theirs", "failure"),
    [
        ([9, 5, 6, 7], None),
        ([9, 5, 6, 8], "checksum"),
        ([], None),
        ([9], "checksum"),
        ([9, 5, 6], "checksum"),
        ([9, 5, 6, 7, 7], "checksum"),
    ],
)
def test_checksums_of_the_blocks_that_moved_are_compared(bench: Bench, theirs: list[int], failure: str | None) -> None:
    bench.loads.start(LoadOrder("a", TARGET, range(1, 4), [0, 1, 2, 3][1:], 4, True))
    bench.copied(checksums=[5, 6, 7])
    bench.loads.verdict(KVVerdict("a", valid=True, checksums=theirs))
    assert bench.results[0].failure == failure


def test_a_verdict_that_nobody_asked_for_does_not_make_a_copy_valid(bench: Bench) -> None:
    bench.start()
    bench.loads.verdict(KVVerdict("a", valid=True))
    assert not bench.results


def test_a_load_that_stands_still_is_given_up(bench: Bench) -> None:
    bench.start(is_complete=False)
    bench.clock.now += 29.0
    bench.loads.progress("a", 8)
    assert bench.loads.expire() == pytest.approx(30.0)
    bench.clock.now += 30.0
    bench.loads.expire()
    assert bench.interrupted == [TARGET]
    assert bench.loads.expire() is None
    bench.copied(error=KVTransferError("transport", "closed"))
    assert bench.failure == "timeout"


def test_verdicts_of_unknown_requests_are_not_kept_for_ever(bench: Bench) -> None:
    for number in range(5000):
        bench.loads.verdict(KVVerdict(f"r{number}", valid=False, reason="owner_lost"))
    assert len(bench.loads._early) == 4096


def test_of_a_group_only_the_blocks_of_its_window_are_copied(bench: Bench) -> None:
    """Entries are those of two groups in turns; the second one keeps the last two blocks of tokens."""
    table = [11, 0, 12, 0, 13, 23, 14, 24]
    target = KVTarget(b"acquisition", "memory", b"endpoint", table, [1] * 8, 14)
    bench.loads.start(LoadOrder("a", target, [0, 2, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], 4, False, num_groups=2))
    bench.loads.progress("a", 11)
    assert bench.copied([11, 12]).source_ids == [11, 12]
    bench.loads.progress("a", 12)
    assert bench.copied([13, 23]).source_ids == [13, 23]
    bench.loads.progress("a", 14)
    task = bench.copied([14, 24])
    assert (task.source_ids, task.block_ids) == ([14, 24], [5, 6])
    bench.loads.verdict(KVVerdict("a", valid=True, checksums=table))
    assert bench.results[0].failure is None


def test_a_block_that_the_owner_does_not_keep_is_not_copied(bench: Bench) -> None:
    target = KVTarget(b"acquisition", "memory", b"endpoint", [11, 0, 12, 22], [1] * 4, 8)
    bench.loads.start(LoadOrder("a", target, [0, 1, 2, 3], [1, 2, 3, 4], 4, True, num_groups=2))
    assert bench.results[0].failure == "layout"
    assert not bench.tasks
