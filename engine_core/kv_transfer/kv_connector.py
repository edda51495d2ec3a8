"""How KV blocks get into the pool, and out, other than by computing them: the connector of vLLM V1.

Its names, and its order of calls. Scheduler side: get_num_new_matched_tokens → allocate → update_state_after_alloc →
build_connector_meta → (step) → update_connector_output → request_finished. Worker side, each step:
bind_connector_metadata → start_load_kv → (forward) → wait_for_save → get_finished → get_block_ids_with_load_errors →
get_kv_connector_stats → clear_connector_metadata.

Every load runs beside the steps, on the connector's own threads, while its request waits in
``WAITING_FOR_REMOTE_KVS``. Whole steps, not layers, are the unit of saving: calls for each layer are only worth their
cost where a layer takes longer than they do.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from ..kv_cache.block_pool import BlockPool
from ..scheduling.request import Request
from ..wire.scheduler_output import SchedulerOutput
from .kv_transport import KVPool


class KVConnectorMetadata(msgspec.Struct):
    """What a connector's scheduler side tells its worker side for one step; each connector has its own."""


class KVConnectorStats(msgspec.Struct):
    """What transfers came to since the last step."""

    blocks_received: int = 0
    """Loaded and valid."""
    bytes_received: dict[str, int] = {}
    """Of those blocks, by transport."""
    failures: dict[str, str] = {}
    """Loads that failed, by request: one of ``KV_FAILURES``."""

    def add_received(self, transport: str, num_blocks: int, block_bytes: int) -> None:
        """Counts a load that came by ``transport``."""
        self.blocks_received += num_blocks
        self.bytes_received[transport] = self.bytes_received.get(transport, 0) + num_blocks * block_bytes


class KVConnectorOutput(msgspec.Struct):
    """What became of transfers since the last step."""

    finished_sending: set[str]
    """Requests that had ended and whose blocks nobody reads any more."""
    finished_recving: set[str]
    """Requests whose load has ended, well or not: nothing writes to their blocks any more."""
    invalid_block_ids: set[int]
    """Blocks that were to be loaded for those requests, and were not."""
    stats: KVConnectorStats


class KVConnectorScheduler(Protocol):
    """The side that decides. Called from the thread that steps."""

    def bind_block_pool(self, pool: BlockPool) -> None:
        """First of all: the pool whose generations, and evictions, this connector may follow."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the first ``num_computed_tokens`` (hits here) can be loaded; whether beside the steps.

        None: not known yet, to be asked again at the next step; ``on_news`` says when. The second is always True
        unless there is nothing to load.
        """

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """The whole block table of a request that is to load (``num_external_tokens`` > 0) or starts to run."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """Once for each step, also an empty one; None: nothing to do."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the worker side reported."""

    def request_preempted(self, request: Request) -> None:
        """A running request is about to lose its blocks, and will start anew."""

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """A request ended, whatever it was doing. True: its blocks are held until it is in ``finished_sending``."""

    def request_aborted(self, request_id: str) -> None:
        """A request that had ended before is not wanted any more: what is held for it may go."""

    def revoke_oldest(self) -> str | None:
        """Makes room: ends the oldest hold of a finished request and names that request; None: there is none."""

    def want_room(self) -> None:
        """A request could use the blocks of the oldest hold, and can wait: they are to come as ``finished_sending``."""

    def num_leases(self) -> int:
        """Promises to others that are open now."""


class KVConnectorWorker(Protocol):
    """The side that moves bytes. Called from the thread that steps; nothing here waits for a transfer."""

    def register_kv_caches(self, pool: KVPool) -> None:
        """Once, when the pool is allocated."""

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """What is to be done in this step."""

    def start_load_kv(self) -> None:
        """Before the forward pass: sets loads going; saves what the step is about to overwrite."""

    def wait_for_save(self) -> None:
        """After the forward pass: what it wrote may be read by others from here on."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """``finished_sending`` and ``finished_recving`` since the last call."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads of the same ``get_finished`` failed to fill."""

    def get_kv_connector_stats(self) -> KVConnectorStats:
        """Of what the same ``get_finished`` reported."""

    def clear_connector_metadata(self) -> None:
        """The step is over."""

    def has_news(self) -> bool:
        """Whether ``get_finished`` would return something."""

    def on_news(self, callback: Callable[[], None]) -> None:
        """``callback`` is called, from any thread, whenever there is news: the loop may be asleep."""

    def shutdown(self) -> None:
        """Ends all transfers and threads. Idempotent."""


class KVConnector(KVConnectorScheduler, KVConnectorWorker, Protocol):
    """Both sides: scheduler and worker live in one process."""


def start_transfers(connector: KVConnector, scheduled: SchedulerOutput) -> None:
    """The worker side's calls before a forward pass."""
    if (metadata := connector.build_connector_meta(scheduled)) is not None:
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv()


def finish_transfers(connector: KVConnector, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
    """The worker side's calls after a step; None: no news."""
    output = None
    if connector.has_news():
        sent, received = connector.get_finished(set(scheduled.finished_req_ids))
        invalid = connector.get_block_ids_with_load_errors()
        output = KVConnectorOutput(sent, received, invalid, connector.get_kv_connector_stats())
    connector.clear_connector_metadata()
    return output
