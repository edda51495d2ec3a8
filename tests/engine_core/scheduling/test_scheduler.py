import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.planned_steps import make_scheduler, step
from tokenloom.engine_core.data.messages import FinishReason, LogitsStats, PrefillStats
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput, SchedulerOutput


def new_ids(scheduled: SchedulerOutput) -> list[str]:
    return [new.req_id for new in scheduled.scheduled_new_reqs]


# Budget


def test_the_first_tokens_of_a_step_are_put_out_first() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(make_request(name, [1, 2], 5))
    assert [output.request_id for output in step(scheduler)[1]] == ["a", "b"]
    for name in "cd":
        scheduler.add_request(make_request(name, [3, 4], 5))
    assert [output.request_id for output in step(scheduler)[1]] == ["c", "d", "a", "b"]
    assert [output.request_id for output in step(scheduler)[1]] == ["a", "b", "c", "d"]


def test_a_prompt_is_computed_in_chunks_and_answers_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add_request(make_request("a", range(40)))
    chunks = [step(scheduler) for _ in range(3)]
    assert [scheduled.num_scheduled_tokens for scheduled, _ in chunks] == [{"a": 16}, {"a": 16}, {"a": 8}]
    assert [len(outputs) for _, outputs in chunks] == [0, 0, 1]


def test_running_requests_come_before_waiting_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add_request(make_request("a", [1] * 10))
    step(scheduler)
    scheduler.add_request(make_request("b", [2] * 30))
    scheduled, _ = step(scheduler)
    assert scheduled.num_scheduled_tokens == {"a": 1, "b": 15}
    assert scheduled.total_num_scheduled_tokens == 16


def test_no_more_requests_than_rows() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, [1], 2))
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["a", "b"]
    step(scheduler)
    assert list(step(scheduler)[0].num_scheduled_tokens) == ["c"]


def test_without_chunks_a_prompt_waits_for_a_whole_budget() -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=100, prefill_tokens_beside_decode=8, num_blocks=100
    )
    scheduler.add_request(make_request("a", [1] * 60))
    scheduler.add_request(make_request("b", [2] * 60))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 60}
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 60}


# What the worker is told


def test_the_worker_hears_differences_only() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 7, accepted=[8]))
    scheduled, _ = step(scheduler)
    (new,) = scheduled.scheduled_new_reqs
    assert (new.prompt_token_ids, new.output_token_ids, new.num_computed_tokens) == ([1] * 7, [8], 0)
    assert len(new.block_ids) == 2
    scheduled, _ = step(scheduler)
    assert not scheduled.scheduled_new_reqs
    cached = scheduled.scheduled_cached_reqs
    assert (cached.req_ids, cached.num_computed_tokens, cached.resumed_token_ids) == (["a"], [8], {})
    assert [len(block_ids) for block_ids in cached.new_block_ids] == [1]
    scheduled, _ = step(scheduler)
    assert scheduled.scheduled_cached_reqs.new_block_ids == [[]]


def test_the_worker_keeps_no_alias_of_a_block_table() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 4))
    scheduled, _ = step(scheduler)
    before = list(scheduled.scheduled_new_reqs[0].block_ids)
    step(scheduler)
    assert scheduled.scheduled_new_reqs[0].block_ids == before


def test_the_worker_hears_of_an_end_with_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], 1))
    step(scheduler)
    assert not scheduler.has_work()
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    scheduler.add_request(make_request("b", [1], 1))
    assert step(scheduler)[0].finished_req_ids == ["a"]
    scheduler.add_request(make_request("c", [1], 1))
    assert step(scheduler)[0].finished_req_ids == ["b"]


def test_the_worker_hears_nothing_of_a_request_it_never_saw() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("a", [1]))
    scheduler.add_request(make_request("b", [1]))
    step(scheduler)
    scheduler.abort_requests(["b"])
    assert step(scheduler)[0].finished_req_ids == []


# Outputs and ends


def test_the_first_output_says_where_time_went() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", [1] * 12, 3))
    step(scheduler)
    _, (first,) = step(scheduler)
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=12, num_cached_tokens=0, queued_ns=1, prefill_ns=1)
    _, (second,) = step(scheduler)
    assert second.prefill_stats is None


def test_indices_count_accepted_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 3, 4, accepted=[8, 9]))
    outputs = [output for _ in range(2) for output in step(scheduler)[1]]
    assert [output.token_index for output in outputs] == [2, 3]
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]
    check_idle(scheduler)


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], 9, stop=(50, 51)))
    _, (output,) = step(scheduler)
    assert (output.new_token_ids, output.finish_reason, output.stop_token_id) == ([50], FinishReason.STOP, 50)
    check_idle(scheduler)


def test_tokens_behind_an_end_are_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], 9, stop=(7,)))
    scheduled = scheduler.schedule()
    (output,) = scheduler.results.apply(scheduled, ModelRunnerOutput(["a"], [[5, 7, 9]]))
    assert (output.new_token_ids, output.finish_reason) == ([5, 7], FinishReason.STOP)
    check_idle(scheduler)


def test_the_context_length_ends_a_request() -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add_request(make_request("a", [1] * 8, 100))
    assert [step(scheduler)[1][0].finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]
    check_idle(scheduler)


@pytest.mark.parametrize(
    ("accepted", "stop", "reason", "stop_token_id"),
    [([5, 6], (6,), FinishReason.STOP, 6), ([5, 6, 7], (), FinishReason.LENGTH, None)],
)
def test_accepted_tokens_can_be_the_whole_answer(
    accepted: list[int], stop: tuple[int, ...], reason: FinishReason, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], 3, accepted=accepted, stop=stop))
    assert scheduler.has_work()
    (output,) = scheduler.ended.take_outputs()
    assert (output.new_token_ids, output.token_index) == ([], len(accepted))
    assert (output.finish_reason, output.stop_token_id) == (reason, stop_token_id)
    check_idle(scheduler)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "message"),
    [
        (0, 5, "prompt is empty"),
        (100, 1, "prompt has 100 tokens; with at least one of output the context holds 100"),
        (20, 30, "prompt and max_tokens need 49 KV slots; the engine has 40"),
    ],
)
def test_a_request_that_can_never_run_is_refused(num_prompt_tokens: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add_request(make_request("a", [1] * num_prompt_tokens, max_tokens))
    (output,) = scheduler.ended.take_outputs()
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, message)
    check_idle(scheduler)


def test_a_request_may_need_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add_request(make_request("a", [1] * 20, 21))
    while scheduler.has_work():
        step(scheduler)
    check_idle(scheduler)


def test_priorities_need_their_policy() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], priority=1))
    assert scheduler.ended.take_outputs()[0].error == "priority is 1, but the engine's scheduling policy is fcfs"


# Aborts


def test_aborts_free_everything_and_say_nothing() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 8, 9))
    step(scheduler)
    scheduler.abort_requests(["a", "c", "nobody"])
    check_scheduler(scheduler)
    scheduled, outputs = step(scheduler)
    assert scheduled.finished_req_ids == ["a"]
    assert [output.request_id for output in outputs] == ["b"]
    scheduler.abort_requests(["b"])
    check_idle(scheduler)
    assert not scheduler.has_work()


def test_an_abort_during_a_step_frees_and_says_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1] * 5))
    scheduled = scheduler.schedule()
    scheduler.abort_requests(["a"])
    assert scheduler.results.apply(scheduled, ModelRunnerOutput(["a"], [[50]])) == []
    check_idle(scheduler)


def test_an_abort_overtakes_an_early_end() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", []))
    scheduler.abort_requests(["a"])
    assert not scheduler.has_work()


# Configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 33}, "max_num_batched_tokens 32 is below max_num_seqs 33"),
        ({"enable_chunked_prefill": False}, r"without chunked prefill max_num_batched_tokens \(32\) must reach .*100"),
        ({"prefill_tokens_beside_decode": 0}, "prefill_tokens_beside_decode is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**settings)  # type: ignore[arg-type]


def test_what_the_worker_saw_in_the_logits_comes_with_the_token_drawn_from_them() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1]))
    scheduler.add_request(make_request("b", [2]))
    scheduled = scheduler.schedule()
    stats = LogitsStats(3.0, -2.0, 0.5, 1.0)
    result = ModelRunnerOutput(["a", "b"], [[50], [51]], num_nans_in_logits={"b": 7}, logits_stats={"a": stats})
    outputs = scheduler.results.apply(scheduled, result)
    assert [output.num_nans_in_logits for output in outputs] == [0, 7]
    assert [output.logits_stats for output in outputs] == [stats, None]
