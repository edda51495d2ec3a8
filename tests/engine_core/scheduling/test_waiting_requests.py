import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.planned_steps import make_scheduler, step
from tokenloom.engine_core.data.messages import ErrorKind, FinishReason


@pytest.mark.parametrize(("full", "admitted"), [(True, ["a"]), (False, ["a", "b"])])
def test_a_prompt_may_be_admitted_when_only_its_beginning_fits(full: bool, admitted: list[str]) -> None:
    scheduler = make_scheduler(
        num_blocks=10,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        reserve_full_prompt=full,
        watermark=0.0,
    )
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 36, 4))
    assert list(scheduler.schedule().num_scheduled_tokens) == admitted


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, ["a", "b"]), (0.5, ["a"])])
def test_a_newcomer_leaves_a_share_of_the_blocks_free(watermark: float, admitted: list[str]) -> None:
    scheduler = make_scheduler(num_blocks=8, watermark=watermark)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, [ord(request_id)] * 11, 4))
    assert list(scheduler.schedule().num_scheduled_tokens) == admitted


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_whose_time_has_run_out_is_ended_before_it_is_computed(policy: str) -> None:
    scheduler = make_scheduler(policy=policy)
    for request_id, timeout_ns in (("late", 1), ("early", 1 << 40), ("patient", 0)):
        request = make_request(request_id, [1] * 8, 4)
        request.timeout_ns = timeout_ns
        scheduler.add_request(request)
    scheduled = scheduler.schedule()
    assert list(scheduled.num_scheduled_tokens) == ["early", "patient"]
    (output,) = scheduler.ended.take_outputs()
    assert (output.request_id, output.finish_reason) == ("late", FinishReason.ERROR)
    assert output.error_kind is ErrorKind.DEADLINE_EXCEEDED
    assert "time ran out" in output.error
    assert "late" not in scheduler.requests


def test_only_late_requests_leave_an_idle_scheduler_with_their_answers() -> None:
    scheduler = make_scheduler()
    for request_id in ("a", "b"):
        request = make_request(request_id, [1] * 8, 4)
        request.timeout_ns = 1
        scheduler.add_request(request)
    assert not scheduler.schedule().num_scheduled_tokens
    assert scheduler.has_work()
    assert [output.request_id for output in scheduler.ended.take_outputs()] == ["a", "b"]
    assert not scheduler.has_work()
    assert not scheduler.waiting


def test_a_request_that_runs_is_not_ended_at_its_time() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1] * 8, 4)
    request.timeout_ns = 5
    scheduler.add_request(request)
    for _ in range(4):
        step(scheduler)
    assert not scheduler.requests  # it had all of its tokens


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"policy": "lifo"}, "policy 'lifo' is unknown; use one of fcfs, priority"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1"),
        (
            {"long_prefill_token_threshold": 4, "enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
            "needs chunked prefill",
        ),
    ],
)
def test_bad_limits_are_refused(settings: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make_scheduler(**settings)
