"""Where the KV of other engines is served, by what the coordinator says of them."""

import asyncio
import logging
from dataclasses import dataclass

import grpc
import grpc.aio

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
UNKNOWN_SECONDS = 0.5
"""How long an engine may be named before our view of the registry shows it."""


@dataclass(frozen=True)
class Owner:
    """An engine whose KV may be read."""

    engine_id: str
    epoch: int
    kv_address: str
    host: str


class EngineRegistry:
    """Watches the coordinator; while that is away, what it said last holds."""

    def __init__(self, coordinator: str, channels: Channels) -> None:
        """``coordinator``: its address; empty: there is none, and no engine is ever found."""
        self._coordinator = coordinator
        self._channels = channels
        self._owners: dict[str, Owner] = {}  # by engine_id
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Watches and reconnects, until cancelled."""
        if not self._coordinator:
            return
        async with self._channels.open(self._coordinator, "coordinator") as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            while True:
                call = stub.Watch(coordinator_pb2.WatchRequest())
                try:
                    while isinstance(snapshot := await call.read(), coordinator_pb2.Snapshot):
                        await self.update(snapshot)
                except grpc.aio.AioRpcError as error:
                    log.debug("coordinator: %s", error.code().name)
                finally:
                    call.cancel()
                await asyncio.sleep(RETRY_SECONDS)

    async def update(self, snapshot: coordinator_pb2.Snapshot) -> None:
        """A view of the registry came. One that still waits for engines to re-join adds, and removes nothing."""
        owners = {
            entry.identity.engine_id: Owner(
                entry.identity.engine_id, entry.identity.epoch, entry.identity.kv_address, entry.identity.host
            )
            for entry in snapshot.engines
        }
        async with self._changed:
            self._owners = owners if snapshot.complete else self._owners | owners
            self._changed.notify_all()

    def has_address(self, kv_address: str) -> bool:
        """Whether an engine is known to serve there."""
        return any(owner.kv_address == kv_address for owner in self._owners.values())

    async def find(self, engine_id: str, epoch: int) -> Owner:
        """This incarnation of an engine. Raises ``KVTransferError`` (``owner_lost``) when it is not there."""
        try:
            async with asyncio.timeout(UNKNOWN_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._is(engine_id, epoch))
        except TimeoutError:
            raise KVTransferError("owner_lost", f"no such incarnation of engine {engine_id!r} is known") from None
        owner = self._owners[engine_id]
        if not owner.kv_address:
            raise KVTransferError("owner_lost", f"engine {engine_id!r} serves no KV")
        return owner

    def _is(self, engine_id: str, epoch: int) -> bool:
        return (owner := self._owners.get(engine_id)) is not None and owner.epoch == epoch
