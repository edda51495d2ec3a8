"""The connector that moves KV blocks into and out of the pool, with the names and the call order of vLLM V1.

Scheduler side: get_num_new_matched_tokens → allocate → update_state_after_alloc → build_connector_meta → (step) →
update_connector_output → request_finished. Worker side, each step: save_overwritten_kv → start_load_kv → (forward) →
wait_for_save → get_finished → get_block_ids_with_load_errors → get_kv_connector_stats.

Every load runs next to the steps, on the connector's own threads, while its request is in ``WAITING_FOR_REMOTE_KVS``.
Blocks are saved per step, not per layer, because calls per layer pay off only if a layer takes longer than a call.

Steps may overlap: with async scheduling a step is planned while the one before it runs. That one may still write to
blocks that were freed since it was planned, and what it computes can already be hit, freed and evicted. So

- a load, which may fill such blocks, starts when no step before the one that it was planned with runs any more;
- a block whose content such a step computes is not saved when it is evicted;
- other engines may read what a step wrote when that step has ended, not an earlier or a later one. Therefore each call
  of the worker side names its step by passing the step's metadata.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..data.request import RequestKV
from ..data.scheduler_output import SchedulerOutput
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.state_slots import StateSlotPool
from .kv_transport import KVPool


class KVConnectorMetadata(msgspec.Struct):
    """Base of the data that a connector's scheduler side passes to its worker side for one step."""


class KVConnectorStats(msgspec.Struct):
    """Counts the transfers since the last step."""

    blocks_received: int = 0
    """Blocks that were loaded and are valid."""
    bytes_received: dict[str, int] = {}
    """Bytes of those blocks by transport."""
    failures: dict[str, str] = {}
    """Reasons of failed loads by request, each one of ``LEASE_ENDS``."""

    def add_received(self, transport: str, ids: Sequence[int], pool: KVPool) -> None:
        """Count a load into these blocks and slots that used ``transport``."""
        self.blocks_received += sum(each < pool.num_blocks for each in ids)
        self.bytes_received[transport] = self.bytes_received.get(transport, 0) + pool.nbytes_of(ids)


class KVConnectorOutput(msgspec.Struct):
    """Describes the transfers that ended since the last step."""

    finished_sending: set[str]
    """Ended requests whose blocks no other engine reads any more."""
    finished_recving: set[str]
    """Requests whose load has ended, successfully or not. Nothing writes to their blocks any more."""
    invalid_block_ids: set[int]
    """Blocks of those requests that could not be loaded."""
    stats: KVConnectorStats


class KVConnectorScheduler(Protocol):
    """The side of the connector that decides. Called from the thread that steps."""

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        """Called first: gives the pool whose block generations and evictions the connector may follow, and the slots of
        states; None: no layer keeps one."""

    def share(self, identity: bytes) -> None:
        """Use blocks of engines with this identity from now on, a digest of weights, numerics and what else decides the
        content of blocks, and give them those of this engine. Empty, as at first: it is not known which weights the
        model has, or they are about to change, and no block may be shared by its name.

        Called when the pool is allocated, and whenever no request runs.
        """

    def get_num_new_matched_tokens(self, request: RequestKV, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first ``num_computed_tokens`` (cache hits) can be loaded, and whether they
        are loaded next to the steps, which is True unless there is nothing to load.

        None as the first value means that the answer is not known yet. With True, the request waits beside the queue
        until ``get_finished`` names it as received, and is asked about again; otherwise it stays at the head of the
        queue, and is asked about at the next step or after ``on_update``.
        """

    def update_state_after_alloc(self, request: RequestKV, block_ids: list[int], num_external_tokens: int) -> None:
        """Called with the whole block table of a request that loads (``num_external_tokens`` > 0) or starts to run, and
        behind it with its slot: the ids are those of transfers, as in :class:`.KVPool`."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """Return the data for the worker side; None if there is nothing to do. Called once per step, even if empty."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process what the worker side reported."""

    def request_preempted(self, request: RequestKV) -> None:
        """Called when a running request is about to lose its blocks; it will start again."""

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        """Called when a request has ended. Returns whether its blocks are held until it is in ``finished_sending``.

        ``is_prefilled``: whether its prompt is computed and another engine continues its output.
        """

    def request_aborted(self, request_id: str) -> None:
        """Called when a request that ended before was aborted: blocks held for it may be freed."""

    def revoke_oldest(self) -> str | None:
        """End the oldest hold of blocks to make room. Returns its request; None if nothing is held."""

    def shorten_oldest_lease(self) -> None:
        """Note that a request waits for the blocks of the oldest hold; they arrive as ``finished_sending``."""

    def num_leases(self) -> int:
        """Return the number of open leases."""


class HoldsNothing:
    """Base of connectors that hold no block for another engine: what holds need does nothing here."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def request_preempted(self, request: RequestKV) -> None:
        pass

    def request_aborted(self, request_id: str) -> None:
        pass

    def revoke_oldest(self) -> str | None:
        return None

    def shorten_oldest_lease(self) -> None:
        pass

    def num_leases(self) -> int:
        return 0


class KVConnectorWorker(Protocol):
    """The side of the connector that moves bytes. Called from the thread that steps; no method waits for a transfer.

    ``metadata`` is what :meth:`KVConnectorScheduler.build_connector_meta` returned for the step.
    """

    def register_kv_caches(self, pool: KVPool) -> None:
        """Called once, when the pool is allocated."""

    def save_overwritten_kv(self, metadata: KVConnectorMetadata) -> None:
        """Called before the forward pass: copy the blocks that the step, or one of its loads, is about to overwrite."""

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Called when no step before this one runs any more: start the loads."""

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        """Called after the forward pass: other engines may read what it wrote from now on."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return ``finished_sending`` and ``finished_recving`` since the last call."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that the loads of the same ``get_finished`` failed to fill."""

    def get_kv_connector_stats(self) -> KVConnectorStats:
        """Return the counts for the same ``get_finished``."""

    def has_updates(self) -> bool:
        """Return whether ``get_finished`` would return something."""

    def on_update(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, whenever a transfer has ended, because the step loop may be waiting."""

    def shutdown(self) -> None:
        """End all transfers and threads. Idempotent."""


class KVConnector(KVConnectorScheduler, KVConnectorWorker, Protocol):
    """Both sides of a connector, for a scheduler and a worker in one process."""


class StepTransfers:
    """Makes the worker side's calls for one step."""

    def __init__(self, connector: KVConnector, scheduled: SchedulerOutput) -> None:
        """Save what the step will overwrite."""
        self._connector = connector
        self._metadata = connector.build_connector_meta(scheduled)
        self._are_loads_started = False
        if self._metadata is not None:
            connector.save_overwritten_kv(self._metadata)

    def start_loads(self) -> None:
        """Start the loads when no step before this one runs any more. Does nothing when called again."""
        if self._metadata is not None and not self._are_loads_started:
            # Blocks that were freed under a step in flight are safe from the next step, which runs after it, and not
            # from a copy, which runs beside it.
            self._are_loads_started = True
            self._connector.start_load_kv(self._metadata)

    def step_ended(self) -> None:
        """Let other engines read what the step wrote."""
        if self._metadata is not None:
            self._connector.wait_for_save(self._metadata)


def take_updates(connector: KVConnector, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
    """Return the transfers that ended since the last call; None if none did."""
    if not connector.has_updates():
        return None
    sent, received = connector.get_finished(set(scheduled.finished_req_ids))
    invalid = connector.get_block_ids_with_load_errors()
    return KVConnectorOutput(sent, received, invalid, connector.get_kv_connector_stats())
