"""Builds the KV connector of a core from its configuration.

Of several connectors the first one that can load a request loads it; all of them save.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenloom.process.plugins import load

from ..data.config import EngineConfig, KVConfig
from ..data.kv_config import store_place
from ..data.request import RequestKV
from ..data.scheduler_output import SchedulerOutput
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.state_slots import StateSlotPool
from .failpoints import Failpoints
from .kv_connector import KVConnector, KVConnectorMetadata, KVConnectorOutput, KVConnectorStats
from .kv_service import KVService
from .kv_transport import KVPool, KVTransport
from .offload_connector import OffloadConnector
from .pull_connector import PullConnector


class MultiMetadata(KVConnectorMetadata):
    """Holds the metadata of each connector, in their order."""

    parts: list[KVConnectorMetadata | None]


class MultiConnector:
    """Implements :class:`tokenloom.engine_core.kv_transfer.kv_connector.KVConnector` with other connectors."""

    def __init__(self, connectors: Sequence[KVConnector]) -> None:
        """``connectors``: in the order in which they are asked to load."""
        self._connectors = list(connectors)
        self._loader: dict[str, int] = {}
        """By request: the connector that offered to load it, until it does or the request has ended."""
        self._holders: dict[str, int] = {}
        """By ended request: how many connectors still hold its blocks."""

    # Scheduler side

    def bind_block_pool(self, pool: BlockPool, states: StateSlotPool | None = None) -> None:
        for connector in self._connectors:
            connector.bind_block_pool(pool, states)

    def get_num_new_matched_tokens(self, request: RequestKV, num_computed_tokens: int) -> tuple[int | None, bool]:
        most, waits = 0, False
        self._loader.pop(request.request_id, None)
        for index, connector in enumerate(self._connectors):
            found, beside = _offer(connector, request, num_computed_tokens, most)
            # Later connectors are not asked: they might offer less than the one whose answer is still on its way.
            if found is None:
                return None, beside
            if found > most:
                most, waits, self._loader[request.request_id] = found, beside, index
            if most and request.is_decode_leg:
                break  # which pulls what its prefill has left for it
        return most, waits

    def share(self, identity: bytes) -> None:
        for connector in self._connectors:
            connector.share(identity)

    def update_state_after_alloc(self, request: RequestKV, block_ids: list[int], num_external_tokens: int) -> None:
        loader = self._loader.pop(request.request_id, None)
        for index, connector in enumerate(self._connectors):
            connector.update_state_after_alloc(request, block_ids, num_external_tokens if index == loader else 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata | None:
        parts = [connector.build_connector_meta(scheduler_output) for connector in self._connectors]
        return MultiMetadata(parts) if any(part is not None for part in parts) else None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for connector in self._connectors:
            connector.update_connector_output(output)

    def request_preempted(self, request: RequestKV) -> None:
        for connector in self._connectors:
            connector.request_preempted(request)

    def request_finished(self, request: RequestKV, block_ids: list[int], *, is_prefilled: bool) -> bool:
        self._loader.pop(request.request_id, None)
        holders = sum(
            [
                connector.request_finished(request, block_ids, is_prefilled=is_prefilled)
                for connector in self._connectors
            ]
        )
        if holders:
            self._holders[request.request_id] = holders
        return holders > 0

    def request_aborted(self, request_id: str) -> None:
        for connector in self._connectors:
            connector.request_aborted(request_id)

    def revoke_oldest(self) -> str | None:
        """Revoke the oldest hold of the first connector that has one. Blocks that another connector holds too stay
        held, and the next hold is tried."""
        for connector in self._connectors:
            request_id = connector.revoke_oldest()
            if request_id is not None:
                return request_id if self._release(request_id) else self.revoke_oldest()
        return None

    def shorten_oldest_lease(self) -> None:
        for connector in self._connectors:
            connector.shorten_oldest_lease()

    def num_leases(self) -> int:
        return sum(connector.num_leases() for connector in self._connectors)

    # Worker side

    def register_kv_caches(self, pool: KVPool) -> None:
        for connector in self._connectors:
            connector.register_kv_caches(pool)

    def save_overwritten_kv(self, metadata: KVConnectorMetadata) -> None:
        for connector, part in self._with_parts(metadata):
            connector.save_overwritten_kv(part)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        for connector, part in self._with_parts(metadata):
            connector.start_load_kv(part)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        for connector, part in self._with_parts(metadata):
            connector.wait_for_save(part)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent: set[str] = set()
        received: set[str] = set()
        for connector in self._connectors:
            its_sent, its_received = connector.get_finished(finished_req_ids)
            sent |= {request_id for request_id in its_sent if self._release(request_id)}
            received |= its_received
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set[int]().union(*(connector.get_block_ids_with_load_errors() for connector in self._connectors))

    def get_kv_connector_stats(self) -> KVConnectorStats:
        total = KVConnectorStats()
        for connector in self._connectors:
            stats = connector.get_kv_connector_stats()
            total.blocks_received += stats.blocks_received
            for transport, nbytes in stats.bytes_received.items():
                total.bytes_received[transport] = total.bytes_received.get(transport, 0) + nbytes
            total.failures |= stats.failures
        return total

    def has_updates(self) -> bool:
        return any(connector.has_updates() for connector in self._connectors)

    def on_update(self, callback: Callable[[], None]) -> None:
        for connector in self._connectors:
            connector.on_update(callback)

    def shutdown(self) -> None:
        for connector in self._connectors:
            connector.shutdown()

    def _with_parts(self, metadata: KVConnectorMetadata) -> list[tuple[KVConnector, KVConnectorMetadata]]:
        """Return the connectors that have work in a step, each with its metadata."""
        assert isinstance(metadata, MultiMetadata)
        columns = zip(self._connectors, metadata.parts, strict=True)
        return [(connector, part) for connector, part in columns if part is not None]

    def _release(self, request_id: str) -> bool:
        """Note that one connector released a request's blocks. Returns whether it was the last one."""
        left = self._holders.get(request_id, 1) - 1
        if left:
            self._holders[request_id] = left
        else:
            self._holders.pop(request_id, None)
        return not left


def _offer(connector: KVConnector, request: RequestKV, num_computed_tokens: int, most: int) -> tuple[int | None, bool]:
    """Return what a connector offers to load, as it says it; 0 if it has nothing behind the ``most`` tokens that
    another one offers, which is asked first: a search for all of a long prompt takes long."""
    # A file that has the system prompt alone must not keep a store from loading the whole past.
    found, beside = connector.get_num_new_matched_tokens(request, num_computed_tokens + most)
    if found and most:
        return connector.get_num_new_matched_tokens(request, num_computed_tokens)
    return found, beside


class CoreKV(NamedTuple):
    """Holds the connector of a core and its parts."""

    connector: KVConnector
    failpoints: Failpoints
    service: KVService | None
    """The service that the KV thread runs; None if no KV moves between engines."""


def make_core_kv(
    config: EngineConfig,
    transports: Sequence[KVTransport],
    make_service: Callable[[KVConfig, Sequence[KVTransport], Failpoints], KVService] = KVService,
) -> CoreKV | None:
    """Return the KV parts of a core; None if its KV never moves. Raises ``ValueError`` for a wrong setting.

    ``make_service``: makes the service that moves KV between engines.
    """
    kv = config.kv
    if kv.policy not in ("recompute", "fail"):
        raise ValueError(f"kv.policy is {kv.policy!r}; it must be recompute or fail")
    kv.check_store(enable_prefix_caching=config.cache.enable_prefix_caching)
    failpoints = Failpoints(kv.failpoints)
    connectors: list[KVConnector] = []
    service = None
    if transports:
        service = make_service(kv, transports, failpoints)
        connectors.append(PullConnector(service, config.cache.block_size, failpoints))
    # After the pull: a file answers for prompts in general, while a lease was taken for this very request.
    if kv.offload_path:
        connectors.append(OffloadConnector(config.cache, Path(kv.offload_path), kv.offload_bytes))
    if kv.store:
        connectors.append(_store_connector(config))
    if kv.connector:
        connectors.append(_plugged_connector(config))
    if not connectors:
        return None
    return CoreKV(connectors[0] if len(connectors) == 1 else MultiConnector(connectors), failpoints, service)


def _store_connector(config: EngineConfig) -> KVConnector:
    """Return what shares blocks through a store. Raises ``ValueError`` if a folder cannot be used."""
    from .block_store import FolderStore, StoreError  # here, as below: most engines share none
    from .lmcache_store import MOST_VALUE_BYTES, LMCacheStore
    from .store_connector import StoreConnector

    kv, place = config.kv, store_place(config.kv.store)

    def open_store() -> FolderStore | LMCacheStore:
        if place.folder:
            return FolderStore(Path(place.folder), kv.store_bytes, kv.store_timeout_seconds)
        return LMCacheStore(place.host, place.port, kv.store_timeout_seconds)

    try:
        open_store().close()  # which connects to no server: one that is not there yet may come
    except StoreError as error:
        raise ValueError(f"kv_store: {error}") from error
    return StoreConnector(
        config.cache,
        open_store,
        FolderStore.label if place.folder else LMCacheStore.label,
        timeout=kv.store_timeout_seconds,
        load_timeout=kv.load_timeout_seconds,
        most_value_bytes=kv.store_bytes if place.folder else MOST_VALUE_BYTES,
    )


def _plugged_connector(config: EngineConfig) -> KVConnector:
    connector: KVConnector = load("kv_connectors", config.kv.connector, config.plugins)(config)
    return connector
