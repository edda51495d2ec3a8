"""The queue of waiting requests."""

from collections import OrderedDict
from collections.abc import Iterator

from .request import Request


class RequestQueue:
    """First come, first served; preempted requests come back to the head.

    Bounded by who adds: the engine's front takes no more requests than it has slots.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.num_tokens = 0
        """Of all requests here: none is computed, but for those that loaded blocks."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.num_tokens += request.num_tokens

    def prepend(self, request: Request) -> None:
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def note_growth(self, num_tokens: int) -> None:
        """A request here has so many tokens more."""
        self.num_tokens += num_tokens

    def peek(self) -> Request | None:
        """The head, if there is one."""
        return next(iter(self), None)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= request.num_tokens
