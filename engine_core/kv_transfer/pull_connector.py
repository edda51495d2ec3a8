"""The connector for disaggregated prefill and decode: the reader pulls blocks that their owner has leased to it.

A pull takes these steps. The front of the decode engine acquires the lease (``services/engine/kv/kv_loads.py``) and
adds the request with the blocks of the owner as its target. The scheduler allocates blocks for what the prefix cache
lacks, and :meth:`PullConnector.update_state_after_alloc` orders their load; the request waits meanwhile. The KV thread
copies them through a transport and asks for the owner's verdict (:mod:`.block_loads`). The request runs once the load
has ended: what it lacks then is computed here.
"""

from collections.abc import Callable, Sequence
from typing import overload

from ..data.embedding_rows import content_salt
from ..data.kv_groups import NULL_BLOCK
from ..data.kv_messages import REQUEST_ENDED, KVTarget
from ..data.request import RequestKV
from ..data.scheduler_output import SchedulerOutput
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.state_slots import StateSlotPool
from .block_loads import LoadOrder, LoadResult
from .failpoints import Failpoints
from .kv_connector import KVConnectorMetadata, KVConnectorOutput, KVConnectorStats
from .kv_service import KVService
from .kv_transport import KVPool
from .leases import Lease, prompt_digest


class PullMetadata(KVConnectorMetadata):
    """Lists the transfers of one step."""

    loads: list[LoadOrder]
    ready: list[tuple[Lease, int]]
    """Leases of the requests in this step, and how many of their tokens are computed when it is done."""


class _Generations(Sequence[int]):
    """Shows those of blocks and slots by their ids in transfers. Other threads read them."""

    def __init__(self, blocks: BlockPool, slots: BlockPool) -> None:
        self._blocks, self._slots = blocks.generations, slots.generations

    def __len__(self) -> int:
        return len(self._blocks) + len(self._slots)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [*self._blocks, *self._slots][index]
        num_blocks = len(self._blocks)
        return self._blocks[index] if index < num_blocks else self._slots[index - num_blocks]


class PullConnector:
    """Implements :class:`tokenloom.engine_core.kv_transfer.kv_connector.KVConnector` with a :class:`KVService`."""

    def __init__(self, service: KVService, block_size: int, failpoints: Failpoints) -> None:
        self._service = service
        self._leases = service.leases
        self._block_size = block_size
        self._failpoints = failpoints
        self._prefills: dict[str, tuple[RequestKV, Lease]] = {}
        """Requests that run under a lease."""
        self._loading: dict[str, RequestKV] = {}
        self._orders: list[LoadOrder] = []  # of this step
        self._results: list[LoadResult] = []
        self._pool: KVPool | None = None
        self._num_groups = 1

    # Scheduler side

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        self._leases.generations = pool.generations if states is None else _Generations(pool, states.pool)
        self._num_groups = pool.num_groups

    def share(self, identity: bytes) -> None:
        pass

    def get_num_new_matched_tokens(self, request: RequestKV, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.remote is None or (target := request.remote.target) is None or request.parked is not None:
            return 0, False
        if (num_tokens := target.num_tokens - num_computed_tokens) > 0:
            return num_tokens, True
        self._forget_target(request)
        return 0, False

    def update_state_after_alloc(self, request: RequestKV, block_ids: list[int], num_external_tokens: int) -> None:
        if (remote := request.remote) is None:
            return
        if num_external_tokens and remote.target is not None:
            self._order_load(request, remote.target, block_ids, num_external_tokens)
        elif remote.lease_id and not remote.is_waiting:
            salt = content_salt(request.cache_salt, request.prompt_embeds, request.media)
            num_tokens, bound = request.num_tokens, request.all_token_ids
            if remote.num_lent:  # its last tokens are not known yet
                num_tokens, bound = remote.num_lent, bound[: remote.num_bound]
            # At the start of the prefill and not at its end: the reader acquires the lease while the prompt is still
            # computed.
            digest = prompt_digest(bound, salt)
            lease = self._leases.grant(remote.lease_id, request.request_id, block_ids, num_tokens, digest)
            self._prefills[request.request_id] = request, lease

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PullMetadata | None:
        if not self._prefills and not self._orders:
            return None
        scheduled = scheduler_output.num_scheduled_tokens
        ready = [
            # The lease object and not the request's id: a preempted request may have another lease when this step's
            # result arrives. No more than the tokens that are known: drafts may be wrong.
            (lease, min(request.num_computed_tokens, request.num_tokens))
            for request_id, (request, lease) in self._prefills.items()
            if request_id in scheduled
        ]
        loads, self._orders = self._orders, []
        return PullMetadata(loads, ready)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving:
            if (request := self._loading.pop(request_id, None)) is not None and request.remote is not None:
                request.remote.target = None

    def request_preempted(self, request: RequestKV) -> None:
        if self._prefills.pop(request.request_id, None) is not None:
            # One that was lent goes on here: its reader waits for tokens that do not come, and nothing failed.
            is_lent = request.remote is not None and request.remote.num_lent > 0
            self._drop_lease(request.request_id, REQUEST_ENDED if is_lent else "lease_revoked")

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        self._forget_target(request)
        if (prefill := self._prefills.pop(request.request_id, None)) is None:
            return False
        if is_prefilled and request.state is not None and request.state.lent_slot >= 0:
            self._drop_lease(request.request_id, "lease_revoked")  # no step has written the state after its tokens
        elif is_prefilled:
            # The token after them was sampled. With steps in flight the last of them was not known when it was planned.
            self._leases.publish(prefill[1], prefill[1].num_tokens)
            self._service.leases_changed()
            is_kept = self._leases.keep(request.request_id)
            self._service.on_wake()  # the lease's time starts now, and the KV thread may be asleep
            return is_kept and not self._failpoints.fires("blocks_reused")
        else:
            self._drop_lease(request.request_id, REQUEST_ENDED)
        return False

    def request_aborted(self, request_id: str) -> None:
        self._leases.drop_unacquired(request_id)

    def revoke_oldest(self) -> str | None:
        return self._leases.revoke_oldest()

    def shorten_oldest_lease(self) -> None:
        self._leases.shorten_oldest_lease()
        self._service.on_wake()

    def num_leases(self) -> int:
        return len(self._leases)

    # Worker side

    def register_kv_caches(self, pool: KVPool) -> None:
        self._pool = pool
        self._service.register(pool)

    def save_overwritten_kv(self, metadata: KVConnectorMetadata) -> None:
        pass

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, PullMetadata)
        for order in metadata.loads:
            self._service.start_load(order)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, PullMetadata)
        if metadata.ready and self._pool is not None:
            # Writes of a GPU's step are queued, not done: another process would read what was there before.
            self._pool.settle()
        for lease, tokens_ready in metadata.ready:
            self._leases.publish(lease, tokens_ready)
        if metadata.ready:
            self._service.leases_changed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self._service.results
        self._results = [results.popleft() for _ in range(len(results))]
        return self._leases.take_freed(), {result.request_id for result in self._results}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block_id for result in self._results if result.failure is not None for block_id in result.block_ids}

    def get_kv_connector_stats(self) -> KVConnectorStats:
        stats = KVConnectorStats()
        for result in self._results:
            if result.failure is None and self._pool is not None:
                stats.add_received(result.transport, result.block_ids, self._pool)
            elif result.failure:
                stats.failures[result.request_id] = result.failure
        return stats

    def has_updates(self) -> bool:
        return self._service.has_updates()

    def on_update(self, callback: Callable[[], None]) -> None:
        self._service.on_update = callback

    def shutdown(self) -> None:
        self._service.close()

    def _order_load(self, request: RequestKV, target: KVTarget, block_ids: list[int], num_tokens: int) -> None:
        assert request.remote is not None
        # This core decides what is missing, not the Acquire call before it: only the scheduler knows its prefix cache
        # at the moment of admission.
        first = (target.num_tokens - num_tokens) // self._block_size * self._num_groups
        positions: Sequence[int] = range(first, len(target.block_ids))
        if self._num_groups > 1:
            positions = [position for position in positions if block_ids[position] != NULL_BLOCK]
        order = LoadOrder(
            request_id=request.request_id,
            target=target,
            positions=positions,
            block_ids=[block_ids[position] for position in positions],
            block_size=self._block_size,
            is_complete=not request.remote.awaits_tokens,
            num_groups=self._num_groups,
        )
        self._loading[request.request_id] = request
        self._orders.append(order)

    def _forget_target(self, request: RequestKV) -> None:
        if request.remote is not None and request.remote.target is not None:
            request.remote.target = None
            self._service.give_up(request.request_id)

    def _drop_lease(self, request_id: str, reason: str) -> None:
        self._leases.drop(request_id, reason)
        self._service.leases_changed()
