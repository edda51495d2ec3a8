"""Tests what a core shows of its steps through shared memory."""

import os

from tests.engine_core.helpers import make_config, make_request
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.process.step_pulse import PulseMemory, StepPulse, inherited_cells
from tokenloom.engine_core.scheduling.step_times import FIRST_SECONDS, NEW_SIZE_SECONDS, SHORTEST_SECONDS
from tokenloom.engine_core.wire.scheduler_output import SchedulerOutput


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shared(clock: Clock) -> tuple[PulseMemory, StepPulse]:
    memory = PulseMemory()
    assert memory.fd is not None
    return memory, StepPulse(inherited_cells(os.dup(memory.fd)), clock)


def limit_of(memory: PulseMemory) -> float:
    pulse = memory.read()
    assert pulse is not None
    return pulse.limit


def test_each_beginning_and_end_is_seen_by_the_client() -> None:
    clock = Clock()
    memory, pulse = shared(clock)
    assert memory.read() == (0, 0.0)
    pulse.began(1)
    assert memory.read() == (1, FIRST_SECONDS)
    clock.now += 0.5
    pulse.ended()
    assert memory.read() == (2, 0.0)
    pulse.began(1)
    assert memory.read() == (3, 5.0), "ten times the usual step"
    memory.close()
    assert memory.read() is None


def test_steps_that_overlap_are_measured_from_one_end_to_the_next() -> None:
    clock = Clock()
    memory, pulse = shared(clock)
    pulse.began(1)
    for _ in range(20):
        pulse.began(1)
        clock.now += 0.4
        pulse.ended()
    clock.now += 0.4
    pulse.ended()
    pulse.began(1)
    assert abs(limit_of(memory) - 4.0) < 0.1
    pulse.failed()
    assert limit_of(memory) == 0.0
    memory.close()


def test_a_failed_step_leaves_none_in_flight() -> None:
    clock = Clock()
    memory, pulse = shared(clock)
    pulse.began(300)
    pulse.failed()
    assert memory.read() == (2, 0.0)
    memory.close()


def test_the_core_notes_the_tokens_of_its_steps() -> None:
    clock = Clock()
    memory, pulse = shared(clock)
    limits = []

    class ShowingWorker(HashWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> None:
            limits.append(limit_of(memory))
            clock.now += 0.01
            super().execute_model(scheduler_output)

    config = make_config()
    core = EngineCore(config, UniProcExecutor(ShowingWorker(config)), pulse=pulse)
    core.add_request(make_request("a", list(range(1, 17)), max_tokens=3))
    while core.has_work():
        core.step()
    assert limits == [FIRST_SECONDS, NEW_SIZE_SECONDS, SHORTEST_SECONDS]
    assert limit_of(memory) == 0.0
    memory.close()
