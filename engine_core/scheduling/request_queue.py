"""The queue of waiting requests, first come first served or by priority."""

import bisect
import enum
from collections import OrderedDict
from collections.abc import Iterator

from .request import Request


class SchedulingPolicy(enum.StrEnum):
    """Names the order in which requests run (names as in vLLM)."""

    FCFS = "fcfs"
    """First come, first served; preempted requests before all others."""
    PRIORITY = "priority"
    """The lowest ``priority`` first; among equals first come, first served."""


def priority_key(request: Request) -> tuple[int, int, str]:
    """Return a key to sort by priority: the smallest runs first, the largest is preempted first."""
    return request.priority, request.arrival_ns, request.request_id


class FCFSQueue:
    """Keeps waiting requests in the order in which they may begin; a request that comes back goes to the head.

    It is bounded by the callers: the engine's front accepts no more requests than it has slots.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.num_tokens = 0
        """Of all requests here. None is computed, except for requests that loaded blocks."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request
        self.num_tokens += request.num_tokens

    def prepend(self, request: Request) -> None:
        """Add a request that has waited before, here or for something else."""
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        """Return the head, or None if the queue is empty."""
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        """Remove a request that is here."""
        del self._requests[request.request_id]
        self.num_tokens -= request.num_tokens


class PriorityQueue:
    """Offers the same as :class:`FCFSQueue`, sorted by :func:`priority_key`.

    It is a list, because a heap would have to be searched for a request that is aborted.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def append(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=priority_key)
        self.num_tokens += request.num_tokens

    prepend = append

    def peek(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._requests, priority_key(request), key=priority_key)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_tokens -= request.num_tokens


RequestQueue = FCFSQueue | PriorityQueue
