"""Channels to the KV ports of other engines, shared by all readings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import kv_transfer_pb2_grpc

from .kv_peers import EngineRegistry
from .kv_reading import Stub


@dataclass(slots=True, eq=False)
class _Shared:
    channel: grpc.aio.Channel
    num_users: int = 0


class KVChannels:
    """Opened at the first use; closed when unused and the engine has left the registry."""

    def __init__(self, registry: EngineRegistry, channels: Channels) -> None:
        self._registry = registry
        self._channels = channels
        self._shared: dict[str, _Shared] = {}  # by address: as many as there are engines, and such as are still read

    @asynccontextmanager
    async def stub(self, address: str) -> AsyncIterator[Stub]:
        """Of the engine that serves there."""
        shared = self._shared.get(address)
        if shared is None:
            shared = self._shared[address] = _Shared(self._channels.open(address, "engine"))
        shared.num_users += 1
        try:
            yield kv_transfer_pb2_grpc.KVTransferStub(shared.channel)
        finally:
            shared.num_users -= 1
            await self._prune()

    async def close(self) -> None:
        """Ends calls in progress."""
        shared, self._shared = self._shared, {}
        for each in shared.values():
            await each.channel.close()

    async def _prune(self) -> None:
        unused = [
            address
            for address, shared in self._shared.items()
            if not shared.num_users and not self._registry.has_address(address)
        ]
        for shared in [self._shared.pop(address) for address in unused]:
            await shared.channel.close()
