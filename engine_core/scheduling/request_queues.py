"""Keeps the live requests: those that run, and those that wait, of each tenant with the same adapter in the order of
the policy."""

import bisect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain

from ..data.request import Request, RequestStatus


def priority_key(request: Request) -> tuple[int, int, str]:
    """Return a key to sort by priority: the smallest runs first, the largest is preempted first."""
    return request.priority, request.times.arrival_ns, request.request_id


class FCFSQueue(OrderedDict[str, Request]):
    """Keeps requests by id, in the order in which they may begin; a request that comes back goes to the head."""

    def append(self, request: Request) -> None:
        """Add a new request."""
        self[request.request_id] = request

    def prepend(self, request: Request) -> None:
        """Add a request that has waited before, here or for something else."""
        self[request.request_id] = request
        self.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the head. The queue is not empty."""
        return next(iter(self.values()))

    def remove(self, request: Request) -> None:
        """Remove a request that is here."""
        del self[request.request_id]


class PriorityQueue(list[Request]):
    """Offers the same as :class:`FCFSQueue`, sorted by :func:`priority_key`.

    It is a list, because a heap would have to be searched for a request that is aborted.
    """

    def append(self, request: Request) -> None:
        bisect.insort(self, request, key=priority_key)

    prepend = append

    def peek(self) -> Request:
        return self[0]

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self, priority_key(request), key=priority_key)
        assert self[index] is request
        del self[index]

    def values(self) -> Iterator[Request]:
        """Yield the requests in order."""
        return iter(self)


class WaitingRequests:
    """Keeps all waiting requests, each tenant's in a queue of its own, and therein those of each adapter.

    It is bounded by the callers: the engine's front accepts no more requests than it has slots.
    """

    def __init__(self, queue_type: type[FCFSQueue] | type[PriorityQueue] = FCFSQueue) -> None:
        # By tenant and adapter; none is empty.
        self._queues: defaultdict[tuple[str, bytes], FCFSQueue | PriorityQueue] = defaultdict(queue_type)
        self._num_requests = 0
        self.num_tokens = 0
        """The tokens of all requests here, which have no computed tokens, except those that loaded blocks."""

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(queue.values() for queue in self._queues.values())

    @property
    def tenants(self) -> Collection[str]:
        """The tenants that have a request here."""
        return {tenant for tenant, _ in self._queues}

    def append(self, request: Request) -> None:
        """Add a new request."""
        self._queues[request.tenant, request.adapter].append(request)
        self._num_requests += 1
        self.num_tokens += request.num_tokens

    def prepend(self, request: Request) -> None:
        """Add a request that has waited before, here or for something else: before the others of its tenant, unless the
        policy sorts it."""
        self._queues[request.tenant, request.adapter].prepend(request)
        self._num_requests += 1
        self.num_tokens += request.num_tokens

    def peek(self, seats: Mapping[str, int] | None) -> Request | None:
        """Return the request that may begin next, or None if none waits.

        Among the tenants whose heads have the lowest priority value, it is the head of the tenant with the fewest
        ``seats``; among equals, the one that arrived first. So a head waits only for heads that arrived before it, once
        no request of its own tenant runs any more: no request waits for ever. ``seats`` is needed for several tenants.
        """
        queues = self._queues
        if len(queues) < 2:
            return next(iter(queues.values())).peek() if queues else None
        assert seats is not None, "several tenants wait"
        return min((queue.peek() for queue in queues.values()), key=_in_turn(seats))

    def heads(self, seats: Mapping[str, int] | None) -> list[Request]:
        """Return the first request of each tenant and adapter, in the order in which :meth:`peek` would choose them."""
        return sorted((queue.peek() for queue in self._queues.values()), key=_in_turn(seats or Counter()))

    def remove(self, request: Request) -> None:
        """Remove a request that is here."""
        owner = request.tenant, request.adapter
        queue = self._queues[owner]
        queue.remove(request)
        if not queue:
            del self._queues[owner]
        self._num_requests -= 1
        self.num_tokens -= request.num_tokens


def _in_turn(seats: Mapping[str, int]) -> Callable[[Request], tuple[int, int, int, str]]:
    """Return a key that sorts the heads of queues by who begins next."""
    return lambda head: (head.priority, seats[head.tenant], head.times.arrival_ns, head.request_id)


class LiveRequests:
    """Owns the requests that have not ended. No other code changes which of them run.

    Attributes:
        by_id: All of them.
        are_several: Whether at least two tenants have a live request. An engine with a single tenant spends nothing on
            shares.
        waiting: Those in the queue.
        running: Those that have a row in the worker, in the order of the policy. It is always the same list.
    """

    def __init__(self, *, by_priority: bool) -> None:
        """``by_priority``: whether priorities order the requests, instead of their arrival."""
        self.by_id: dict[str, Request] = {}
        self.are_several = False
        self._num_of_tenant: dict[str, int] = {}
        self.waiting = WaitingRequests(PriorityQueue if by_priority else FCFSQueue)
        self.running: list[Request] = []
        self._by_priority = by_priority

    def add(self, request: Request) -> None:
        """Add a request, which is in no queue yet."""
        self.by_id[request.request_id] = request
        self._num_of_tenant[request.tenant] = self._num_of_tenant.get(request.tenant, 0) + 1
        self.are_several = len(self._num_of_tenant) > 1

    def remove(self, request: Request) -> None:
        """Remove a request that has ended; the caller takes it out of its queue."""
        del self.by_id[request.request_id]
        if self._num_of_tenant[request.tenant] == 1:
            del self._num_of_tenant[request.tenant]
        else:
            self._num_of_tenant[request.tenant] -= 1
        self.are_several = len(self._num_of_tenant) > 1

    def run(self, request: Request) -> None:
        """Add a request that is in no queue to those that run."""
        if self._by_priority:
            bisect.insort(self.running, request, key=priority_key)
        else:
            self.running.append(request)

    def take_out(self, request: Request) -> None:
        """Remove a request from those that run or from the queue, whichever has it; none has one that waits for
        something else."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)

    def drop_ended(self) -> None:
        """Remove the requests that ended while they ran."""
        self.running[:] = [request for request in self.running if not request.is_finished]

    def take_running(self) -> list[Request]:
        """Let no request run. Returns those that did, the last one first: each goes to the head of its queue."""
        taken = self.running[::-1]
        self.running.clear()
        return taken
