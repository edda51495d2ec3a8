"""Tests what a core shows of its steps through shared memory, and the limits of their times."""

import os

from tests.engine_core.helpers import make_config, make_request
from tokenloom.engine_core.control.step_watchdog import (
    FIRST_SECONDS,
    NEW_SIZE_SECONDS,
    SHORTEST_SECONDS,
    PulseMemory,
    StepTimes,
    StepWatchdog,
    inherited_cells,
)
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shared(clock: Clock) -> tuple[PulseMemory, StepWatchdog]:
    memory = PulseMemory()
    assert memory.fd is not None
    return memory, StepWatchdog(inherited_cells(os.dup(memory.fd)), clock)


def limit_of(memory: PulseMemory) -> float:
    pulse = memory.read()
    assert pulse is not None
    return pulse.limit


def test_each_beginning_and_end_is_seen_by_the_client() -> None:
    clock = Clock()
    memory, watchdog = shared(clock)
    assert memory.read() == (0, 0.0)
    watchdog.began(1)
    assert memory.read() == (1, FIRST_SECONDS)
    clock.now += 0.5
    watchdog.ended()
    assert memory.read() == (2, 0.0)
    watchdog.began(1)
    assert memory.read() == (3, 5.0), "ten times the usual step"
    memory.close()
    assert memory.read() is None


def test_steps_that_overlap_are_measured_from_one_end_to_the_next() -> None:
    clock = Clock()
    memory, watchdog = shared(clock)
    watchdog.began(1)
    for _ in range(20):
        watchdog.began(1)
        clock.now += 0.4
        watchdog.ended()
    clock.now += 0.4
    watchdog.ended()
    watchdog.began(1)
    assert abs(limit_of(memory) - 4.0) < 0.1
    watchdog.failed()
    assert limit_of(memory) == 0.0
    memory.close()


def test_a_failed_step_leaves_none_in_flight() -> None:
    clock = Clock()
    memory, watchdog = shared(clock)
    watchdog.began(300)
    watchdog.failed()
    assert memory.read() == (2, 0.0)
    memory.close()


def test_the_core_notes_the_tokens_of_its_steps() -> None:
    clock = Clock()
    memory, watchdog = shared(clock)
    limits = []

    class ShowingWorker(HashWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> None:
            limits.append(limit_of(memory))
            clock.now += 0.01
            super().execute_model(scheduler_output)

    config = make_config()
    core = EngineCore(config, UniProcExecutor(ShowingWorker(config)), watchdog=watchdog)
    core.add_request(make_request("a", list(range(1, 17)), max_tokens=3))
    while core.has_work():
        core.step()
    assert limits == [FIRST_SECONDS, NEW_SIZE_SECONDS, SHORTEST_SECONDS]
    assert limit_of(memory) == 0.0
    memory.close()


def test_ten_times_the_usual_step_but_three_seconds_at_least() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(8, 0.02)
        times.observe(2048, 0.9)
    assert times.limit(8) == times.limit(15) == SHORTEST_SECONDS
    assert abs(times.limit(2048) - 9.0) < 1e-6


def test_the_first_step_of_all_and_of_a_size_may_take_longer() -> None:
    times = StepTimes()
    assert times.limit(1) == FIRST_SECONDS
    times.observe(1, 0.001)
    assert times.limit(1) == SHORTEST_SECONDS
    assert times.limit(512) == NEW_SIZE_SECONDS


def test_a_long_prefill_on_a_slow_device_is_no_false_alarm() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(1, 0.1)
    assert times.limit(8192) >= 8192 * 0.1, "in proportion to its tokens"
    times.observe(8192, 30.0)
    assert times.limit(8192) == 300.0
    assert times.limit(4096) == 300.0, "a smaller step takes no longer than a larger one"


def test_the_warm_up_bounds_the_first_steps() -> None:
    times = StepTimes(warm_up_seconds=20.0)
    assert times.limit(8192) == 200.0
    times.observe(1, 0.01)
    assert times.limit(8192) == 200.0
    assert times.limit(1) == SHORTEST_SECONDS


def test_an_outlier_changes_little_and_a_new_habit_is_learnt() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(4, 1.0)
    times.observe(4, 100.0)
    assert times.limit(4) < 12.0
    for _ in range(50):
        times.observe(4, 5.0)
    assert 45.0 < times.limit(4) <= 50.0


def test_a_first_step_that_compiled_is_forgotten() -> None:
    times = StepTimes()
    times.observe(4, 30.0)
    for _ in range(60):
        times.observe(4, 0.02)
    assert times.limit(4) == SHORTEST_SECONDS
