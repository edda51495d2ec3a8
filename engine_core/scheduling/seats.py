"""Shares a batch between tenants: its seats, of which each running request takes one, and the time of its steps. Shares
that time between prompts and requests that decode, too."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tokenloom.request.limits import TenantTurns

from ..data.request import Request

# Of a row with 20 log probabilities, logits are computed, sorted and sent on, and each of 21 tokens becomes text in
# another process: 12 such prompts of 1,500 tokens made another tenant's median answer take 3.9 s instead of 0.15.
ROW_COST = 7
"""Prompt tokens that cost as much as the log probabilities of one."""


def cost_per_token(request: Request) -> int:
    """Return what a prompt token of the request costs, in tokens without log probabilities."""
    return 1 if request.sampling_params.prompt_logprobs is None else 1 + ROW_COST


# Beside one or two requests, chunks that took the time of a step of theirs cost a prompt of 900 tokens 20 ms of its
# first token and helped the others little.
_DELAY = 0.06
"""Seconds by which a step's prompt tokens may always delay the next tokens of all decoding requests together."""
_AT_ONCE = 8
"""A step of prompts alone may take so many times the time of a step without any, which is mostly that of reading the
weights: what such a step costs beyond its tokens is then less than an eighth of it."""
_UNLIMITED = 1 << 62
_WEIGHT = 1 / 8


# With chunks of 72 to 128 tokens, because these delay each token by 80 ms, the last first token of 32 prompts of 128
# tokens at once came after 7.6 s; with large steps after 4.7 s, but a prompt of 2,000 tokens then stops all streams for
# two seconds. By slowdowns it comes after 4.7 s, half of the others sooner than with either, and of 16 short prompts
# beside two of 4,000 tokens the last one begins after 1.8 s instead of 6.2 (tests/engine_core/step_shares.py).
class PromptShare:
    """Learns what prompts and decode steps cost, and shares steps between prompts and requests that decode.

    A prompt's slowdown is how many times as long as alone it takes until its first token, at best. In a step, each
    prompt may slow down those that decode as much as it is slowed down itself: the prompts of a burst, which have to
    wait for each other, take one large step; a long prompt beside few others takes half of the time.

    Attributes:
        least: Prompt tokens of a step while costs are unknown; half of them are always allowed.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.most_at_once = _UNLIMITED
        """Tokens of a step that computes one prompt alone: so few that requests that arrive meanwhile wait for a short
        step, and so many that each token costs no more than in a longer one. Unlimited while costs are unknown."""
        self._rate = 0.0  # prompt tokens a second
        self._seconds = 0.0  # of steps without prompts

    def observe(self, num_tokens: int, seconds: float, *, beside_others: bool = False) -> None:
        """Learn from a step with ``num_tokens`` of prompts that has ended. ``beside_others``: other requests decoded in
        it. A few prompt tokens say nothing, because such a step takes the time of reading the weights."""
        if seconds <= 0:
            return
        if not num_tokens:
            self._seconds += _WEIGHT * (seconds - self._seconds) if self._seconds else seconds
        elif 2 * num_tokens >= self.least:
            if beside_others:
                seconds = max(seconds - self._seconds, seconds / 2)
            rate = num_tokens / seconds
            self._rate += _WEIGHT * (rate - self._rate) if self._rate else rate
        if self._rate and self._seconds:
            self.most_at_once = max(self.least, int(_AT_ONCE * self._rate * self._seconds))

    # In steps of 100 to 200 tokens the last of 32 prompts of 128 tokens began 8 % later than in steps of 400 to 700: a
    # step costs d seconds more than its tokens. With k steps a burst whose tokens cost T seconds brings the mean first
    # token after (T + T/k + (k + 1) d) / 2 and the last one after T + k d; the sum is least in steps of sqrt(3 T d)
    # seconds. The time of a step without prompts stands for d.
    def most_of_burst(self, prompts: Sequence[Request]) -> int:
        """Return the tokens of a step of prompts alone while these wait or have begun: :attr:`most_at_once`, or as many
        as minimize the sum of the mean and the last time to a first token of a burst. Long prompts do not count as a
        burst: a short one that arrives meanwhile overtakes them, and would have to wait for the whole step."""
        most = self.most_at_once
        num_tokens = sum(missing for each in prompts if (missing := each.num_missing_tokens) <= 2 * most)
        return max(most, int(math.sqrt(3 * num_tokens * self._rate * self._seconds)))

    def most_beside_others(self) -> int:
        """Return the prompt tokens of one tenant that a step may compute beside another one that decodes: as many as
        take the time of a step without any, so that each of the two has half of the time."""
        return max(self.least // 2, int(self._rate * self._seconds), 1)

    def by_slowdown(self, prompts: Iterable[Request], now: int) -> list[Request]:
        """Return ``prompts`` in the order in which they are computed: within a priority, first the one that has waited
        longest for what it costs. So short ones overtake long ones, until these have waited for long, too.

        ``now``: nanoseconds on the clock of the arrivals.
        """
        return sorted(prompts, key=lambda each: (each.priority, (each.times.arrival_ns - now) / self._alone(each)))

    def num_tokens(self, num_decoding: int, prompts: Sequence[Request], now: int, full_at: int = 0) -> int:
        """Return the prompt tokens of a step beside ``num_decoding`` requests (at least 1).

        ``prompts``: those that wait or have begun, in the order of :meth:`by_slowdown`; ``now`` as there. ``full_at``:
        when requests waited for a seat or for blocks last, on that clock. Such a wait is not made up for by larger
        steps: under overload each prompt would stop all streams.
        """
        if not self._rate or not self._seconds:
            return self.least * max(num_decoding, len(prompts)) // num_decoding
        rate = self._rate
        num_tokens = num_before = 0
        for request in prompts:
            num_missing = request.num_missing_tokens
            num_before += num_missing
            waited = (now - max(request.times.arrival_ns, full_at)) / 1e9
            until_first = waited + self._seconds + num_before / rate
            slowdown = max(until_first / self._alone(request), 1.0)
            allowed = int(slowdown * self._seconds * rate)
            # No small rest takes one step more, in which the first token waits for the others' tokens.
            num_tokens += num_missing if num_missing <= 2 * allowed else allowed
        return max(-(-self.least // 2), int(rate * _DELAY / num_decoding), num_tokens)

    def _alone(self, request: Request) -> float:
        """Return the seconds until a request's first token if it had the engine for itself; while costs are unknown, in
        some other unit."""
        num_tokens = max(request.num_tokens - request.kv.num_cached_tokens, 1)
        return self._seconds + num_tokens / (self._rate or 1.0)


class PromptTurns:
    """Deals the prompt tokens of each step out to tenants: first to the one that was given the least, among those whose
    prompts are the most urgent.

    So a short prompt is computed in the step after it came, whatever prompts of other tenants wait, and two tenants
    with long prompts get every second step each.
    """

    def __init__(self) -> None:
        self._turns = TenantTurns()

    def deal(
        self, budget: int, running: Iterable[Request], heads: Iterable[Request], beside_others: int | None = None
    ) -> Counter[str]:
        """Return what the prompt tokens of each tenant may cost in a step; see :func:`cost_per_token`.

        Args:
            budget: Tokens of the step.
            running: Requests that take part. Those that miss more than one token compute a prompt.
            heads: The next waiting requests of each tenant. Those behind them share what is left over.
            beside_others: What a tenant's prompts with log probabilities may cost beside a prompt of a tenant that asks
                for none; None: nothing limits them.
        """
        needs_of: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by priority
        costly = set()
        for request in running:
            if (num_missing := request.num_missing_tokens) > 1:
                needs_of[request.priority][request.tenant] += num_missing * (cost := cost_per_token(request))
                if cost > 1:
                    costly.add(request.tenant)
            else:
                budget -= 1
        waiting = set()
        for head in heads:
            needs_of[head.priority][head.tenant] += max(head.num_missing_tokens, 1) * (cost := cost_per_token(head))
            waiting.add(head.tenant)
            if cost > 1:
                costly.add(head.tenant)
        tenants = {tenant for needs in needs_of.values() for tenant in needs}
        for tenant in tenants:
            self._turns.wait(tenant)
        grants: Counter[str] = Counter()
        for _, needs in sorted(needs_of.items()):
            budget -= self._deal_equals(budget, needs, grants)
        self._turns.forget(tenants)
        for tenant in waiting:
            grants[tenant] += budget
        # The first token of another tenant waits for the step that runs now. If the step with its prompt were full of
        # costly prompts too, it would wait for two full steps.
        if beside_others is not None and any(grants[tenant] > 0 for tenant in tenants - costly):
            for tenant in costly:
                grants[tenant] = min(grants[tenant], beside_others)
        return grants

    def _deal_equals(self, budget: int, needs: Counter[str], grants: Counter[str]) -> int:
        """Deal out to prompts of one priority; return how much."""
        left = sorted(needs, key=lambda tenant: (needs[tenant], tenant))  # among equals, a short prompt is first
        num_dealt = 0
        while num_dealt < budget and (served := self._turns.next(left)) is not None:
            left.remove(served)
            granted = min(needs[served], budget - num_dealt)
            grants[served] += granted
            num_dealt += granted
            self._turns.start(served, granted)
            self._turns.stop(served)
        return num_dealt


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
