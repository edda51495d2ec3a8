from concurrent.futures import Future

import pytest

from tokenloom.engine_core.scheduling.batch_queue import BatchQueue
from tokenloom.engine_core.wire.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput


def make_step(num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput([], CachedRequestData([], [], [], {}), {}, num_tokens, [], [])


def test_the_oldest_comes_first_and_no_more_than_it_holds_go_in() -> None:
    queue = BatchQueue(2)
    for count in (1, 2):
        assert not queue.is_full
        queue.put(make_step(count), Future())
    assert queue.is_full
    with pytest.raises(AssertionError):
        queue.put(make_step(3), Future())
    assert [queue.take_oldest().scheduled.total_num_scheduled_tokens for _ in range(2)] == [1, 2]
    assert not queue


def test_abandoning_waits_for_every_step_and_asks_nothing_of_them() -> None:
    queue, lost, done = BatchQueue(2), Future[ModelRunnerOutput](), Future[ModelRunnerOutput]()
    lost.set_exception(RuntimeError("lost"))
    done.set_result(ModelRunnerOutput([], []))
    queue.put(make_step(1), lost)
    queue.put(make_step(2), done)
    queue.abandon()
    assert not queue
