import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.scheduling.planned_steps import make_scheduler
from tokenloom.engine_core.scheduling.request import Request
from tokenloom.engine_core.scheduling.waiting_requests import FCFSQueue, PriorityQueue, RequestQueue


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


def request(request_id: str, num_tokens: int = 1, *, priority: int = 0, arrival_ns: int = 0) -> Request:
    return Request(make_request(request_id, [0] * num_tokens, priority=priority), 100, arrival_ns)


def ids(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_first_come_first_served() -> None:
    queue = FCFSQueue()
    for request_id in "abc":
        queue.append(request(request_id))
    head = queue.peek()
    assert head is not None
    assert head.request_id == "a"
    assert ids(queue) == ["a", "b", "c"]


def test_prepending_puts_a_request_at_the_head() -> None:
    queue = FCFSQueue()
    queue.append(request("a"))
    queue.prepend(request("b"))
    assert ids(queue) == ["b", "a"]


def test_the_smallest_priority_goes_first_and_among_equals_the_earliest() -> None:
    queue = PriorityQueue()
    assert queue.peek() is None
    for request_id, priority, arrival_ns in (("a", 1, 5), ("b", 0, 7), ("c", 1, 4), ("d", -3, 9), ("e", 0, 7)):
        queue.append(request(request_id, priority=priority, arrival_ns=arrival_ns))
    queue.prepend(request("f", priority=1, arrival_ns=6))
    assert ids(queue) == ["d", "b", "e", "c", "a", "f"]
    head = queue.peek()
    assert head is not None
    queue.remove(head)
    assert ids(queue) == ["b", "e", "c", "a", "f"]


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_tokens_are_counted(queue: RequestQueue) -> None:
    first, second = request("a", 3, priority=1), request("b", 4)
    queue.append(first)
    queue.prepend(second)
    assert (len(queue), queue.num_tokens) == (2, 7)
    queue.remove(first)
    assert (ids(queue), queue.num_tokens) == (["b"], 4)
    queue.remove(second)
    assert (len(queue), queue.num_tokens) == (0, 0)
