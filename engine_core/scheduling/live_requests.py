"""Keeps the live requests: those that run, and those that wait, of each tenant with the same adapter in the order of
the policy; decides which of the waiting ones may begin."""

import bisect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from ..data.config import SchedulerConfig
from ..data.request import Request, RequestStatus
from ..kv_cache.kv_manager import KVManager
from .adapters import Adapters
from .media_rows import RowStore
from .remote_kv import RemoteKV


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
        num_costly: Those with log probabilities of their prompts, which make a step longer than its tokens say.
        waiting: Those in the queue.
        running: Those that have a row in the worker, in the order of the policy. It is always the same list.
        media: The rows of their images, and those that wait for rows; None if the model reads text only.
    """

    def __init__(self, *, by_priority: bool, media: RowStore | None = None) -> None:
        """``by_priority``: whether priorities order the requests, instead of their arrival."""
        self.media = media
        self.by_id: dict[str, Request] = {}
        self.are_several = False
        self.num_costly = 0
        self._num_of_tenant: dict[str, int] = {}
        self.waiting = WaitingRequests(PriorityQueue if by_priority else FCFSQueue)
        self.running: list[Request] = []
        self._by_priority = by_priority

    def add(self, request: Request) -> None:
        """Add a request, which is in no queue yet."""
        self.by_id[request.request_id] = request
        self._num_of_tenant[request.tenant] = self._num_of_tenant.get(request.tenant, 0) + 1
        self.are_several = len(self._num_of_tenant) > 1
        self.num_costly += request.sampling_params.prompt_logprobs is not None

    def remove(self, request: Request) -> None:
        """Remove a request that has ended; the caller takes it out of its queue."""
        del self.by_id[request.request_id]
        if self._num_of_tenant[request.tenant] == 1:
            del self._num_of_tenant[request.tenant]
        else:
            self._num_of_tenant[request.tenant] -= 1
        self.are_several = len(self._num_of_tenant) > 1
        self.num_costly -= request.sampling_params.prompt_logprobs is not None
        if self.media is not None and request.kv.media:
            self.media.drop(request)

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


class _Blocked(NamedTuple):
    """Describes the head of the queue at the time when it did not fit."""

    request: Request
    num_free: int
    num_free_states: int
    num_coming: int
    num_hits: int


class Admission:
    """Admits the head of the queue when its tokens fit into the KV cache. No request overtakes the head, unless that
    waits for a slot for its LoRA adapter.

    Attributes:
        seats: Requests that run, or load KV, by tenant. The caller sets it before it calls :meth:`next` in a step, and
            then it is kept up to date. None while not more than one tenant has requests.
        expired: Requests that were taken out of the queue because their time has run out; the caller ends them.
        lost: Requests that were taken out of the queue because their adapter is gone; the caller ends them.
        is_crowded: Whether the head was left because the step has too little room for an image that one step must
            compute. The caller resets it.
    """

    def __init__(
        self,
        live: LiveRequests,
        kv: KVManager,
        remote: RemoteKV | None,
        config: SchedulerConfig,
        clock: Callable[[], int],
        adapters: Adapters | None = None,
    ) -> None:
        """``clock`` returns nanoseconds. ``adapters``: None if no request may name one."""
        self._queue = live.waiting
        self._media = live.media
        self._adapters = adapters
        self._kv = kv
        self._remote = remote
        self._chunked = config.enable_chunked_prefill
        self._reserve_full_prompt = config.reserve_full_prompt
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        # Free blocks kept for the running requests, so that their next tokens do not preempt the new one.
        self._watermark = int(kv.pool.num_blocks * config.watermark)
        self._blocked: _Blocked | None = None
        self.seats: Counter[str] | None = None
        self.is_crowded = False
        self.expired: list[Request] = []  # bounded by the queue; the scheduler empties both in each step
        self.lost: list[Request] = []
        self._clock = clock

    def next(self, max_tokens: int, room: int, *, others_run: bool, only_begun: bool = False) -> Request | None:
        """Remove the next request that may run from the queue, and give it the blocks that hold its beginning.

        Requests at the head whose KV is on another engine, or that lack rows of images, are sent to wait for these.
        Returns None if no request may run with ``max_tokens`` left in the step, or ``room`` for an image that is
        computed at once. A request whose time has run out is not computed. ``only_begun`` admits only requests that
        were preempted.
        """
        find_head = self._head_begun if only_begun else self.head if self._adapters is not None else self._queue.peek
        while (request := find_head(self.seats)) is not None:
            if self._adapters is not None and self._adapters.is_lost(request):
                self._queue.remove(request)
                self.lost.append(request)
                continue
            # A request with a placeholder comes back with a token that was sampled before it was preempted.
            # The token in flight may end the request, and its row cannot be built anew before the token is known.
            if request.num_output_placeholders or (others_run and self._is_still_blocked(request)):
                return None
            # Here and not in a step: under overload the oldest requests are the latest ones, and prefilling them would
            # make those behind them late as well.
            if request.times.deadline_ns and request.times.deadline_ns <= self._clock():
                self._queue.remove(request)
                self.expired.append(request)
                continue
            hits = [] if request.kv.block_ids else self._kv.find_cached_blocks(request.kv)
            num_here = self._kv.num_hit_tokens(hits, request.kv) if hits else request.kv.num_computed_tokens
            num_external = 0 if self._remote is None else self._num_external_tokens(request, num_here)
            if num_external is None:
                assert self._remote is not None
                if not self._remote.waits_beside:
                    return None
                self._queue.remove(request)  # those behind it need not wait for a store
                self._remote.wait_for_answer(request)
                continue
            if not num_external and request.kv.remote is not None and request.kv.remote.awaits_tokens:
                assert self._remote is not None
                self._queue.remove(request)
                self._remote.wait(request)
                continue
            if request.kv.media and not num_external:
                if not self._has_rows(request, num_here):
                    continue
                if self._lacks_room(request, num_here, room):
                    self.is_crowded = True
                    return None
            if not self._chunked and request.num_tokens - num_here - num_external > max_tokens:
                return None
            if self._kv.states is not None and self._kv.states.fewest_tokens(request.kv, num_here) > max_tokens:
                return None
            num_tokens = request.num_tokens
            if num_external:
                num_tokens = max(num_tokens, num_here + num_external)
            elif not self._reserve_full_prompt and request.kv.remote is None:
                num_tokens = min(num_tokens, num_here + min(max_tokens, self._max_chunk))
            if self._admit(request, hits, num_tokens, num_external, others_run=others_run):
                if not num_external:
                    return request
                assert self._remote is not None
                self._remote.load(request, num_external)
            elif others_run or not self._make_room():
                # While others run, their end frees blocks. With nothing running, only leases and loaded prefixes can,
                # and waiting for them would be waiting for ever.
                self._blocked = _Blocked(
                    request, self._kv.pool.num_free, self._num_free_states, self._num_coming, len(hits)
                )
                return None
        return None

    @property
    def is_blocked(self) -> bool:
        """Whether the head did not fit beside those that run, and nothing has improved since."""
        blocked = self._blocked
        return blocked is not None and not blocked.request.is_finished and self._is_still_blocked(blocked.request)

    def head(self, seats: Counter[str] | None) -> Request | None:
        """Return the request that may begin next, as far as slots for adapters go. ``seats`` as in :meth:`next`."""
        if self._adapters is None:
            return self._queue.peek(seats)
        return self._adapters.choose(self._queue.heads(seats))

    def _head_begun(self, seats: Counter[str] | None) -> Request | None:
        """Return the request that may begin next among those that were preempted, whatever the ``seats``."""
        begun = (request for request in self._queue if request.status is RequestStatus.PREEMPTED)
        return next(begun, None) if self._adapters is None else self._adapters.choose(list(begun))

    def _has_rows(self, request: Request, num_here: int) -> bool:
        """Return whether a request with images has the rows to begin at a token; otherwise it waits for them."""
        assert self._media is not None, "a model that reads text only got images"
        if self._media.cross_rows:
            request.kv.lacks_cross = self._kv.lacks_cross(request.kv)
        if self._media.may_begin(request, num_here):
            return True
        self._queue.remove(request)
        # Blocks that it has loaded can still be hit, and others may need them before the rows are here.
        if request.kv.block_ids:
            self._kv.free(request.kv)
        self._media.park(request)
        return False

    def _lacks_room(self, request: Request, num_here: int, room: int) -> bool:
        """Return whether a request begins among tokens that see each other and that the step cannot hold."""
        assert self._media is not None
        return self._media.chunk_end(request.kv, num_here, num_here + 1, num_here + room) == num_here

    def _admit(
        self, request: Request, hits: list[int], num_tokens: int, num_external: int, *, others_run: bool
    ) -> bool:
        """Take a request out of the queue, with the cached blocks it shares, if ``num_tokens`` of its tokens fit."""
        keeps_spare = others_run or (self._remote is not None and self._remote.holds_blocks)
        if not self._kv.can_admit(request.kv, hits, num_tokens, self._watermark if keeps_spare else 0, num_external):
            return False
        self._blocked = None
        self._queue.remove(request)
        if self.seats is not None:
            self.seats[request.tenant] += 1
        if self._adapters is not None:
            self._adapters.begins(request)
        if not request.kv.block_ids:
            self._kv.admit(request.kv, hits)
        return True

    @property
    def _num_free_states(self) -> int:
        states = self._kv.states
        return 0 if states is None else states.pool.num_free

    @property
    def _num_coming(self) -> int:
        states = self._kv.states
        return 0 if states is None else states.num_coming

    def _is_still_blocked(self, request: Request) -> bool:
        """Return whether nothing has improved since the head of the queue did not fit."""
        # A full pool is the normal state under load: without this, each step would hash and search the head's prompt
        # again.
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self._kv.pool.num_free <= blocked.num_free
            and self._num_free_states <= blocked.num_free_states
            # With the last slots taken, the state that it waited for was not kept, and nothing else would change.
            and self._num_coming >= blocked.num_coming
            and not self._kv.finds_more(request.kv, blocked.num_hits)
        )

    def _num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after those here can be loaded; None if that is not known yet.

        A request that has loaded once does not load again.
        """
        parked = request.kv.parked
        if self._remote is None or request.kv.block_ids:
            return 0
        if parked is not None and parked.num_tokens == num_computed_tokens:
            return 0
        skips = request.kv.skip_reading_prefix_cache or request.routed_rows is not None
        if skips and not request.kv.is_decode_leg:
            return 0
        return self._remote.num_external_tokens(request, num_computed_tokens)

    def _make_room(self) -> bool:
        """Take blocks back from waiting requests when no request runs or loads, so that none would free any.

        Leased blocks become free when their readers have them, or after a while. Without this, two engines whose
        requests all wait for each other's leases would wait forever.
        """
        if self._remote is None or self._remote.holds_blocks:
            return False
        holder = next((request for request in reversed(list(self._queue)) if request.kv.block_ids), None)
        if holder is None:
            # The oldest lease ends after a sixth of its time: its reader may be about to copy, and two engines that
            # wait for each other's leases must not wait for ever.
            self._remote.connector.shorten_oldest_lease()
            return False
        self._kv.free(holder.kv)  # what it loaded can be hit until the blocks are needed
        return True
