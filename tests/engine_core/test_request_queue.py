from tests.engine_core.helpers import make_request
from tokenloom.engine_core.request import Request
from tokenloom.engine_core.request_queue import RequestQueue


def request(request_id: str, num_tokens: int = 1) -> Request:
    return Request(make_request(request_id, [0] * num_tokens), 100, 0)


def ids(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_first_come_first_served() -> None:
    queue = RequestQueue()
    for request_id in "abc":
        queue.append(request(request_id))
    assert queue.peek().request_id == "a"
    assert ids(queue) == ["a", "b", "c"]


def test_prepending_goes_before_everybody() -> None:
    queue = RequestQueue()
    queue.append(request("a"))
    queue.prepend(request("b"))
    assert ids(queue) == ["b", "a"]


def test_tokens_are_counted() -> None:
    queue = RequestQueue()
    first, second = request("a", 3), request("b", 4)
    queue.append(first)
    queue.prepend(second)
    assert (len(queue), queue.num_tokens) == (2, 7)
    queue.remove(first)
    assert (ids(queue), queue.num_tokens) == (["b"], 4)
    queue.remove(second)
    assert (len(queue), queue.num_tokens) == (0, 0)
