"""Tests requests that lose their blocks and come back, and blocks that other requests hit."""

import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_scheduler
from tests.engine_core.planned_steps import make_scheduler, step
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.scheduling.scheduler import Scheduler


def new_ids(scheduled: SchedulerOutput) -> list[str]:
    return [new.req_id for new in scheduled.scheduled_new_reqs]


# Preemption


def preempt_last() -> tuple[Scheduler, SchedulerOutput]:
    """Return three requests of 8 tokens in 6 blocks: the next token of the first one preempts the last."""
    scheduler = make_scheduler(num_blocks=6, caching=False)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 8, 5))
    step(scheduler)
    scheduler.add_request(make_request("d", [1] * 2))
    return scheduler, step(scheduler)[0]


def test_preemption_is_from_the_tail_to_the_head() -> None:
    scheduler, scheduled = preempt_last()
    assert scheduled.preempted_req_ids == ["c"]
    assert list(scheduled.num_scheduled_tokens) == ["a", "b"]
    assert [request.request_id for request in scheduler.waiting] == ["c", "d"]
    assert scheduler.stats().num_preemptions == 1
    assert scheduler.stats().num_waiting_tokens == 9 + 2


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    _, scheduled = preempt_last()
    assert "d" not in scheduled.num_scheduled_tokens


def test_a_resumed_request_brings_all_its_tokens_and_blocks() -> None:
    scheduler, _ = preempt_last()
    while "c" not in (scheduled := step(scheduler)[0]).num_scheduled_tokens:
        pass
    cached = scheduled.scheduled_cached_reqs
    assert cached.resumed_token_ids == {"c": [ord("c")] * 8 + [50]}
    index = cached.req_ids.index("c")
    assert (cached.num_computed_tokens[index], len(cached.new_block_ids[index])) == (0, 3)
    assert scheduled.num_scheduled_tokens["c"] == 9
    assert new_ids(scheduled) == ["d"], "behind c, for c came back to the head"


def test_the_last_running_request_preempts_itself() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False)
    scheduler.add_request(make_request("a", [1] * 5, 8))
    scheduler.add_request(make_request("b", [2] * 8, 8))
    step(scheduler)
    scheduled, _ = step(scheduler)
    assert scheduled.preempted_req_ids == ["b"]
    assert list(scheduled.num_scheduled_tokens) == ["a"]


def test_a_resumed_request_finds_its_own_blocks() -> None:
    scheduler = make_scheduler(num_blocks=7)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 12, 8))
    step(scheduler)
    assert step(scheduler)[0].preempted_req_ids == ["b"]
    while "b" not in (scheduled := step(scheduler)[0]).num_scheduled_tokens:
        pass
    assert scheduled.scheduled_cached_reqs.num_computed_tokens[-1] > 0


def test_admission_wants_room_for_the_whole_prompt() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=8, caching=False)
    scheduler.add_request(make_request("a", [1] * 24, 2))
    scheduler.add_request(make_request("b", [2] * 24, 2))
    for _ in range(4):
        assert list(step(scheduler)[0].num_scheduled_tokens) == ["a"]
    assert new_ids(step(scheduler)[0]) == ["b"]


def test_a_blocked_head_is_looked_at_again_when_a_prefix_of_it_appears() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=16)
    scheduler.add_request(make_request("a", [1] * 20, 5))
    scheduler.add_request(make_request("b", [1] * 17, 5))
    step(scheduler)
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a", "b"]


def test_a_blocked_head_costs_a_step_one_look_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add_request(make_request("a", [1] * 20, 8))
    scheduler.add_request(make_request("b", [1] * 12 + [2] * 12, 5))
    step(scheduler)
    looked_up = []
    original = scheduler.kv.pool.find

    def find(block_hash: bytes) -> int | None:
        looked_up.append(block_hash)
        return original(block_hash)

    monkeypatch.setattr(scheduler.kv.pool, "find", find)
    for _ in range(3):
        assert list(step(scheduler)[0].num_scheduled_tokens) == ["a"]
    assert len(looked_up) <= 3


# Prefix cache


def test_requests_of_one_step_share_what_it_computes() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 10))
    scheduler.add_request(make_request("b", [1] * 10))
    scheduled, _ = step(scheduler)
    first, second = scheduled.scheduled_new_reqs
    assert first.block_ids[:2] == second.block_ids[:2]
    assert (second.num_computed_tokens, scheduled.num_scheduled_tokens["b"]) == (8, 2)


def test_a_prompt_that_is_all_cached_computes_its_last_block() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 8, 1))
    step(scheduler)
    scheduler.add_request(make_request("b", [1] * 8, 1))
    scheduled, outputs = step(scheduler)
    assert scheduled.num_scheduled_tokens == {"b": 4}
    assert outputs[0].new_token_ids == [50]


def test_hits_are_counted_once_and_in_prompt_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 8, 6))
    while scheduler.has_work():
        step(scheduler)
    scheduler.add_request(make_request("b", [1] * 8, 9, accepted=[50] * 4))
    _, outputs = step(scheduler)
    assert outputs[0].prefill_stats is not None
    assert outputs[0].prefill_stats.num_cached_tokens == 8
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 8)


def test_the_prefix_cache_is_reset_only_while_no_request_runs() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 8, 2))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    step(scheduler)
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(make_request("b", [1] * 9, 2))
    assert step(scheduler)[0].num_scheduled_tokens == {"b": 9}


def test_a_failed_step_leaves_nothing_to_hit() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add_request(make_request("a", [1] * 8, 9))
    step(scheduler)
    scheduler.add_request(make_request("b", [1] * 10, 9))
    scheduler.schedule()
    scheduler.recover_from_failed_step()
    check_scheduler(scheduler)
    scheduled, _ = step(scheduler)
    first, second = scheduled.scheduled_new_reqs
    assert (first.req_id, first.output_token_ids, first.num_computed_tokens) == ("a", [50], 0)
    assert (second.req_id, second.num_computed_tokens) == ("b", 8), "a computes it anew in this step"
