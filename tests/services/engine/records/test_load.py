import pytest

from tokenloom.engine_core.data.messages import EngineCoreOutputs, SchedulerStats
from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.v1.engine_pb2 import AddRequest, PickId


def test_waiting_is_all_that_was_accepted_and_does_not_run() -> None:
    load = LoadTracker(4, 4)
    load.started(100)
    assert load.snapshot().free_kv_blocks == 100
    for num_tokens in (10, 20, 30):
        load.accepted()
        load.handed_over(num_tokens)
    assert (load.snapshot().waiting, load.snapshot().running, load.snapshot().waiting_tokens) == (3, 0, 60)
    # The core knew of two when it made this: the third one's tokens still count.
    stats = SchedulerStats(num_waiting=1, num_running=1, num_waiting_tokens=20, num_free_blocks=90)
    load.observe(EngineCoreOutputs(step=4, scheduler_stats=stats, num_requests_added=2))
    now = load.snapshot()
    assert (now.waiting, now.running, now.waiting_tokens, now.step) == (2, 1, 50, 4)


def test_requests_that_the_front_ended_do_not_run() -> None:
    load = LoadTracker(4, 4)
    load.accepted()
    load.handed_over(10)
    load.observe(EngineCoreOutputs(step=1, scheduler_stats=SchedulerStats(num_running=1), num_requests_added=1))
    load.ended()
    assert (load.snapshot().waiting, load.snapshot().running) == (0, 0)


def test_only_changed_counts_wake_whoever_reports() -> None:
    load = LoadTracker(4, 4)
    load.accepted()
    assert load.changed.is_set()
    load.changed.clear()
    load.observe(EngineCoreOutputs(step=1, scheduler_stats=SchedulerStats(num_running=1)))
    assert load.changed.is_set()
    load.changed.clear()
    load.observe(EngineCoreOutputs(step=2, scheduler_stats=SchedulerStats(num_running=1, kv_usage=0.5)))
    assert not load.changed.is_set()
    assert load.snapshot().step == 2


def test_an_answer_outside_a_step_does_not_turn_the_step_back() -> None:
    load = LoadTracker(4, 4)
    load.observe(EngineCoreOutputs(step=5))
    load.observe(EngineCoreOutputs())
    assert load.step == 5


def test_what_is_beyond_the_bound_is_refused_and_its_pick_acknowledged_all_the_same() -> None:
    load = LoadTracker(1, 0)
    load.admit(AddRequest())
    load.accepted()
    with pytest.raises(ResourceExhausted):
        load.admit(AddRequest(pick=PickId(coordinator_epoch=3)))
    assert [pick.coordinator_epoch for pick in load.take_picks()] == [3]
    assert not load.take_picks()
    load.ended()
    load.refuse_new("draining")
    with pytest.raises(Unavailable, match="draining"):
        load.admit(AddRequest())


def test_a_request_that_reached_the_core_uncounted_hides_no_later_one() -> None:
    """Its sender was cancelled in the middle of the message."""
    load = LoadTracker(4, 4)
    load.observe(EngineCoreOutputs(num_requests_added=1, scheduler_stats=SchedulerStats()))
    load.handed_over(10)
    load.observe(EngineCoreOutputs(num_requests_added=1, scheduler_stats=SchedulerStats()))
    assert load.snapshot().waiting_tokens == 10


def test_blocks_are_short_before_they_are_gone_if_that_is_watched() -> None:
    def observed(load: LoadTracker, num_running: int, num_free: int) -> tuple[bool, bool]:
        load.urgent.clear()
        stats = SchedulerStats(num_running=num_running, num_free_blocks=num_free)
        load.observe(EngineCoreOutputs(scheduler_stats=stats))
        return load.is_short, load.urgent.is_set()

    unwatched, watched = LoadTracker(64, 4), LoadTracker(64, 4)
    watched.watch_blocks(16)
    assert observed(unwatched, 20, 0) == (False, False)
    # The steps take 5 ms, as far as is known: each of 20 requests fills 5 blocks while one of them moves.
    assert observed(watched, 20, 100) == (False, False)
    assert observed(watched, 20, 99) == (True, True)
    assert observed(watched, 20, 90) == (True, False), "it is reported once at once, and then with the other reports"
    assert watched.changed.is_set()
    assert observed(watched, 20, 200) == (False, False)
    assert observed(watched, 1, 0) == (False, False), "there is no other request that needs its blocks"
