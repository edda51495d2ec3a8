"""Decides which requests may enter the queue of waiting requests, and which of those may begin."""

import enum
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from ..data.config import SchedulerConfig
from ..data.request import Request, RequestStatus
from ..kv_cache.kv_cache_manager import KVManager
from .adapters import Adapters
from .remote_kv import RemoteKV
from .request_queues import WaitingRequests


class SchedulingPolicy(enum.StrEnum):
    """Names the order in which requests run (names as in vLLM)."""

    FCFS = "fcfs"
    """First come, first served; preempted requests before all others."""
    PRIORITY = "priority"
    """The lowest ``priority`` first; among equals first come, first served."""


def check_config(config: SchedulerConfig, max_model_len: int, *, speculates: bool = False) -> None:
    """Raise ``ValueError``, naming the setting, for limits under which the scheduler could stop making progress."""
    if speculates and config.async_scheduling:
        raise ValueError(
            "speculative_config cannot be used with async_scheduling: a step would be scheduled before it is known how "
            "many drafts of the step before it are right; turn one of them off"
        )
    if config.max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {config.max_num_seqs}; it must be at least 1")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}: "
            "a step could not serve every running request"
        )
    if config.policy not in list(SchedulingPolicy):
        raise ValueError(f"policy {config.policy!r} is unknown; use one of {', '.join(SchedulingPolicy)}")
    if config.long_prefill_token_threshold < 0:
        raise ValueError(
            f"long_prefill_token_threshold is {config.long_prefill_token_threshold}; it must be positive, or 0 for no "
            "limit"
        )
    if config.long_prefill_token_threshold and not config.enable_chunked_prefill:
        raise ValueError("long_prefill_token_threshold needs chunked prefill")
    if not 0 <= config.watermark < 1:
        raise ValueError(f"watermark is {config.watermark}; it must be a share of the blocks: at least 0 and below 1")
    if config.prefill_tokens_beside_decode is not None and config.prefill_tokens_beside_decode < 1:
        raise ValueError(
            f"prefill_tokens_beside_decode is {config.prefill_tokens_beside_decode}; it must be at least 1"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"without chunked prefill max_num_batched_tokens ({config.max_num_batched_tokens}) "
            f"must reach max_model_len ({max_model_len})"
        )


def refusal(request: Request, policy: SchedulingPolicy, kv: KVManager, max_model_len: int, *, moves_kv: bool) -> str:
    """Return why a request can never run; empty if it can."""
    if request.priority and policy is not SchedulingPolicy.PRIORITY:
        return f"priority is {request.priority}, but the engine's scheduling policy is {policy}"
    if request.kv.remote is not None and not moves_kv:
        return "this engine does not exchange KV with others"
    if not request.num_prompt_tokens:
        return "prompt is empty"
    if request.num_prompt_tokens >= max_model_len and request.pooling_params is None:
        return (
            f"prompt has {request.num_prompt_tokens} tokens; "
            f"with at least one of output the context holds {max_model_len}"
        )
    # The last token's KV is never computed.
    if request.max_num_tokens - 1 > kv.num_slots:
        return f"prompt and max_tokens need {request.max_num_tokens - 1} KV slots; the engine has {kv.num_slots}"
    return ""


class _Blocked(NamedTuple):
    """Describes the head of the queue at the time when it did not fit."""

    request: Request
    num_free: int
    num_hits: int


class Admission:
    """Admits the head of the queue when its tokens fit into the KV cache. No request overtakes the head, unless that
    waits for a slot for its LoRA adapter.

    Attributes:
        seats: Requests that run, or load KV, by tenant. The caller sets it before it calls :meth:`next` in a step, and
            then it is kept up to date. None while not more than one tenant has requests.
        expired: Requests that were taken out of the queue because their time has run out; the caller ends them.
        lost: Requests that were taken out of the queue because their adapter is gone; the caller ends them.
    """

    def __init__(
        self,
        queue: WaitingRequests,
        kv: KVManager,
        remote: RemoteKV | None,
        config: SchedulerConfig,
        clock: Callable[[], int],
        adapters: Adapters | None = None,
    ) -> None:
        """``clock`` returns nanoseconds. ``adapters``: None if no request may name one."""
        self._queue = queue
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
        self.expired: list[Request] = []  # bounded by the queue; the scheduler empties both in each step
        self.lost: list[Request] = []
        self._clock = clock

    def next(self, max_tokens: int, *, others_run: bool, only_begun: bool = False) -> Request | None:
        """Remove the next request that may run from the queue, and give it the blocks that hold its beginning.

        Requests at the head whose KV is on another engine are sent to wait for it. Returns None if no request may run
        with ``max_tokens`` left in the step. A request whose time has run out is not computed. ``only_begun`` admits
        only requests that were preempted.
        """
        find_head = self._head_begun if only_begun else self.head if self._adapters is not None else self._queue.peek
        while (request := find_head(self.seats)) is not None:
            if self._adapters is not None and self._adapters.is_lost(request):
                self._queue.remove(request)
                self.lost.append(request)
                continue
            # A request with a placeholder comes back with a token that was drawn before it was preempted.
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
            num_here = self._kv.num_hit_tokens(hits) if hits else request.kv.num_computed_tokens
            num_external = 0 if self._remote is None else self._num_external_tokens(request, num_here)
            if num_external is None:
                return None
            if not num_external and request.kv.remote is not None and request.kv.remote.awaits_tokens:
                assert self._remote is not None
                self._queue.remove(request)
                self._remote.wait(request)
                continue
            if not self._chunked and request.num_tokens - num_here - num_external > max_tokens:
                return None
            num_tokens = request.num_tokens
            if not self._reserve_full_prompt and request.kv.remote is None and not num_external:
                num_tokens = min(num_tokens, num_here + min(max_tokens, self._max_chunk))
            if self._admit(request, hits, num_tokens, num_external, others_run=others_run):
                if not num_external:
                    return request
                assert self._remote is not None
                self._remote.load(request, num_external)
            elif others_run or not self._make_room():
                # While others run, their end frees blocks. With nothing running, only leases and loaded prefixes can,
                # and waiting for them would be waiting for ever.
                self._blocked = _Blocked(request, self._kv.pool.num_free, len(hits))
                return None
        return None

    def head(self, seats: Counter[str] | None) -> Request | None:
        """Return the request that may begin next, as far as slots for adapters go. ``seats`` as in :meth:`next`."""
        if self._adapters is None:
            return self._queue.peek(seats)
        return self._adapters.choose(self._queue.heads(seats))

    def _head_begun(self, seats: Counter[str] | None) -> Request | None:
        """Return the request that may begin next among those that were preempted, whatever the ``seats``."""
        begun = (request for request in self._queue if request.status is RequestStatus.PREEMPTED)
        return next(begun, None) if self._adapters is None else self._adapters.choose(list(begun))

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

    def _is_still_blocked(self, request: Request) -> bool:
        """Return whether nothing has improved since the head of the queue did not fit."""
        # A full pool is the normal state under load: without this, each step would hash and search the head's prompt
        # again.
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self._kv.pool.num_free <= blocked.num_free
            and not self._kv.finds_more(request.kv, blocked.num_hits)
        )

    def _num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after those here can be loaded; None if that is not known yet.

        A request that has loaded once does not load again.
        """
        if self._remote is None or request.kv.block_ids:
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
