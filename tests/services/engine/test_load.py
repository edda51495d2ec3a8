from tokenloom.engine_core.wire.messages import EngineCoreOutputs, SchedulerStats
from tokenloom.services.engine.load import LoadTracker


def test_waiting_is_all_that_was_accepted_and_does_not_run() -> None:
    load = LoadTracker()
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
    load = LoadTracker()
    load.accepted()
    load.handed_over(10)
    load.observe(EngineCoreOutputs(step=1, scheduler_stats=SchedulerStats(num_running=1), num_requests_added=1))
    load.ended()
    assert (load.snapshot().waiting, load.snapshot().running) == (0, 0)


def test_only_changed_counts_wake_whoever_reports() -> None:
    load = LoadTracker()
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
    load = LoadTracker()
    load.observe(EngineCoreOutputs(step=5))
    load.observe(EngineCoreOutputs())
    assert load.step == 5
