"""Tests how tenants share the seats of a batch, and that no request waits for ever."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, make_worker, tokens_of
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.planned_steps import make_scheduler, step
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.request import Request
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.engine_core.scheduling.scheduler import Scheduler
from tokenloom.engine_core.scheduling.seats import COSTLY_ROWS, ROW_COST, index_to_preempt
from tokenloom.engine_core.scheduling.step_planner import PauseState

POLICIES = ["fcfs", "priority"]


def add(scheduler: Scheduler, *names: str, max_tokens: int = 50, priority: int = 0) -> None:
    """Add requests of the tenants that the first letters of their names name."""
    for name in names:
        tokens = [*name.encode()]
        scheduler.add_request(make_request(name, tokens, max_tokens, tenant=name[0], priority=priority))


def running(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


def numbered(tenant: str, count: int) -> Iterator[str]:
    return (f"{tenant}{n}" for n in range(count))


def begun(scheduler: Scheduler, num_steps: int) -> list[str]:
    """Step, and return the requests in the order in which they begin."""
    order: list[str] = []
    for _ in range(num_steps):
        scheduled, _ = step(scheduler)
        order += [new.req_id for new in scheduled.scheduled_new_reqs]
    return order


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_tenants_get_seats_by_turns(policy: str) -> None:
    scheduler = make_scheduler(max_num_seqs=5, policy=policy)
    add(scheduler, *numbered("a", 6), "b0", "b1", "c0")
    assert begun(scheduler, 1) == ["a0", "b0", "c0", "a1", "b1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_that_waits_alone_is_served_in_the_order_of_arrival(policy: str) -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy=policy)
    add(scheduler, *numbered("a", 5), max_tokens=1)
    assert begun(scheduler, 3) == ["a0", "a1", "a2", "a3", "a4"]


def test_the_next_seat_is_that_of_the_tenant_with_the_fewest() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    add(scheduler, "a0", max_tokens=2)
    add(scheduler, "a1", "a2", "b0")
    step(scheduler)
    add(scheduler, "a3", "b1")
    assert begun(scheduler, 2) == ["b1"], "a0 has ended; a has two seats and b one"


def test_a_more_urgent_request_goes_first_whatever_its_tenant_has() -> None:
    scheduler = make_scheduler(max_num_seqs=3, policy="priority")
    add(scheduler, "a0", "a1")
    step(scheduler)
    add(scheduler, "b0")
    add(scheduler, "a2", priority=-1)
    assert begun(scheduler, 1) == ["a2"]


def test_a_tenant_with_all_seats_gives_back_one_a_step_until_shares_are_fair() -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    add(scheduler, *numbered("a", 12))
    step(scheduler)
    add(scheduler, *numbered("b", 8))
    step(scheduler)
    assert running(scheduler) == [*numbered("a", 7), "b0"], "the newest request gave its seat in the same step"
    for _ in range(5):
        step(scheduler)
    assert Counter(name[0] for name in running(scheduler)) == {"a": 4, "b": 4}
    assert scheduler.stats().num_preemptions == 4
    assert [request.request_id for request in scheduler.waiting if request.tenant == "a"][:4] == [
        "a4",
        "a5",
        "a6",
        "a7",
    ]


def test_a_share_that_is_nearly_equal_loses_no_seat() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, "a0", "a1", "b0")
    step(scheduler)
    add(scheduler, "b1")
    step(scheduler)
    assert running(scheduler) == ["a0", "b0", "a1"]


@pytest.mark.parametrize("caching", [True, False])
def test_a_request_that_would_be_computed_anew_keeps_its_seat(caching: bool) -> None:
    scheduler = make_scheduler(max_num_seqs=3, caching=caching)
    for name in numbered("a", 3):
        request = make_request(name, [1, 2], 50, tenant="a")
        params = replace(request.sampling_params, skip_reading_prefix_cache=caching)
        scheduler.add_request(replace(request, sampling_params=params))
    step(scheduler)
    add(scheduler, "b0")
    assert begun(scheduler, 2) == []


def test_a_more_urgent_request_keeps_its_seat() -> None:
    scheduler = make_scheduler(max_num_seqs=3, policy="priority")
    add(scheduler, *numbered("a", 3), priority=-1)
    step(scheduler)
    add(scheduler, "b0")
    assert begun(scheduler, 2) == []
    assert scheduler.stats().num_preemptions == 0


def test_a_pause_takes_no_seat_back() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, *numbered("a", 3))
    step(scheduler)
    add(scheduler, "b0")
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert begun(scheduler, 2) == []
    assert running(scheduler) == ["a0", "a1", "a2"]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert begun(scheduler, 1) == ["b0"]


def test_a_seat_that_was_taken_back_is_the_tenants_next() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, *numbered("a", 5))
    step(scheduler)
    add(scheduler, "b0", max_tokens=2)
    step(scheduler)
    assert running(scheduler) == ["a0", "a1", "b0"]
    step(scheduler)
    step(scheduler)
    assert running(scheduler) == ["a0", "a1", "a2"]


def test_one_tenant_never_loses_a_seat_and_costs_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, *numbered("a", 9), max_tokens=3)
    monkeypatch.delattr(scheduler._planner.__class__, "_count_seats")
    assert begun(scheduler, 12) == [*numbered("a", 9)]
    assert scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_with_many_requests_gives_up_blocks_before_one_with_few(policy: str) -> None:
    scheduler = make_scheduler(max_num_seqs=9, num_blocks=24, policy=policy)
    add(scheduler, *numbered("a", 8), max_tokens=60)
    for _ in range(4):
        step(scheduler)
    add(scheduler, "b0", max_tokens=20)
    waited = 0
    while "b0" not in running(scheduler):
        step(scheduler)
        waited += 1
        assert waited < 8
    for _ in range(19):
        assert "b0" in running(scheduler)
        step(scheduler)
    assert "b0" not in scheduler.requests
    assert scheduler.stats().num_preemptions > 2


def test_the_oldest_request_never_gives_up_its_blocks_while_others_run() -> None:
    names = ["a0", "b0", "b1", "a1", "c0"]
    requests = [Request(make_request(name, [1], tenant=name[0]), 100, 0) for name in names]
    assert [names[index_to_preempt(requests, start)] for start in range(5)] == ["a1", "a1", "a1", "a1", "c0"]
    del requests[3], names[3]
    assert [names[index_to_preempt(requests, start)] for start in range(4)] == ["b1", "b1", "b1", "c0"]
    del requests[2], names[2]
    assert [names[index_to_preempt(requests, start)] for start in range(3)] == ["c0", "c0", "c0"]


@pytest.mark.parametrize("executor", list(EXECUTORS))
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_do_not_depend_on_lost_seats(policy: str, executor: str) -> None:
    """Tenants come in bursts, so that seats and blocks are taken from one for the next, and some requests leave."""
    rng = random.Random(1)
    for num_blocks in (24, 200):
        config = make_config(
            max_num_seqs=4, num_blocks=num_blocks, policy=policy, async_scheduling=executor != "uniproc"
        )
        core = EngineCore(config, EXECUTORS[executor](make_worker(config)))
        expected: dict[str, list[int]] = {}
        received: dict[str, list[int]] = {}
        for turn in range(300):
            if turn % 15 in (0, 4) and turn < 250:
                tenant, most = ("a", 9) if turn % 15 == 0 else (rng.choice("bc"), 2)
                for number in range(rng.randint(1, most)):
                    name, prompt, length = f"{tenant}{turn}.{number}", [7] * rng.randint(1, 20), rng.randint(1, 30)
                    expected[name] = expected_tokens(prompt, length, VOCAB_SIZE)
                    received[name] = []
                    core.add_request(make_request(name, prompt, length, tenant=tenant))
            if turn % 20 == 0 and core.scheduler.requests:
                name = rng.choice(sorted(core.scheduler.requests))
                core.abort_requests([name])
                del expected[name]
            for output in core.step().outputs:
                received[output.request_id] += output.new_token_ids
            check_scheduler(core.scheduler)
        for outputs in finish(core).items():
            received[outputs[0]] += tokens_of(outputs[1])
        assert {name: received[name] for name in expected} == expected
        assert core.scheduler.stats().num_preemptions > 5
        check_idle(core.scheduler)
        core.shutdown()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    watched=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from("abcd"), st.integers(1, 50), st.integers(1, 8)),
        min_size=1,
        max_size=6,
    ),
    flood=st.lists(st.tuples(st.sampled_from("abe"), st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=6),
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.sampled_from([16, 24, 64]),
    policy=st.sampled_from(POLICIES),
)
def test_every_request_begins_however_many_others_come(
    watched: Sequence[tuple[int, str, int, int]],
    flood: Sequence[tuple[str, int, int]],
    max_num_seqs: int,
    num_blocks: int,
    policy: str,
) -> None:
    """Some tenants always have more small requests than there are seats. Large ones must not be overtaken for ever."""
    scheduler = make_scheduler(max_num_seqs=max_num_seqs, num_blocks=num_blocks, policy=policy, caching=False)
    pending: set[str] = set()
    for now in range(400):
        for number, (arrival, tenant, num_tokens, max_tokens) in enumerate(watched):
            if arrival == now:
                pending.add(f"watched {number}")
                request = make_request(f"watched {number}", [7] * num_tokens, max_tokens, tenant=tenant)
                scheduler.add_request(request)
        for number, (tenant, num_tokens, max_tokens) in enumerate(flood):
            if sum(request.tenant == tenant for request in scheduler.waiting) < 2 * max_num_seqs:
                request = make_request(f"flood {now}.{number}", [8] * num_tokens, max_tokens, tenant=tenant)
                scheduler.add_request(request)
        scheduled, _ = step(scheduler)
        pending.difference_update(new.req_id for new in scheduled.scheduled_new_reqs)
        if now > 30 and not pending:
            return
    raise AssertionError(f"{sorted(pending)} never began")


def add_costly(scheduler: Scheduler, *names: str) -> None:
    """Add requests with log probabilities."""
    for name in names:
        request = make_request(name, [*name.encode()], 50, tenant=name[0])
        scheduler.add_request(replace(request, sampling_params=replace(request.sampling_params, logprobs=20)))


def planned(scheduler: Scheduler) -> set[str]:
    return set(step(scheduler)[0].num_scheduled_tokens)


def costly_scheduler(num_rows: int = COSTLY_ROWS, num_blocks: int = 400) -> Scheduler:
    """Return a scheduler with seats for four more requests, where the tenant "a" decodes with log probabilities."""
    scheduler = make_scheduler(max_num_seqs=COSTLY_ROWS + 4, num_blocks=num_blocks, max_num_batched_tokens=400)
    add_costly(scheduler, *numbered("a", num_rows))
    step(scheduler)
    return scheduler


def test_rows_with_log_probabilities_wait_a_step_for_the_first_token_of_another_tenant() -> None:
    scheduler = costly_scheduler()
    rows = set(numbered("a", COSTLY_ROWS))
    add(scheduler, "a-plain")
    assert planned(scheduler) == rows | {"a-plain"}
    add(scheduler, "b0")
    assert planned(scheduler) == {"a-plain", "b0"}
    add(scheduler, "b1")
    assert planned(scheduler) == rows | {"a-plain", "b0", "b1"}  # at most every second step
    assert planned(scheduler) == rows | {"a-plain", "b0", "b1"}
    add(scheduler, "b2")
    assert planned(scheduler) == {"a-plain", "b0", "b1", "b2"}


def test_few_rows_with_log_probabilities_do_not_wait() -> None:
    scheduler = costly_scheduler(COSTLY_ROWS - 1)
    add(scheduler, "b0")
    assert planned(scheduler) == {*numbered("a", COSTLY_ROWS - 1), "b0"}


def test_no_row_waits_for_a_request_that_cannot_begin() -> None:
    scheduler = costly_scheduler(num_blocks=COSTLY_ROWS + 22)
    scheduler.add_request(make_request("b0", [7] * 90, 5, tenant="b"))
    assert planned(scheduler) == set(numbered("a", COSTLY_ROWS))


def add_prompt(scheduler: Scheduler, name: str, num_tokens: int, *, prompt_logprobs: int | None = None) -> None:
    request = make_request(name, [sum(name.encode())] * num_tokens, tenant=name[0])
    params = replace(request.sampling_params, prompt_logprobs=prompt_logprobs)
    scheduler.add_request(replace(request, sampling_params=params))


def test_a_short_prompt_is_computed_in_the_next_step_beside_long_ones_of_another_tenant() -> None:
    scheduler = make_scheduler()
    for name in ("a1", "a2", "a3"):
        add_prompt(scheduler, name, 90)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 32}
    add_prompt(scheduler, "b1", 10)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 22, "b1": 10}


def test_two_tenants_with_long_prompts_get_every_second_step() -> None:
    scheduler = make_scheduler(num_blocks=200)
    for name in ("a1", "b1"):
        add_prompt(scheduler, name, 96)
    planned: Counter[str] = Counter()
    for _ in range(4):
        planned.update(step(scheduler)[0].num_scheduled_tokens)
    assert max(planned.values()) - min(planned.values()) <= 4, planned


def test_rows_with_log_probabilities_are_charged_as_several_tokens() -> None:
    scheduler = make_scheduler(num_blocks=200)
    add_prompt(scheduler, "a1", 96, prompt_logprobs=20)
    add_prompt(scheduler, "b1", 24)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": (32 - 24) // (1 + ROW_COST), "b1": 24}
    add_prompt(scheduler, "b2", 40)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 31 // (1 + ROW_COST), "b1": 1}  # a was given less


def test_rows_make_no_step_longer_than_others_are() -> None:
    scheduler = make_scheduler(num_blocks=200)
    for name in ("a1", "a2"):  # of one tenant: another one may come at any time, and waits for the step
        add_prompt(scheduler, name, 40, prompt_logprobs=20)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 32 // (1 + ROW_COST)}


def test_the_step_of_another_tenants_prompt_has_few_rows_with_log_probabilities() -> None:
    scheduler = make_scheduler(num_blocks=200, prefill_tokens_beside_decode=32, max_num_batched_tokens=256)
    add_prompt(scheduler, "a1", 96, prompt_logprobs=20)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 256 // (1 + ROW_COST)}, "nobody waits"
    add_prompt(scheduler, "b1", 24)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 16 // (1 + ROW_COST), "b1": 24}
    scheduler = make_scheduler(num_blocks=200, prefill_tokens_beside_decode=32, max_num_batched_tokens=256)
    for name in ("a1", "b1"):
        add_prompt(scheduler, name, 96, prompt_logprobs=20)
    assert sum(step(scheduler)[0].num_scheduled_tokens.values()) == 256 // (1 + ROW_COST), "b's prompt is no short one"


def test_prompts_are_dealt_out_however_many_stand_before_another_tenants_tokens() -> None:
    scheduler = make_scheduler(num_blocks=400, prefill_tokens_beside_decode=32, max_num_batched_tokens=65)
    for name in ("a1", "a2"):
        add_prompt(scheduler, name, 90, prompt_logprobs=20)
    step(scheduler)
    step(scheduler)
    add_prompt(scheduler, "b1", 4)
    assert step(scheduler)[0].num_scheduled_tokens["b1"] == 4
    assert running(scheduler) == ["a1", "a2", "b1"]
    for _ in range(3):
        assert step(scheduler)[0].num_scheduled_tokens == {"a1": 16 // (1 + ROW_COST), "b1": 1}


def test_the_first_prompt_of_a_tenant_gets_all_that_its_prompts_may_cost() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_batched_tokens=5 * (1 + ROW_COST) + 1)
    for name in ("a1", "a2"):
        add_prompt(scheduler, name, 14, prompt_logprobs=20)
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 5, "a2": 1}
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 5}
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 4, "a2": 1}
    assert step(scheduler)[0].num_scheduled_tokens == {"a1": 1, "a2": 5}


def note_costs(scheduler: Scheduler) -> None:
    """Let a scheduler know a model that computes 2,000 prompt tokens a second, and decodes in steps of 10 ms."""
    share = scheduler._planner.prompt_share
    assert share is not None
    share.observe(40, 0.02)
    share.observe(0, 0.01)


def test_prompts_delay_another_tenants_tokens_by_one_step_at_most() -> None:
    scheduler = make_scheduler(num_blocks=200, prefill_tokens_beside_decode=4, max_num_batched_tokens=64)
    add_prompt(scheduler, "b1", 2)
    step(scheduler)
    note_costs(scheduler)
    add_prompt(scheduler, "a1", 90)
    assert step(scheduler)[0].num_scheduled_tokens == {"b1": 1, "a1": 20}
    alone = make_scheduler(num_blocks=200, prefill_tokens_beside_decode=4, max_num_batched_tokens=64)
    add_prompt(alone, "b1", 2)
    step(alone)
    note_costs(alone)
    add_prompt(alone, "b2", 90)
    assert step(alone)[0].num_scheduled_tokens["b2"] > 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90), st.booleans()), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_prompt_is_computed_whatever_tenants_send(prompts: list[tuple[str, int, bool]]) -> None:
    scheduler = make_scheduler(num_blocks=120)
    for number, (tenant, num_tokens, has_logprobs) in enumerate(prompts):
        add_prompt(scheduler, f"{tenant}{number}", num_tokens, prompt_logprobs=3 if has_logprobs else None)
    for _ in range(2000):
        if not scheduler.requests:
            return
        step(scheduler)
    raise AssertionError(f"still waiting: {list(scheduler.requests)}")
