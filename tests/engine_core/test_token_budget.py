from tests.engine_core.helpers import make_request
from tests.engine_core.scheduling import make_scheduler


def test_a_long_prefill_leaves_room_for_short_ones() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8, max_num_batched_tokens=64)
    scheduler.add_request(make_request("long", [1] * 30))
    scheduler.add_request(make_request("short", [2] * 5))
    assert scheduler.schedule().num_scheduled_tokens == {"long": 8, "short": 5}
