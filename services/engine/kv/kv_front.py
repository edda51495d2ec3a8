"""All of the front that has to do with KV of other engines, and with KV held for them."""

import socket
from collections.abc import Callable

from tokenloom.engine_core.client.async_core_client import AsyncClient
from tokenloom.engine_core.wire.messages import CoreReady
from tokenloom.gpu_worker.kv_connector.kv_transports import expanded
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.task_group import task_group
from tokenloom.v1 import coordinator_pb2

from ..core.core_link import CoreLink
from ..engine_settings import EngineSettings
from ..load import LoadTracker
from .kv_link import KVLink
from .kv_loads import KVLoads, ReaderConfig
from .kv_peers import EngineRegistry
from .kv_server import KVServer
from .kv_servicer import KVTransferServicer

CLOSE_SECONDS = 0.25


class KVFront:
    """The KV port, the leases taken up elsewhere, and the line to the core's KV thread.

    Attributes:
        owner: This engine, as the one that holds KV; None: it has no KV port.
        address: Where others find the port; empty: there is none.
        lease_seconds: How long a lease lasts that nobody takes up.
        loads: What is read elsewhere.
    """

    def __init__(
        self,
        settings: EngineSettings,
        client: AsyncClient,
        core: CoreLink,
        load: LoadTracker,
        ready: CoreReady,
        host: Host,
        *,
        on_recompute: Callable[[str], None],
    ) -> None:
        """Binds the KV port; raises as :class:`KVServer`."""
        self._core = core
        self._load = load
        self._link = KVLink(client)
        self._registry = EngineRegistry(settings.coordinator, host.channels)
        self._server: KVServer | None = None
        self.owner: coordinator_pb2.EngineRef | None = None
        self.address = ""
        if settings.kv_listen:
            servicer = KVTransferServicer(self._link, host.epoch)
            self._server = KVServer(settings.kv_listen, servicer, host.tls, insecure=settings.insecure)
            self.address = settings.kv_advertise_address or self._server.address
            self.owner = coordinator_pb2.EngineRef(engine_id=settings.instance_id, epoch=host.epoch)
        self.lease_seconds = settings.engine.kv.lease_seconds
        reader = ReaderConfig(
            host=socket.gethostname(),
            kv_layout=ready.kv_layout,
            block_size=ready.block_size,
            transports=expanded(settings.kv_transports),
            must_load=settings.engine.kv.policy == "fail",
        )
        self.loads = KVLoads(reader, core, self._link, self._registry, host.channels, on_recompute)

    async def run(self) -> None:
        """Serves the port, until cancelled or the core is dead."""
        if self._server is not None:
            await self._server.start()
        async with task_group() as group:
            watch = group.create_task(self._registry.run(), name="kv-registry")
            await self._link.run(self.loads.on_verify)
            watch.cancel()

    async def leases_ended(self) -> None:
        """Returns once nothing is held, nor about to be held, for others."""
        await self._load.until(lambda: not self._core.num_prefill_legs and not self._load.stats.num_leases)

    async def close(self) -> None:
        """Ends what is read, and the port. Idempotent."""
        await self.loads.close()
        if self._server is not None:
            await self._server.close(CLOSE_SECONDS)
