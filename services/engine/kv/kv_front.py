"""Joins the front's parts that read KV from other engines and serve KV to them."""

import socket

import grpc.aio

from tokenloom.gpu_worker.kv_connector.kv_transports import expanded
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.surroundings import Port
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import coordinator_pb2

from ..core.core_link import CoreLink
from ..engine_settings import EngineSettings
from ..load import LoadTracker
from .kv_link import KVLink
from .kv_loads import KVLoads, ReaderConfig
from .kv_peers import EngineRegistry
from .kv_servicer import KVTransferServicer, serve_kv

CLOSE_SECONDS = 0.25


class KVFront:
    """Owns the KV port, the loads from other engines, and the link to the core's KV thread.

    Attributes:
        owner: This engine as an owner of leased KV; None if it has no KV port.
        address: Where other engines reach the KV port; empty without one.
        lease_seconds: How long a lease lasts that no engine acquires.
        loads: The loads from other engines.
    """

    def __init__(
        self,
        settings: EngineSettings,
        core: CoreLink,
        load: LoadTracker,
        host: Host,
        coordinator: grpc.aio.Channel | None,
    ) -> None:
        """Bind the KV port. ``coordinator``: a channel to it, if there is one. Raises as :func:`serve_kv`."""
        self._core = core
        self._load = load
        self._link = KVLink(core.client)
        self._registry = EngineRegistry(coordinator)
        self._server: Port | None = None
        self.owner: coordinator_pb2.EngineRef | None = None
        self.address = ""
        if settings.kv_listen:
            servicer = KVTransferServicer(self._link, host.epoch)
            self._server = serve_kv(host.network, settings.kv_listen, servicer, host.tls, insecure=settings.insecure)
            self.address = settings.kv_advertise_address or self._server.address
            self.owner = coordinator_pb2.EngineRef(engine_id=settings.instance_id, epoch=host.epoch)
        self.lease_seconds = settings.engine.kv.lease_seconds
        reader = ReaderConfig(
            host=socket.gethostname(),
            kv_layout=core.ready.kv_layout,
            block_size=core.ready.block_size,
            num_kv_groups=core.ready.num_kv_groups,
            transports=expanded(settings.kv_transports, on_host=core.ready.pool_is_on_host),
            must_load=settings.engine.kv.policy == "fail",
        )
        self.loads = KVLoads(reader, core, self._link, self._registry, host.channels, host.fall_backs)

    async def run(self) -> None:
        """Serve the port until the core dies."""
        if self._server is not None:
            await self._server.start()
        await first_of(self._link.run(self.loads.on_verify), self._registry.run())

    async def leases_ended(self) -> None:
        """Wait until no KV is held, or about to be held, for other engines."""
        await self._load.until(lambda: not self._core.num_prefill_legs and not self._load.stats.num_leases)

    async def close(self) -> None:
        """End the loads and close the port. Idempotent."""
        await self.loads.close()
        if self._server is not None:
            await self._server.close(CLOSE_SECONDS)
