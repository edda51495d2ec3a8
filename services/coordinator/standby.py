"""Stands by while another coordinator is active: follows it, and waits for the lease."""

import logging

from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.registry.registry_view import watch_registry
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub

from .engines.predecessor import Predecessor
from .lease.lease import LeaderLease

log = logging.getLogger(__name__)


async def take_over(lease: LeaderLease, channels: Channels, address: str, predecessor: Predecessor) -> None:
    """Return when this process holds the lease. ``predecessor``: takes what the coordinator at ``address`` shows until
    then."""
    log.info("waiting for the lease")
    # Only the holder opens the port, which all share: a caller reaches the active one, and no peer knows that
    # there are several. Another answers 2.0 to 2.7 s after the death of a Lease's holder, 0.25 to 0.45 s after that of
    # a lock's.
    await first_of(lease.acquire(), _follow(predecessor, channels, address))
    log.info("active; %d engines of the former coordinator are known", len(predecessor.engine_ids))


async def _follow(predecessor: Predecessor, channels: Channels, address: str) -> None:
    """Follow whatever coordinator is active, without end."""
    async with channels.open(address, "coordinator") as channel:
        await watch_registry(CoordinatorStub(channel), predecessor.take, without_loads=True)
