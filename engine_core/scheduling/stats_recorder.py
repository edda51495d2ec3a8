"""Counts what happens to requests in the scheduler, and attaches their events to their outputs."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ..data.config import CacheConfig, SchedulerConfig
from ..data.messages import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, PrefillStats, SchedulerStats
from ..data.request import MAX_PREEMPTIONS, Request
from ..kv_cache.block_pool import BlockPool
from .live_requests import WaitingRequests


class StatsRecorder:
    """Is called when the state of a request changes, never for each token. Counters grow over the core's life."""

    def __init__(self, clock: Callable[[], int], cache: CacheConfig, config: SchedulerConfig) -> None:
        """``clock`` returns nanoseconds."""
        self.log_events = config.log_events
        self._clock = clock
        self._enable_prefix_caching = cache.enable_prefix_caching
        self._counters = SchedulerStats()
        # Of live requests, since their last output.
        self._events: dict[str, list[EngineCoreEvent]] = {}

    def queued(self, request: Request) -> None:
        """Record the event of a request that arrived at ``arrival_ns``."""
        self._note(request, EngineCoreEventType.QUEUED, request.times.arrival_ns)

    def started(self, request: Request) -> None:
        """Record that a request is about to run, for the first time or again, with the cached tokens it found."""
        now = self._clock()
        if self.log_events:
            self._note(request, EngineCoreEventType.SCHEDULED, now)
        counters = self._counters
        if request.times.first_scheduled_ns is None:
            request.times.first_scheduled_ns = now
            # Accepted tokens of an earlier attempt are looked up too, but only the prompt is counted.
            num_cached = request.kv.num_cached_tokens = min(request.kv.num_computed_tokens, request.num_prompt_tokens)
            remote = request.kv.remote
            num_external = min(remote.num_external_tokens, num_cached) if remote is not None else 0
            request.kv.num_external_cached_tokens = num_external
            if self._enable_prefix_caching and not request.kv.skip_reading_prefix_cache:
                counters.prefix_cache_queries += request.num_prompt_tokens
                counters.prefix_cache_hits += num_cached - num_external
            if remote is not None and not remote.lease_id:
                counters.external_prefix_cache_queries += request.num_prompt_tokens - (num_cached - num_external)
                counters.external_prefix_cache_hits += num_external

    def preempted(self, request: Request) -> None:
        """Record that a request lost its blocks."""
        self._counters.num_preemptions += 1
        times = request.times
        times.preempted_at = (*times.preempted_at, request.num_output_tokens)[:MAX_PREEMPTIONS]
        if self.log_events:
            self._note(request, EngineCoreEventType.PREEMPTED, self._clock())

    def prefill_stats(self, request: Request) -> PrefillStats:
        """Count a request whose first token was just sampled, and return the statistics of its prefill."""
        assert request.times.first_scheduled_ns is not None
        self._counters.num_prefilled_requests += 1
        self._counters.num_prefilled_tokens += request.num_prompt_tokens
        return PrefillStats(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.kv.num_cached_tokens,
            queued_ns=request.times.first_scheduled_ns - request.times.arrival_ns - request.kv.wait_ns,
            prefill_ns=self._clock() - request.times.first_scheduled_ns,
            num_external_cached_tokens=request.kv.num_external_cached_tokens,
        )

    def stepped(self, num_tokens: int) -> None:
        """Record the tokens of a step."""
        self._counters.num_computed_tokens += num_tokens

    def stats(self, waiting: WaitingRequests, running: Sequence[Request], pool: BlockPool) -> SchedulerStats:
        """Return the counters, and gauges of the requests and blocks as they are now."""
        return msgspec.structs.replace(
            self._counters,
            num_waiting=len(waiting),
            num_running=len(running),
            num_waiting_tokens=waiting.num_tokens,
            num_prefilling_tokens=_prefilling_tokens(running),
            kv_usage=pool.usage,
            num_free_blocks=pool.num_free // pool.num_groups,
        )

    def attach_events(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Move the events of each request since its last output into its output."""
        if self._events:
            for output in outputs:
                if (events := self._events.pop(output.request_id, None)) is not None:
                    output.events = events

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the events of requests that end without an output."""
        if self._events:
            for request_id in request_ids:
                self._events.pop(request_id, None)

    def _note(self, request: Request, kind: EngineCoreEventType, timestamp_ns: int) -> None:
        self._events.setdefault(request.request_id, []).append(EngineCoreEvent(kind, timestamp_ns))


def _prefilling_tokens(running: Sequence[Request]) -> int:
    """Return the prompt tokens of running requests that are not computed yet. The last of them began last, so the first
    one from the end whose prompt is complete ends the search: this is called after each step."""
    num_tokens = 0
    for request in reversed(running):
        left = request.num_prompt_tokens - request.kv.num_computed_tokens
        if left <= 0:
            break
        num_tokens += left
    return num_tokens
