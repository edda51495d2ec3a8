"""Tests the scheduler with the policy ``priority``."""

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle
from tests.engine_core.planned_steps import make_scheduler, step


def test_the_smallest_priority_begins_first() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for request_id, priority in (("low", 5), ("high", -5), ("middle", 0), ("high too", -5)):
        scheduler.add_request(make_request(request_id, [1], 1, priority=priority))
    order = []
    while scheduler.has_work():
        order += [output.request_id for output in step(scheduler)[1]]
    assert order == ["high", "high too", "middle", "low"]


def test_the_lowest_priority_is_preempted_and_among_equals_the_latest() -> None:
    scheduler = make_scheduler(policy="priority", num_blocks=6, watermark=0.0)
    for request_id, priority in (("low", 1), ("lower", 2), ("high", 0), ("low too", 1)):
        scheduler.add_request(make_request(request_id, [ord(request_id[-1])] * 4, 12, priority=priority))
    preempted: list[str] = []
    while scheduler.has_work():
        preempted += step(scheduler)[0].preempted_req_ids
    assert preempted[:3] == ["lower", "low too", "low"]
    assert "high" not in preempted
    check_idle(scheduler)


def test_a_long_prompt_of_high_priority_leaves_every_request_a_token() -> None:
    scheduler = make_scheduler(policy="priority", max_num_batched_tokens=8)
    for request_id in ("a", "b"):
        scheduler.add_request(make_request(request_id, [1, 2], 20))
        step(scheduler)
    scheduler.add_request(make_request("long", [3] * 40, priority=-1))
    step(scheduler)
    assert scheduler.schedule().num_scheduled_tokens == {"long": 6, "a": 1, "b": 1}


def test_an_urgent_prompt_has_each_step_whatever_its_tenant_was_given_before() -> None:
    scheduler = make_scheduler(policy="priority", max_num_batched_tokens=8)
    scheduler.add_request(make_request("b", [2] * 60, tenant="b"))
    step(scheduler)
    scheduler.add_request(make_request("a", [1] * 40, priority=-1, tenant="a"))
    for _ in range(4):
        given = step(scheduler)[0].num_scheduled_tokens
        assert given["a"] >= 7, given


def test_an_urgent_prompt_brings_no_other_of_its_tenant_forward() -> None:
    scheduler = make_scheduler(policy="priority", max_num_batched_tokens=8)
    for name in ("b", "a"):
        scheduler.add_request(make_request(name, [ord(name)] * 60, tenant=name))
    scheduler.add_request(make_request("urgent", [3] * 4, 1, priority=-1, tenant="a"))
    given = step(scheduler)[0].num_scheduled_tokens
    assert given == {"urgent": 4, "b": 4}
