from tests.engine_core.helpers import make_request
from tests.engine_core.planned_steps import make_scheduler, step


def test_a_long_prefill_leaves_room_for_short_ones() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8, max_num_batched_tokens=64)
    scheduler.add_request(make_request("long", [1] * 30))
    scheduler.add_request(make_request("short", [2] * 5))
    assert scheduler.schedule().num_scheduled_tokens == {"long": 8, "short": 5}


def test_a_prompt_gets_less_while_anything_decodes() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=8)
    scheduler.add_request(make_request("a", [1] * 40))
    assert step(scheduler)[0].total_num_scheduled_tokens == 32
    scheduler.add_request(make_request("b", [2] * 40))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 8, "b": 24}
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 8}


def test_prompts_get_more_where_more_of_them_wait_than_decode() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=4)
    scheduler.add_request(make_request("a", [1], 20))
    step(scheduler)
    for request_id, token in (("b", 2), ("c", 3), ("d", 4)):
        scheduler.add_request(make_request(request_id, [token] * 10, 20))
    steps = [step(scheduler)[0].num_scheduled_tokens for _ in range(4)]
    assert steps == [
        {"a": 1, "b": 10, "c": 2},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 1, "d": 4},
    ]


def test_a_request_without_a_row_adds_no_budget() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=4, max_num_seqs=2)
    scheduler.add_request(make_request("a", [1]))
    step(scheduler)
    for request_id in "bcd":
        scheduler.add_request(make_request(request_id, [2] * 20))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 4}


def test_no_running_request_is_left_out() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=2)
    for request_id in "abcd":
        scheduler.add_request(make_request(request_id, [1]))
    step(scheduler)
    assert len(step(scheduler)[0].num_scheduled_tokens) == 4
