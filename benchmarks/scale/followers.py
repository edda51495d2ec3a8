"""Follows the registry in one process as many output processors do."""

import asyncio
import sys
import time

import uvloop

from tokenloom.services.output_processor.placement.last_snapshot import LastSnapshot
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub

from .child import answer
from .fake_engines import FINGERPRINT
from .patient_channels import PatientChannels


class Follower:
    """Keeps what an output processor keeps of the registry."""

    def __init__(self) -> None:
        self.num_messages = 0
        self._snapshot = LastSnapshot(FINGERPRINT, time.monotonic)

    def take(self, view: RegistryView) -> None:
        self.num_messages += 1
        self._snapshot.update(view)


async def run(coordinator: str, count: int) -> None:
    """Follow until cancelled."""
    channels, followers = PatientChannels(), [Follower() for _ in range(count)]
    answer(lambda _: {"messages": sum(follower.num_messages for follower in followers)})
    async with asyncio.TaskGroup() as group:
        for follower in followers:
            stub = CoordinatorStub(channels.open(coordinator, "coordinator"))
            group.create_task(watch_registry(stub, follower.take))


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], int(sys.argv[3])))  # the number of the first one does not matter
