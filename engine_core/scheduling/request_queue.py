"""The queue of waiting requests, in one order or the other."""

import bisect
import enum
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from .request import Request


class SchedulingPolicy(enum.StrEnum):
    """Who goes first (names as in vLLM)."""

    FCFS = "fcfs"
    """Who came first; preempted requests before all others."""
    PRIORITY = "priority"
    """Lowest ``priority``; among equals who came first."""


def priority_key(request: Request) -> tuple[int, int, str]:
    """Sorts by priority: the smallest runs first, the largest is preempted first."""
    return request.priority, request.arrival_ns, request.request_id


class RequestQueue(Protocol):
    """Waiting requests, iterated in the order in which they may begin.

    Bounded by who adds: the engine's front takes no more requests than it has slots.
    """

    num_tokens: int
    """Of all requests here: none is computed, but for those that loaded blocks."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def append(self, request: Request) -> None:
        """It is new."""

    def prepend(self, request: Request) -> None:
        """It has waited before, for this or for something else."""

    def note_growth(self, num_tokens: int) -> None:
        """A request here has so many tokens more."""

    def peek(self) -> Request | None:
        """The head, if there is one."""

    def remove(self, request: Request) -> None:
        """It is here."""


class FCFSQueue:
    """First come, first served; what comes back goes to the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.num_tokens = 0

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
        self.num_tokens += num_tokens

    def peek(self) -> Request | None:
        return next(iter(self), None)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= request.num_tokens


class PriorityQueue:
    """Sorted by :func:`priority_key`, whoever comes when. A heap would have to be searched for who is aborted."""

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

    def prepend(self, request: Request) -> None:
        self.append(request)

    def note_growth(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def peek(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._requests, priority_key(request), key=priority_key)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_tokens -= request.num_tokens


def make_queue(policy: SchedulingPolicy) -> RequestQueue:
    return PriorityQueue() if policy is SchedulingPolicy.PRIORITY else FCFSQueue()
