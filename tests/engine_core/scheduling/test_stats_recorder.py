from tests.engine_core.helpers import make_request
from tests.engine_core.planned_steps import make_scheduler, step
from tokenloom.engine_core.data.messages import EngineCoreEventType, EngineCoreOutput
from tokenloom.engine_core.data.request import MAX_PREEMPTIONS


def test_outputs_carry_the_events_since_the_previous_output() -> None:
    scheduler = make_scheduler(log_events=True, num_blocks=5, watermark=0.0)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 4, 8))
    outputs: dict[str, list[EngineCoreOutput]] = {"a": [], "b": []}
    while scheduler.has_work():
        for output in step(scheduler)[1]:
            outputs[output.request_id].append(output)
    queued, scheduled, preempted = (
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
        EngineCoreEventType.PREEMPTED,
    )
    kinds = {name: [[event.type for event in output.events] for output in outputs[name]] for name in "ab"}
    assert kinds["a"] == [[queued, scheduled]] + [[]] * 7
    assert kinds["b"][0] == [queued, scheduled]
    assert [kind for kind in kinds["b"] if kind][1:] == [[preempted, scheduled]]
    times = [event.timestamp_ns for output in outputs["b"] for event in output.events]
    assert times == sorted(times)


def test_nothing_is_noted_unless_asked_for() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1]))
    assert not step(scheduler)[1][0].events


def test_an_aborted_request_leaves_no_notes() -> None:
    scheduler = make_scheduler(log_events=True)
    scheduler.add_request(make_request("a", [1]))
    scheduler.abort_requests(["a"])
    scheduler.add_request(make_request("a", [1]))
    assert len(step(scheduler)[1][0].events) == 2


def test_a_preempted_request_counts_once_in_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=5, watermark=0.0)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 4, 8))
    while scheduler.has_work():
        step(scheduler)
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8, 0)
    assert stats.num_preemptions == 1


def test_the_last_output_tells_where_a_request_was_preempted() -> None:
    scheduler = make_scheduler(num_blocks=5, watermark=0.0)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 4, 8))
    outputs: dict[str, list[EngineCoreOutput]] = {"a": [], "b": []}
    while scheduler.has_work():
        scheduled, outputs_of_step = step(scheduler)
        for output in outputs_of_step:
            outputs[output.request_id].append(output)
        if "b" in scheduled.preempted_req_ids:
            at = sum(len(output.new_token_ids) for output in outputs["b"])
    assert scheduler.stats().num_preemptions == 1
    assert [output.preempted_at for output in outputs["b"]] == [()] * (len(outputs["b"]) - 1) + [(at,)]
    assert not any(output.preempted_at for output in outputs["a"])


def test_of_many_preemptions_the_first_are_told() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 4, 2))
    step(scheduler)
    for _ in range(MAX_PREEMPTIONS + 5):
        scheduler.reset_prefix_cache(preempt_running=True)
        scheduler.schedule()
    assert scheduler.requests["a"].times.preempted_at == (1,) * MAX_PREEMPTIONS
