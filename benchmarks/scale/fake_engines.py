"""Runs many fake engines in one process: they join, report and watch like real ones, and compute nothing."""

import asyncio
import sys

import uvloop

from tokenloom.engine_core.data.messages import SchedulerStats
from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.engine.control.coordinator_link import CoordinatorLink
from tokenloom.services.engine.kv.kv_peers import EngineRegistry
from tokenloom.services.engine.records.load import Load, LoadTracker
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import AdapterChanges, DesiredState, EngineIdentity, JoinFacts, Relief, StateProgress
from tokenloom.v1.types_pb2 import ENGINE_ROLE_BOTH, Fingerprint, Hello, ModelLimits

from .child import answer
from .patient_channels import PatientChannels

FINGERPRINT = Fingerprint(
    model="demo", weights=b"w" * 32, tokenizer=b"t" * 32, block_size=16, kv_layout="nhd", numerics="bf16"
)
NUM_BLOCKS = 65_536
BUSY, CALM = "busy", "calm"
"""Orders: to report as often as the coordinator allows, or once a second."""
_SEATS = 256


class BusyLoad(LoadTracker):
    """The load of an engine whose counts change all the time: it reports as often as it may.

    Attributes:
        num_reports: How often it was reported.
        is_busy: Whether its counts change yet.
    """

    def __init__(self, number: int) -> None:
        super().__init__(_SEATS, _SEATS)
        self.num_reports = number  # engines differ from each other
        self.is_busy = False

    def snapshot(self) -> Load:
        self.num_reports += 1
        running = self.num_reports * 7 % _SEATS
        self.num_live = running + self.num_reports % 5
        self.step += 1
        free = NUM_BLOCKS - running * 100
        usage = 1 - free / NUM_BLOCKS
        self.stats = SchedulerStats(
            num_running=running,
            num_waiting_tokens=900 * (self.num_live - running),
            kv_usage=usage,
            num_free_blocks=free,
        )
        if self.is_busy:
            self.changed.set()
        return super().snapshot()


class IgnoredCommands:
    """Obeys nothing but reports that it has: a fake engine has no adapters, and ends with its process."""

    def __init__(self, load: LoadTracker) -> None:
        self._load = load

    def drain(self, grace: float) -> None:
        """See :class:`.Commands`."""

    def change_adapters(self, changes: AdapterChanges) -> None:
        """See :class:`.Commands`."""

    def start_wave(self, wave: int) -> None:
        """See :class:`.Commands`."""

    def resize_group(self, size: int) -> None:
        """See :class:`.Commands`."""

    def relieve(self, relief: Relief) -> None:
        """See :class:`.Commands`."""

    def wait_aside(self, reason: str) -> None:
        """See :class:`.Commands`."""

    def take_state(self, wanted: DesiredState) -> None:
        """See :class:`.Commands`."""
        self._load.set_progress(StateProgress(reached=wanted.revision))

    def refused(self, reason: str) -> None:
        """See :class:`.Commands`."""


class FakeIdentity:
    """Describes a fake engine as :class:`.Identity` describes a real one."""

    def __init__(self, number: int) -> None:
        self._name = f"engine-{number:04d}"
        self._number = number
        self.facts = JoinFacts(start_role=ENGINE_ROLE_BOTH)

    def hello(self) -> Hello:
        return make_hello(self._name, self._number + 1, fingerprint=FINGERPRINT)

    def registration(self) -> EngineIdentity:
        return EngineIdentity(
            engine_id=self._name,
            epoch=self._number + 1,
            address=f"{self._name}.engine.tokenloom.svc.cluster.local:50051",
            kv_address=f"{self._name}.engine.tokenloom.svc.cluster.local:50061",
            host=f"node-{self._number // 8}",
            fingerprint=FINGERPRINT,
            limits=ModelLimits(max_model_len=131_072, vocab_size=128_256, max_logprobs=20, generates=True),
            num_kv_blocks=NUM_BLOCKS,
        )


async def run(coordinator: str, first: int, count: int) -> None:
    """Run engines with the numbers from ``first`` on, until cancelled."""
    channels, loads = PatientChannels(), [BusyLoad(first + number) for number in range(count)]

    def counts(order: str) -> dict[str, float]:
        for load in loads if order else ():
            load.is_busy = order == BUSY
        return {"reports": sum(load.num_reports for load in loads)}

    answer(counts)
    async with asyncio.TaskGroup() as group:
        for number, load in enumerate(loads, first):
            channel = channels.open(coordinator, "coordinator")
            link = CoordinatorLink(channel, FakeIdentity(number), load, ENGINE_ROLE_BOTH, FallBacks())  # type: ignore[arg-type]
            group.create_task(link.run(IgnoredCommands(load)))
            group.create_task(EngineRegistry(channel).run())


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
