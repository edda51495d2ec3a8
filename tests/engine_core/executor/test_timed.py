"""Tests the simulated device on a fake clock."""

from typing import Any

import msgspec
import pytest

from tests.engine_core.helpers import finish, make_config, make_request, tokens_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.uniproc import TimedExecutor
from tokenloom.engine_core.fake_workers.timed_worker import TimedWorker

STEP = 4.0


class Clock:
    """Advances only during a sleep, and by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


begin = TimedWorker.begin


def config_of(
    *, step_seconds: float = STEP, token_seconds: float = 0.0, overlaps: bool = False, **settings: Any
) -> EngineConfig:
    config = make_config(async_scheduling=overlaps, **settings)
    worker = msgspec.structs.replace(config.worker, step_seconds=step_seconds, token_seconds=token_seconds)
    return msgspec.structs.replace(config, worker=worker)


def executor_of(clock: Clock, config: EngineConfig) -> TimedExecutor:
    overlaps = config.scheduler.async_scheduling
    return TimedExecutor(TimedWorker(config), overlaps=overlaps, clock=clock, sleep=clock.sleep)


def step_of(num_tokens: int = 0) -> SchedulerOutput:
    return SchedulerOutput([], CachedRequestData([], [], [], {}), {}, num_tokens, [], [])


def test_the_registry_makes_it_for_the_timed_worker() -> None:
    for overlaps in (False, True):
        executor = make_executor(config_of(overlaps=overlaps), TimedWorker)
        assert isinstance(executor, TimedExecutor)
        assert executor.max_concurrent_batches == 1 + overlaps


def test_a_step_ends_its_time_after_it_was_given(clock: Clock) -> None:
    executor = executor_of(clock, config_of())
    for pause in (0.0, 1.5):  # what lies between two steps is not hidden
        clock.now += pause
        given = clock.now
        executor.execute_model(step_of())
        clock.now += 1.0  # this is: the step runs already
        executor.sample_tokens(None).result()
        assert clock.now == given + STEP


def test_a_step_given_while_one_runs_begins_when_that_ends(clock: Clock) -> None:
    executor = executor_of(clock, config_of(overlaps=True))
    given = clock.now
    executor.execute_model(step_of())
    first = executor.sample_tokens(None)
    clock.now += 3.0
    executor.execute_model(step_of())
    second = executor.sample_tokens(None)
    first.result()
    assert clock.now == given + STEP
    clock.now += 1.0  # late to look does not make the device late
    second.result()
    assert clock.now == given + 2 * STEP


def test_an_output_that_is_due_already_is_not_waited_for(clock: Clock) -> None:
    executor = executor_of(clock, config_of())
    executor.execute_model(step_of())
    pending = executor.sample_tokens(None)
    clock.now += 2 * STEP
    late = clock.now
    pending.result()
    assert clock.now == late


def test_tokens_take_their_time_too(clock: Clock) -> None:
    executor = executor_of(clock, config_of(token_seconds=0.5))
    given = clock.now
    executor.execute_model(step_of(num_tokens=6))
    executor.sample_tokens(None).result()
    assert clock.now == given + STEP + 3.0


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_request_gets_its_tokens(clock: Clock, overlaps: bool) -> None:
    config = config_of(overlaps=overlaps)
    core = EngineCore(config, executor_of(clock, config))
    for name in "abc":
        core.add_request(make_request(name, [1, 2, 3], 5))
    started = clock.now
    outputs = finish(core)
    assert [len(tokens_of(outputs[name])) for name in "abc"] == [5] * 3
    assert clock.now == started + 5 * STEP


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_drafts_change_no_token_and_save_steps(clock: Clock, overlaps: bool, accuracy: float) -> None:
    outputs, num_steps = {}, {}
    for num_drafts in (0, 4):
        config = config_of(overlaps=overlaps, num_drafts=num_drafts, draft_accuracy=accuracy)
        core = EngineCore(config, executor_of(clock, config))
        if core.scheduler.drafts is not None:
            core.scheduler.drafts.costs = None
        for name in "abc":
            core.add_request(make_request(name, [1, 2, 3], 41))
        outputs[num_drafts] = {name: tokens_of(found) for name, found in finish(core).items()}
        num_steps[num_drafts] = core.num_steps
    assert outputs[4] == outputs[0]
    drafted = core.scheduler.stats().spec_decoding
    assert drafted is not None
    assert (drafted.num_accepted_tokens > 0) == (accuracy > 0)
    assert (drafted.num_accepted_tokens < drafted.num_draft_tokens) == (accuracy < 1)
    if accuracy == 1.0:
        assert num_steps == {0: 41, 4: 9}


def test_what_follows_from_the_tokens_of_the_step_before_delays_the_next_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(overlaps=True, num_drafts=4)
    executor = executor_of(clock, config)

    def begin_slowly(self: TimedWorker, step: SchedulerOutput) -> None:
        clock.sleep(0.25)
        begin(self, step)

    monkeypatch.setattr(TimedWorker, "begin", begin_slowly)
    for defers, idle in ((False, 0.0), (True, 0.25)):
        executor.execute_model(step_of())
        executor.sample_tokens(None).result()
        executor.execute_model(step_of())
        executor.sample_tokens(None)
        step = step_of()
        step.defers_drafts = defers
        executor.execute_model(step)
        assert executor.idle_seconds == idle
        executor.sample_tokens(None).result()


def test_a_late_step_leaves_the_device_idle(clock: Clock) -> None:
    executor = executor_of(clock, config_of(overlaps=True))
    executor.execute_model(step_of())
    executor.sample_tokens(None).result()
    clock.now += 1.5
    executor.execute_model(step_of())
    assert executor.idle_seconds == 1.5
