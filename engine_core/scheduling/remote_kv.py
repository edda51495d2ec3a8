"""The scheduler's part in moving KV: requests that wait for blocks, and blocks held after their requests have ended."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection

from ..data.kv_messages import ENDS_SOON, REQUEST_ENDED
from ..data.messages import EngineCoreOutput, SchedulerStats
from ..data.request import RemoteKVState, Request, RequestKV, RequestStatus
from ..kv_cache.kv_manager import KVManager
from ..kv_transfer.kv_connector import KVConnectorOutput, KVConnectorScheduler, KVConnectorStats

_LENT_TOKENS = 8
"""A request that is lent goes on for so many tokens here, while its reader acquires the lease and copies."""
# A block of a model whose steps take 10 ms is copied within one: over shared memory at 3 GB/s, 2 MiB take 0.7 ms.
_BLOCKS_A_TOKEN = 8
"""And for one more for each of so many of its blocks."""


class RemoteKV:
    """Owns the requests in ``WAITING_FOR_REMOTE_KVS`` and calls the connector.

    Waiting requests are not in the scheduler's queue. They are never preempted, because their blocks are being written.
    """

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv: KVManager,
        policy: str,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``policy``: as in ``KVConfig``."""
        connector.bind_block_pool(kv.pool, kv.states)
        self.connector = connector
        self._kv = kv
        self._fail = policy == "fail"
        self._clock = clock
        self.waits_beside = False
        """Whether the request that was asked about last, if the answer is not known yet, can wait beside the queue."""
        self._waiting: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        """Loads in progress, including those of ended requests, whose blocks stay allocated until the load ends."""
        self._held: dict[str, RequestKV] = {}
        """Blocks of ended requests that other engines may read."""
        self._blocks_received = 0
        self._bytes_received: Counter[str] = Counter()
        self._recomputes: Counter[str] = Counter()
        self.on_kept: Callable[[EngineCoreOutput], object] = _ignore
        """Called with the output that says that a request which was lent stays."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[Request]:
        """The requests that wait for their blocks or first tokens."""
        return self._waiting.values()

    @property
    def holds_blocks(self) -> bool:
        """Whether waiting requests or loads hold blocks that will be freed."""
        return bool(self._loading) or any(request.kv.block_ids for request in self._waiting.values())

    @property
    def num_holders(self) -> int:
        """How many requests load, or have ended and are read by other engines."""
        return len(self._loading) + len(self._held)

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return the number of tokens to load after the first ``num_computed_tokens``; None if not known yet."""
        num_tokens, self.waits_beside = self.connector.get_num_new_matched_tokens(request.kv, num_computed_tokens)
        return num_tokens

    def wait_for_answer(self, request: Request) -> None:
        """Make a request wait beside the queue until it is known what can be loaded."""
        remote = request.kv.remote = request.kv.remote or RemoteKVState()
        remote.num_external_tokens = 0  # those of an earlier load are gone with its blocks
        self._loading[request.request_id] = request
        self.wait(request)

    def load(self, request: Request, num_external_tokens: int) -> None:
        """Start to load the blocks of an admitted request, which waits until then."""
        remote = request.kv.remote = request.kv.remote or RemoteKVState()
        remote.num_external_tokens = num_external_tokens
        self._kv.reserve_load(request.kv, num_external_tokens)
        self._loading[request.request_id] = request
        self.wait(request)
        table = self._kv.load_table(request.kv, request.kv.num_computed_tokens + num_external_tokens)
        self.connector.update_state_after_alloc(request.kv, table, num_external_tokens)

    def wait(self, request: Request) -> None:
        """Make a request wait for its blocks or for its first tokens."""
        assert request.kv.remote is not None
        request.kv.remote.resume_status = request.status
        request.kv.remote.waiting_since_ns = self._clock()
        request.kv.remote.is_waiting = True
        request.set_status(RequestStatus.WAITING_FOR_REMOTE_KVS)
        self._waiting[request.request_id] = request

    def starts(self, request: Request, num_new_tokens: int) -> list[EngineCoreOutput]:
        """Prepare an admitted request that is about to run. A leased one gets all its blocks, so that a reader can know
        them. If its prefill takes several steps, return an output that announces the lease, as its KV may be read."""
        is_leased = request.kv.remote is not None and bool(request.kv.remote.lease_id)
        table = self._kv.reserve(request.kv) if is_leased else request.kv.block_ids
        self.connector.update_state_after_alloc(request.kv, table, 0)
        is_first = request.times.first_scheduled_ns is None
        # A prompt of one step is complete before a reader could begin, so its decode leg is placed after the prefill,
        # when the load of the engines is known better.
        if not (is_leased and is_first and num_new_tokens < request.num_tokens - request.kv.num_computed_tokens):
            return []
        index, num_tokens = request.num_output_tokens, request.num_tokens
        return [EngineCoreOutput(request.request_id, [], index, kv_granted_tokens=num_tokens)]

    def may_lend(self, request: Request) -> bool:
        """Return whether a running request generates, is not lent, and has enough tokens left to be."""
        is_lent = request.kv.remote is not None and bool(request.kv.remote.lease_id)
        generates = request.num_output_tokens > 0 and request.pooling_params is None
        return generates and not is_lent and self._num_lent(request) + 1 < request.max_num_tokens

    def _num_lent(self, request: Request) -> int:
        """Return how many tokens a request will have when it is handed over, if it is lent now."""
        num_tokens = request.num_tokens + request.num_output_placeholders
        return num_tokens + _LENT_TOKENS + num_tokens // self._kv.block_size // _BLOCKS_A_TOKEN

    def room_of(self, request: Request) -> int:
        """Return the tokens of the blocks that a request takes elsewhere, if it is lent now."""
        size = self._kv.block_size
        return math.ceil((self._num_lent(request) + 1) / size) * size  # and the token that is computed there first

    def lend(self, request: Request, lease_id: bytes, num_bound: int) -> str | EngineCoreOutput:
        """Let another engine go on with a running request. It runs on here for a few tokens, while the other one copies
        its KV, and ends as PREFILLED. Returns the output that announces the lease, or why the request stays.

        ``num_bound``: its first tokens, by which the reader proves that it wants them.
        """
        kv = request.kv
        if kv.remote is not None and kv.remote.lease_id:
            return "another engine goes on with it already"
        num_lent = self._num_lent(request)
        # As of a prefill, the token after those of the lease is sampled here.
        if num_lent + 1 >= request.max_num_tokens:
            return ENDS_SOON
        if (table := self._kv.lend(kv, num_lent)) is None:
            return "its next tokens have no room that could be promised"
        remote = kv.remote = kv.remote or RemoteKVState()
        remote.lease_id, remote.num_lent, remote.num_bound = lease_id, num_lent, num_bound
        remote.own_limit = request.max_num_tokens
        request.max_num_tokens, request.limit_status = num_lent + 1, RequestStatus.FINISHED_PREFILLED
        self.connector.update_state_after_alloc(kv, table, 0)
        return EngineCoreOutput(request.request_id, [], request.num_output_tokens, kv_granted_tokens=num_lent)

    def keep(self, request: Request) -> None:
        """Let a running request that was lent go on here, as if it had not been; for any other one nothing happens."""
        remote = request.kv.remote
        if remote is None or not remote.num_lent:
            return
        self.connector.request_preempted(request.kv)  # which ends the lease
        self._kv.end_lending(request.kv)
        remote.lease_id, remote.num_lent = b"", 0
        request.max_num_tokens, request.limit_status = remote.own_limit, RequestStatus.FINISHED_LENGTH_CAPPED
        self.on_kept(EngineCoreOutput(request.request_id, [], request.num_output_tokens, is_kept=True))

    def preempted(self, request: Request) -> None:
        """Note that a running request is about to lose its blocks."""
        if request.kv.remote is not None and request.kv.remote.num_lent:
            self.keep(request)
        else:
            self.connector.request_preempted(request.kv)

    def update(self, output: KVConnectorOutput) -> list[Request]:
        """Process ended transfers. Returns the requests that need not wait any more, in order of arrival."""
        self.connector.update_connector_output(output)
        for request_id in sorted(output.finished_sending):  # sets have another order in each process
            self._release(request_id)
        self._count(output.stats)
        received = [request_id for request_id in sorted(output.finished_recving) if request_id in self._loading]
        ended = [self._loading.pop(request_id) for request_id in received]
        ready = [request for request in ended if self._end_load(request, output)]
        return sorted(ready, key=lambda request: request.times.arrival_ns)

    def tokens_accepted(self, request: Request) -> bool:
        """Note that a waiting request's tokens have arrived. Returns whether it can run or still loads."""
        if request.request_id in self._loading:
            return False
        self._resume(request)
        return True

    def request_finished(self, request: Request) -> bool:
        """Note that a request has ended. Returns whether its blocks must not be freed yet."""
        self._waiting.pop(request.request_id, None)
        is_prefilled = request.status is RequestStatus.FINISHED_PREFILLED
        is_held = self.connector.request_finished(request.kv, request.kv.block_ids, is_prefilled=is_prefilled)
        if is_held:
            self._held[request.request_id] = request.kv
        return is_held or request.request_id in self._loading

    def revoke_oldest(self) -> bool:
        """Free the blocks that have been held longest for other engines. Returns False if none are held."""
        if (request_id := self.connector.revoke_oldest()) is None:
            return False
        self._release(request_id)
        return True

    def failure_of(self, request: Request) -> str:
        """Return why a request must end because its blocks could not be loaded; empty if it continues."""
        if not self._fail or request.kv.remote is None or request.kv.remote.failure in ("", REQUEST_ENDED):
            return ""
        return f"the prompt's KV could not be loaded from the engine that computed it: {request.kv.remote.failure}"

    def lose_hits(self) -> None:
        """Discard what waiting requests found in the cache or load; they will compute it."""
        for request in self._waiting.values():
            assert request.kv.remote is not None
            request.kv.remote.hits_lost = True

    def lose_rows(self) -> None:
        """Note that the worker has forgotten all waiting requests."""
        for request in self._waiting.values():
            assert request.kv.remote is not None
            request.kv.remote.resume_status = RequestStatus.WAITING

    def fill_stats(self, stats: SchedulerStats) -> None:
        """Add the counters and gauges of KV transfers."""
        stats.num_running += len(self._waiting)
        stats.kv_blocks_received = self._blocks_received
        stats.kv_bytes_received = dict(self._bytes_received)
        stats.kv_recomputes = dict(self._recomputes)
        stats.num_leases = self.connector.num_leases()

    def _end_load(self, request: Request, output: KVConnectorOutput) -> bool:
        """Return whether the request need not wait any more."""
        # The transport may have written to the blocks until now, so they could not be freed when the request ended.
        if request.is_finished:
            self._kv.free(request.kv)
            return False
        remote = request.kv.remote
        assert remote is not None
        num_valid = self._num_valid_tokens(request, remote, output.invalid_block_ids)
        if num_valid < request.kv.num_computed_tokens + remote.num_external_tokens:
            remote.failure = output.stats.failures.get(request.request_id, "transport")
            if remote.awaits_tokens or not self._kv.keeps_partial_loads:
                self._kv.free(request.kv)  # it may wait for a long time
                num_valid = 0
        remote.num_external_tokens = max(0, num_valid - request.kv.num_computed_tokens)
        if remote.awaits_tokens and not self.failure_of(request):
            return False
        self._resume(request)
        return True

    def _num_valid_tokens(self, request: Request, remote: RemoteKVState, invalid_block_ids: set[int]) -> int:
        num_tokens = request.kv.num_computed_tokens + remote.num_external_tokens
        if not remote.num_external_tokens:
            return num_tokens  # it has waited for the answer of what there is, and has no blocks and no slot yet
        for index, block_id in enumerate(self._kv.load_table(request.kv, num_tokens)):
            if block_id in invalid_block_ids:
                # Blocks behind the first bad one may be good, and are of no use: attention needs every token before
                # them. A state is of no use without all of its tokens, nor are they without it.
                is_partial = self._kv.states is None
                return min(num_tokens, index // self._kv.pool.num_groups * self._kv.block_size) if is_partial else 0
        return num_tokens

    def _resume(self, request: Request) -> None:
        remote = request.kv.remote
        assert remote is not None
        if remote.hits_lost:
            remote.hits_lost = False
            self._kv.free(request.kv)
        elif request.kv.block_ids:
            # The last token is always computed here, because its logits give the next token.
            num_tokens = request.kv.num_computed_tokens + remote.num_external_tokens
            if num_tokens < request.num_tokens or self._kv.states is None:
                self._kv.finish_load(request.kv, min(num_tokens, request.num_tokens - 1))
            else:
                self._kv.free(request.kv)  # its logits do not follow from the state after it
        del self._waiting[request.request_id]
        remote.is_waiting = False
        remote.wait_ns += self._clock() - remote.waiting_since_ns
        request.set_status(remote.resume_status)

    def _release(self, request_id: str) -> None:
        if (held := self._held.pop(request_id, None)) is not None:
            self._kv.free(held, held.session)

    def _count(self, stats: KVConnectorStats) -> None:
        self._blocks_received += stats.blocks_received
        self._bytes_received.update(stats.bytes_received)
        self._recomputes.update(reason for reason in stats.failures.values() if reason != REQUEST_ENDED)


def _ignore(_: EngineCoreOutput) -> None:
    """Do nothing."""
