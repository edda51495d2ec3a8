import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.scheduling.planned_steps import make_scheduler


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
