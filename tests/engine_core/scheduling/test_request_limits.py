import pytest

from tests.engine_core.scheduling.planned_steps import make_scheduler


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"policy": "lifo"}, "policy 'lifo' is unknown; there are fcfs, priority"),
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
