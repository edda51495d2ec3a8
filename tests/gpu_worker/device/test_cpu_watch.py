"""A process computes with the threads for which the system has cores."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tokenloom.gpu_worker.device import cpu_watch as core_watch
from tokenloom.gpu_worker.device.cpu_watch import (
    CounterReader,
    Counters,
    CpuWatch,
    ProcessThreads,
    bind_to,
    cores_within,
)
from tokenloom.gpu_worker.kernels import threads as kernel_threads


class System:
    """A machine whose counters and clock the test sets. Records what the watch chooses."""

    def __init__(self, threads: int, num_engines: int = 1) -> None:
        self.now = self.waited = self.throttled = 0.0
        self.limit: float | None = None
        self.looks = 0
        self.chosen: list[tuple[int, int, bool]] = []
        self.spreads = 0
        self.watch = CpuWatch(self, threads, num_engines, self.read, lambda: self.now)

    def read(self) -> Counters:
        self.looks += 1
        return Counters(self.waited, self.throttled, self.limit)

    def use(self, cores: int, free: int, shared: bool) -> None:
        self.chosen.append((cores, free, shared))

    def spread(self) -> None:
        self.spreads += 1

    def compute(self, seconds: float, *, waiting: float = 0.0, throttled: float = 0.0) -> list[tuple[int, int, bool]]:
        """Compute steps of 1/16 s while so many threads wait for a core. Return what the watch has newly chosen."""
        known = len(self.chosen)
        for _ in range(int(seconds * 16)):
            self.watch.before_step()
            self.now += 1 / 16
            self.waited += waiting / 16
            self.throttled += throttled / 16
        self.watch.before_step()
        return self.chosen[known:]


def test_a_quiet_machine_stays_as_it_is() -> None:
    system = System(2)
    assert system.compute(10, waiting=0.05) == []
    assert system.looks == 41, "a look every 0.2 s, at the next step"


def test_next_to_busy_programs_cores_are_shared_until_they_have_ended() -> None:
    system = System(2)
    system.compute(1)
    assert system.compute(1, waiting=1.0) == [(2, 1, True)]
    assert system.compute(0.9) == []
    assert system.compute(2) == [(2, 2, False)]


def test_one_busy_program_takes_one_of_many_cores() -> None:
    system = System(16)
    assert system.compute(2, waiting=0.6) == [(16, 15, True)]
    assert system.compute(2, waiting=4.5)[-1] == (16, 11, True)
    assert system.compute(4, waiting=0.6)[-1] == (16, 15, True)
    assert system.compute(4) == [(16, 16, False)]


def test_moments_between_the_limits_change_nothing() -> None:
    system = System(4)
    assert system.compute(2, waiting=0.2) == []
    system.compute(1, waiting=1.0)
    assert {shared for _, _, shared in system.compute(10, waiting=0.2)} <= {True}


def test_a_cpu_limit_takes_threads_at_once() -> None:
    system = System(16)
    system.limit = 2.0
    assert system.compute(0.1) == [(2, 2, False)]
    system.limit = None
    assert system.compute(1) == [(16, 16, False)]


def test_engines_share_a_cpu_limit() -> None:
    system = System(4, num_engines=2)
    system.limit = 4.0
    assert system.compute(0.1) == [(2, 2, False)]


def test_a_throttled_process_shares_its_cores() -> None:
    system = System(2)
    system.limit = 1.5
    assert system.compute(1, throttled=0.4) == [(2, 1, True)]


def test_time_without_steps_counts_as_quiet() -> None:
    system = System(2)
    system.compute(1, waiting=1.0)
    system.now += 3600
    assert system.compute(0.1) == []
    assert system.compute(2) == [(2, 2, False)]


def test_the_first_step_after_a_pause_does_not_look_and_the_next_one_does() -> None:
    system = System(2)
    system.compute(0.1)
    looks = system.looks
    for expected in (0, 1, 1, 2):  # each step takes longer than a look may be late
        system.now += 10
        system.watch.before_step()
        assert system.looks == looks + expected


@pytest.mark.parametrize(
    ("limit", "threads", "expected"),
    [(None, 4, 4), (1.0, 4, 1), (0.1, 4, 1), (1.2, 4, 1), (1.5, 4, 2), (2.0, 4, 2), (8.0, 4, 4), (3.9, 16, 4)],
)
def test_threads_within_a_limit(limit: float | None, threads: int, expected: int) -> None:
    assert cores_within(limit, threads) == expected


def test_the_counters_of_a_process_are_those_of_all_its_threads(tmp_path: Path) -> None:
    for thread, waited in ((1, 2_000_000_000), (2, 500_000_000)):
        directory = tmp_path / "proc/self/task" / str(thread)
        directory.mkdir(parents=True)
        (directory / "schedstat").write_text(f"9000 {waited} 3\n")
    (tmp_path / "proc/self/task/2/comm").write_text("kernels")
    assert CounterReader(tmp_path)() == Counters(2.5, 0.0, None)


def test_without_counters_nothing_has_waited(tmp_path: Path) -> None:
    assert CounterReader(tmp_path)() == Counters(0.0, 0.0, None)


def test_kernels_always_get_the_number_that_was_chosen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(core_watch, "share_cores", lambda shared, cores: chosen.append((shared, cores)))
    before = torch.get_num_threads()
    try:
        ProcessThreads(2).use(2, 1, True)
        assert (kernel_threads.kernel_threads(), torch.get_num_threads(), chosen) == (2, 1, [(True, 2)])
    finally:
        kernel_threads.set_kernel_threads(0)
        torch.set_num_threads(before)
    assert kernel_threads.kernel_threads() == before


def test_threads_are_placed_before_each_step_unless_cores_are_shared() -> None:
    system = System(2)
    system.compute(1.0)
    assert system.spreads == 17, "once a step"
    system.compute(2.0, waiting=1.0)
    before = system.spreads
    system.compute(1.0, waiting=1.0)
    assert system.spreads == before


def affinity_after(*cpus: int) -> set[int]:
    """What a thread, and one that it starts, may use after it was bound."""

    def bind() -> set[int]:
        bind_to(cpus)
        with ThreadPoolExecutor(1) as started:
            assert started.submit(os.sched_getaffinity, 0).result() == os.sched_getaffinity(0)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:  # the thread of the tests stays free
        return pool.submit(bind).result()


def test_a_worker_keeps_to_its_cores() -> None:
    free = os.sched_getaffinity(0)
    assert affinity_after(min(free)) == {min(free)}
    assert affinity_after() == free == os.sched_getaffinity(0)


def test_a_core_that_it_may_not_use() -> None:
    with pytest.raises(ValueError, match="cpus: this process may not use core 1023, only"):
        affinity_after(1023)
