"""Who of the waiting may begin."""

from typing import NamedTuple

from ..config import SchedulerConfig
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_transfer.remote_kv import RemoteKV
from .request import Request, RequestStatus
from .request_queue import RequestQueue


class _Blocked(NamedTuple):
    """The head of the queue when it did not fit."""

    request: Request
    num_free: int
    num_hits: int


class Admission:
    """The head of the queue is let in when its tokens fit into the KV cache; nobody gets past it."""

    def __init__(
        self, queue: RequestQueue, kv: KVCacheManager, remote: RemoteKV | None, config: SchedulerConfig
    ) -> None:
        self._queue = queue
        self._kv = kv
        self._remote = remote
        self._chunked = config.enable_chunked_prefill
        self._reserve_full_prompt = config.reserve_full_prompt
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        # Blocks that are left to those already running, so that their next tokens do not preempt the newcomer.
        self._watermark = int(kv.pool.num_blocks * config.watermark)
        self._blocked: _Blocked | None = None

    def next(self, max_tokens: int, *, others_run: bool, only_begun: bool = False) -> Request | None:
        """Takes the next request that may run out of the queue, with the blocks that hold its beginning.

        On the way, requests whose KV is elsewhere are sent to wait for it. None: nobody may run with ``max_tokens``
        left of the step. ``only_begun``: nobody but who ran before and was preempted.
        """
        while (request := self._head_begun() if only_begun else self._queue.peek()) is not None:
            if request.num_output_placeholders:  # it comes back with a token that it drew before it was preempted
                return None
            if others_run and self._is_still_blocked(request):
                return None
            hits = [] if request.block_ids else self._kv.find_cached_blocks(request)
            num_computed_tokens = request.num_computed_tokens or len(hits) * self._kv.block_size
            num_external_tokens = self._num_external_tokens(request, num_computed_tokens)
            if num_external_tokens is None:
                return None
            if not num_external_tokens and self._remote is not None and self._remote.awaits_tokens(request):
                self._queue.remove(request)
                self._remote.wait(request)
                continue
            num_left = request.num_tokens - num_computed_tokens - num_external_tokens
            if num_left > max_tokens and not self._chunked:
                return None
            num_tokens = request.num_tokens
            if not self._reserve_full_prompt and request.remote is None and not num_external_tokens:
                num_tokens = num_computed_tokens + min(num_left, max_tokens, self._max_chunk)
            if not self._kv.can_admit(request, hits, num_tokens, self._num_spare_blocks(others_run=others_run)):
                if not others_run and self._make_room():
                    continue
                self._blocked = _Blocked(request, self._kv.pool.num_free, len(hits))
                return None
            self._let_in(request, hits)
            if not num_external_tokens:
                return request
            assert self._remote is not None
            self._remote.load(request, num_external_tokens)
        return None

    def _head_begun(self) -> Request | None:
        return next((request for request in self._queue if request.status is RequestStatus.PREEMPTED), None)

    def _let_in(self, request: Request, hits: list[int]) -> None:
        self._blocked = None
        self._queue.remove(request)
        if not request.block_ids:
            self._kv.admit(request, hits)

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether nothing got better since the head of the queue did not fit, so that looking again is of no use."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self._kv.pool.num_free <= blocked.num_free
            and self._kv.find_cached_block(request, blocked.num_hits) is None
        )

    def _num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load after those that are here; None: not known yet. Not again for one that loaded already."""
        if self._remote is None or request.block_ids:
            return 0
        if request.skip_reading_prefix_cache and not request.is_decode_leg:
            return 0
        return self._remote.num_external_tokens(request, num_computed_tokens)

    def _num_spare_blocks(self, *, others_run: bool) -> int:
        """How many blocks the next request must leave to others."""
        return self._watermark if others_run or (self._remote is not None and self._remote.holds_blocks) else 0

    def _make_room(self) -> bool:
        """Nobody runs. Where nobody loads either, none will give blocks back: takes what is held without need.

        Blocks that are leased come when their readers have them, or after a while: two engines whose requests all wait
        for each other's leases would else wait for ever.
        """
        if self._remote is None or self._remote.holds_blocks:
            return False
        holder = next((request for request in reversed(list(self._queue)) if request.block_ids), None)
        if holder is None:
            self._remote.connector.want_room()
            return False
        self._kv.free(holder)  # what it loaded can be hit until somebody needs the blocks
        return True
