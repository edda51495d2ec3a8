"""Stands by while another coordinator is active: follows it, and waits for the lease."""

import asyncio
import logging

import grpc.aio

from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1.coordinator_pb2 import WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub

from .lease.lease import Lease
from .predecessor import Predecessor

log = logging.getLogger(__name__)

_REWATCH_SECONDS = 0.2


async def take_over(lease: Lease, channels: Channels, address: str, predecessor: Predecessor) -> None:
    """Return when this process holds the lease. ``predecessor``: takes what the coordinator at ``address`` shows until
    then."""
    log.info("waiting for the lease")
    await first_of(lease.acquire(), _follow(predecessor, channels, address))
    log.info("active; %d engines of the former coordinator are known", len(predecessor.engine_ids))


async def _follow(predecessor: Predecessor, channels: Channels, address: str) -> None:
    """Take the snapshots of whatever coordinator is active, without end."""
    async with channels.open(address, "coordinator") as channel:
        stub = CoordinatorStub(channel)
        while True:
            call = stub.Watch(WatchRequest())
            try:
                async for snapshot in call:
                    predecessor.take(snapshot)
            except grpc.aio.AioRpcError as error:
                log.debug("active coordinator: %s", error.code().name)
            finally:
                call.cancel()
            await asyncio.sleep(_REWATCH_SECONDS)
