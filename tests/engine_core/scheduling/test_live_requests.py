import pytest

from tests.engine_core.helpers import make_request
from tokenloom.engine_core.data.request import Request
from tokenloom.engine_core.scheduling.live_requests import FCFSQueue, PriorityQueue, WaitingRequests

Queue = FCFSQueue | PriorityQueue | WaitingRequests


def request(request_id: str, num_tokens: int = 1, *, priority: int = 0, arrival_ns: int = 0) -> Request:
    return Request(make_request(request_id, [0] * num_tokens, priority=priority), 100, arrival_ns)


def ids(queue: Queue) -> list[str]:
    return [request.request_id for request in (queue if isinstance(queue, WaitingRequests) else queue.values())]


def test_first_come_first_served() -> None:
    queue = FCFSQueue()
    for request_id in "abc":
        queue.append(request(request_id))
    assert queue.peek().request_id == "a"
    assert ids(queue) == ["a", "b", "c"]


def test_prepending_puts_a_request_at_the_head() -> None:
    queue = FCFSQueue()
    queue.append(request("a"))
    queue.prepend(request("b"))
    assert ids(queue) == ["b", "a"]


def test_the_smallest_priority_goes_first_and_among_equals_the_earliest() -> None:
    queue = PriorityQueue()
    for request_id, priority, arrival_ns in (("a", 1, 5), ("b", 0, 7), ("c", 1, 4), ("d", -3, 9), ("e", 0, 7)):
        queue.append(request(request_id, priority=priority, arrival_ns=arrival_ns))
    queue.prepend(request("f", priority=1, arrival_ns=6))
    assert ids(queue) == ["d", "b", "e", "c", "a", "f"]
    queue.remove(queue.peek())
    assert ids(queue) == ["b", "e", "c", "a", "f"]


@pytest.mark.parametrize("queue", [WaitingRequests(FCFSQueue), WaitingRequests(PriorityQueue)])
def test_tokens_are_counted(queue: WaitingRequests) -> None:
    first, second = request("a", 3, priority=1), request("b", 4)
    queue.append(first)
    queue.prepend(second)
    assert (len(queue), queue.num_tokens) == (2, 7)
    queue.remove(first)
    assert (ids(queue), queue.num_tokens) == (["b"], 4)
    queue.remove(second)
    assert (len(queue), queue.num_tokens) == (0, 0)
