"""Shares a batch between tenants: its seats, of which each running request takes one, and the time of its steps."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from ..data.request import Request

# One request with n = 128 and 20 log probabilities made another tenant's p99 to the first token 2.7 times as long: they
# take time in the step, in the frames and in each service behind it.
COSTLY_ROWS = 16
"""A tenant's rows with log probabilities make a step, and all that follows it, notably longer from this number on."""


def count_seats(requests: Iterable[Request]) -> Counter[str]:
    """Return the number of requests by tenant."""
    return Counter(request.tenant for request in requests)


def seat_to_take_back(running: list[Request], seats: Counter[str], head: Request) -> Request | None:
    """Return the running request that should give its seat to ``head``; None if ``head`` should wait until one ends.

    It is the newest request of the tenant with the most seats, if that tenant has at least two more than the tenant of
    ``head``. So each change makes the shares more equal, and seats do not go back and forth between waiting tenants.
    """
    tenant, most = seats.most_common(1)[0]
    # Without taking seats back, a tenant that came while 128 samples of another one held all seats got its first token
    # after 7.6 s, with it after 21 ms (steps of 10 ms). With a difference of one, an odd seat would go to and fro.
    if most < seats[head.tenant] + 2:
        return None
    # The newest one has the least to lose. Blocks and tokens of a step are not shared out: a tenant with few large
    # requests has more than its part of those.
    newest = next((request for request in reversed(running) if request.tenant == tenant), None)
    if newest is None or newest.priority < head.priority:
        return None
    # A request whose last token is in flight gives its seat up anyway; one that reads no cached blocks would have to be
    # computed again from its first token.
    return None if newest.will_be_full or newest.kv.skip_reading_prefix_cache else newest


def rows_to_defer(running: Iterable[Request], seats: Counter[str], head: Request) -> frozenset[str]:
    """Return the ids of decoding requests that a step should leave out, so that ``head``, of another tenant with fewer
    seats, gets its first token sooner: those with log probabilities of the tenant that has the most, if it has many.

    Log probabilities take time in the step, in the frames behind it and in each service on the road back, and the first
    token of ``head`` would wait for all of it.
    """
    by_tenant: defaultdict[str, list[str]] = defaultdict(list)
    for request in running:
        if request.sampling_params.logprobs and request.num_missing_tokens <= 1:
            by_tenant[request.tenant].append(request.request_id)
    tenant = max(by_tenant, key=lambda tenant: len(by_tenant[tenant]), default=head.tenant)
    # Rows without log probabilities are never left out: where the weights bound a step, that costs as much and gains
    # nothing.
    if seats[tenant] <= seats[head.tenant] or len(by_tenant[tenant]) < COSTLY_ROWS:
        return frozenset()
    return frozenset(by_tenant[tenant])


def index_to_preempt(running: list[Request], start: int) -> int:
    """Return which of the requests from index ``start`` on gives up its blocks.

    Among the least urgent ones it is the last request of the tenant with the most seats. The request at index 0 is
    chosen only when it is alone, so that it always advances.
    """
    seats = count_seats(running)
    # With 24 long requests over 100 blocks, always taking the last request made 20 tokens of a newcomer's take 71
    # steps; by tenant they take 20.
    least_urgent = running[-1].priority
    candidates = [index for index in range(start, len(running)) if running[index].priority == least_urgent]
    return max(candidates, key=lambda index: (seats[running[index].tenant], index))
