"""Asks for an engine again and again, as an output processor does: the coordinator, or the last snapshot without it."""

import asyncio
import logging
import sys
import time
from collections import Counter

import uvloop

from tokenloom.request.errors import TokenloomError
from tokenloom.services.output_processor.placement.last_snapshot import LastSnapshot
from tokenloom.services.output_processor.placement.pick_stream import PickStream
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.v1.coordinator_pb2 import PickRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_PREFILL

from .child import answer
from .fake_engines import FINGERPRINT

PICKS_PER_SECOND = 100
COORDINATORS = "coordinators"
"""Order: to return what :meth:`Coordinators.counts` does."""
_REQUEST = PickRequest(fingerprint=FINGERPRINT, role=ENGINE_ROLE_PREFILL, prompt_tokens=100, max_new_tokens=100)


class Coordinators:
    """Notes which coordinators answer, by their epochs."""

    def __init__(self) -> None:
        self._epochs: list[int] = []
        self._since = 0.0
        self._num_late = 0

    def note(self, epoch: int) -> None:
        """Take an answer."""
        if epoch not in self._epochs:
            self._epochs.append(epoch)
            self._since = time.monotonic()
        self._num_late += epoch != self._epochs[-1]

    def counts(self) -> dict[str, float]:
        """Return how many have answered, when the newest did first (seconds of the machine's clock), and how many
        answers of an older one came later."""
        return {"number": len(self._epochs), "since": self._since, "late": self._num_late}


async def ask(picks: PickStream, snapshot: LastSnapshot, counts: Counter[str], coordinators: Coordinators) -> None:
    """Place one request, and count by whom."""
    try:
        if picks.is_open:
            try:
                coordinators.note((await picks.pick(_REQUEST)).pick.coordinator_epoch)
                counts["by_coordinator"] += 1
                return
            except TokenloomError:
                pass
        snapshot.pick(_REQUEST)
        counts["by_snapshot"] += 1
    except TokenloomError:
        counts["refused"] += 1


async def run(coordinator: str) -> None:
    """Ask until cancelled."""
    counts: Counter[str] = Counter(by_coordinator=0, by_snapshot=0, refused=0)
    coordinators = Coordinators()
    stub = CoordinatorStub(Channels().open(coordinator, "coordinator"))
    picks, snapshot = PickStream(stub), LastSnapshot(FINGERPRINT, time.monotonic)
    seen = asyncio.Event()

    def take(view: RegistryView) -> None:
        snapshot.update(view)
        seen.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(picks.run())
        group.create_task(watch_registry(stub, take))
        await seen.wait()
        answer(lambda order: coordinators.counts() if order == COORDINATORS else dict(counts))
        while True:
            group.create_task(ask(picks, snapshot, counts, coordinators))
            await asyncio.sleep(1 / PICKS_PER_SECOND)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # they are asked on purpose while no coordinator answers
    uvloop.run(run(sys.argv[1]))
