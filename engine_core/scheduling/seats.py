"""Shares the seats of a batch between tenants: each running request takes one, and there are ``max_num_seqs``."""

from collections import Counter
from collections.abc import Iterable

from .request import Request


class LiveTenants:
    """Counts the live requests of each tenant, so that an engine with a single tenant spends nothing on shares."""

    def __init__(self) -> None:
        self._num_requests: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of tenants that have a live request."""
        return len(self._num_requests)

    def add(self, request: Request) -> None:
        """Count a request that is live from now on."""
        self._num_requests[request.tenant] = self._num_requests.get(request.tenant, 0) + 1

    def remove(self, request: Request) -> None:
        """Stop counting a request, which has ended."""
        if self._num_requests[request.tenant] == 1:
            del self._num_requests[request.tenant]
        else:
            self._num_requests[request.tenant] -= 1


def count_seats(requests: Iterable[Request]) -> Counter[str]:
    """Return the number of requests by tenant."""
    return Counter(request.tenant for request in requests)


def seat_to_take_back(running: list[Request], seats: Counter[str], head: Request) -> Request | None:
    """Return the running request that should give its seat to ``head``; None if ``head`` should wait until one ends.

    It is the newest request of the tenant with the most seats, if that tenant has at least two more than the tenant of
    ``head``. So each change makes the shares more equal, and seats do not go back and forth between waiting tenants.
    """
    tenant, most = seats.most_common(1)[0]
    if most < seats[head.tenant] + 2:
        return None
    newest = next((request for request in reversed(running) if request.tenant == tenant), None)
    if newest is None or newest.priority < head.priority:
        return None
    # A request whose last token is in flight gives its seat up anyway; one that reads no cached blocks would have to be
    # computed again from its first token.
    return None if newest.will_be_full or newest.skip_reading_prefix_cache else newest
