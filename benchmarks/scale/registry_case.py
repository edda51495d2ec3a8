"""Measures one coordinator with fake engines and followers: what reports and snapshots cost, and a rejoin."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.supervisor.ports import reserved_ports

from .child import Child
from .coordinator_process import Coordinator
from .fake_engines import BUSY, CALM
from .meter import Meter
from .offered_picks import RATES, StreamResult, measure

ENGINES_PER_PROCESS = 100
FOLLOWERS_PER_PROCESS = 50
REPORTS_PER_ENGINE = 5
"""Reports that each engine of a thousand sends in a second; the coordinator asks for them."""
START_SECONDS = 240.0
_PAUSE_SECONDS = 3.0
"""Time for every follower to have the whole view and for every engine to know its interval."""


@dataclass(frozen=True, slots=True)
class RegistryCase:
    """Describes a run: engines, output processors that follow, and seconds of the measurement."""

    engines: int
    followers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RegistryResult:
    """Holds what was measured. Processor time is that of the process, in cores: seconds in a second.

    Attributes:
        reports_per_second: Reports that the coordinator has read.
        cores: Of the coordinator.
        loop_cores: The part of it in the thread with the event loop, which cannot use more than one.
        microseconds_a_report: Processor time of the coordinator for each report, with all its other work.
        megabytes_per_second: Of snapshots, to all followers and the one that counts.
        follower_share: Cores that one follower uses.
        mebibytes: Resident memory of the coordinator.
        dead: How often an engine was shown as dead.
        join_seconds: From SIGKILL of the coordinator until a new one showed every engine.
        refused: Requests that were not placed meanwhile, of all.
        picks: Without hashes and with them, after the measurement of reports, while each engine reports once a second;
            the memory is that after them.
    """

    engines: int
    followers: int
    reports_per_second: float
    cores: float
    loop_cores: float
    microseconds_a_report: float
    megabytes_per_second: float
    follower_share: float
    mebibytes: float
    dead: int
    join_seconds: float
    rejoin_cpu_seconds: float
    refused: int
    asked: int
    picks: Sequence[StreamResult]


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The processes of a run."""

    coordinator: Coordinator
    meter: Meter
    engines: Sequence[Child]
    followers: Sequence[Child]
    asker: Child


async def run_registry(case: RegistryCase) -> RegistryResult:
    """Measure one case. Raises ``TimeoutError`` when the engines do not join in time."""
    async with _running(case) as mesh:
        await asyncio.sleep(_PAUSE_SECONDS)
        cpu, followers_cpu = mesh.coordinator.cpu_seconds(), _cpu_seconds(mesh.followers)
        loop = mesh.coordinator.loop_seconds()
        reports, num_bytes, began = await _reports(mesh), mesh.meter.num_bytes, time.monotonic()
        await asyncio.sleep(case.seconds)
        seconds = time.monotonic() - began
        cpu, loop = mesh.coordinator.cpu_seconds() - cpu, mesh.coordinator.loop_seconds() - loop
        followers_cpu = _cpu_seconds(mesh.followers) - followers_cpu
        reports = await _reports(mesh) - reports
        num_bytes = (mesh.meter.num_bytes - num_bytes) * (case.followers + 1)
        await _order(mesh.engines, CALM)  # as a coordinator asks of engines when it has no time for more reports
        await asyncio.sleep(_PAUSE_SECONDS)
        with Child("pickers", mesh.coordinator.address, is_remote=False) as pickers:
            picks = [await measure(pickers, mesh.coordinator, *rate, case.seconds) for rate in RATES]
        await _order(mesh.engines, BUSY)
        mebibytes, dead = mesh.coordinator.mebibytes(), mesh.meter.num_dead
        join_seconds, rejoin_cpu = await _rejoin(case, mesh)
        asked = await asyncio.to_thread(mesh.asker.counts)
    return RegistryResult(
        engines=case.engines,
        followers=case.followers,
        reports_per_second=reports / seconds,
        cores=cpu / seconds,
        loop_cores=loop / seconds,
        microseconds_a_report=cpu / max(reports, 1) * 1e6,
        megabytes_per_second=num_bytes / seconds / 1e6,
        follower_share=followers_cpu / seconds / case.followers,
        mebibytes=mebibytes,
        dead=dead,
        join_seconds=join_seconds,
        rejoin_cpu_seconds=rejoin_cpu,
        refused=int(asked["refused"]),
        asked=int(sum(asked.values())),
        picks=picks,
    )


async def _order(engines: Sequence[Child], order: str) -> None:
    for child in engines:
        await asyncio.to_thread(child.counts, order)


@asynccontextmanager
async def _running(case: RegistryCase) -> AsyncIterator[_Mesh]:
    with reserved_ports("127.0.0.1", 1, 0, 0) as ports, ExitStack() as stack:
        address = f"127.0.0.1:{ports[0].grpc}"
        coordinator = Coordinator(address, f"127.0.0.1:{ports[0].http}")
        stack.callback(coordinator.kill)
        meter = Meter(address)
        watching = asyncio.create_task(meter.run())
        try:
            engines = _children(stack, "fake_engines", address, case.engines, ENGINES_PER_PROCESS)
            await _until_joined(case, meter)
            followers = _children(stack, "followers", address, case.followers, FOLLOWERS_PER_PROCESS)
            asker = stack.enter_context(Child("askers", address))
            for child in (*followers, asker):
                await asyncio.to_thread(child.counts)  # it has begun
            await _order(engines, BUSY)
            await meter.until(lambda view: view.complete)
            yield _Mesh(coordinator, meter, engines, followers, asker)
        finally:
            watching.cancel()


def _children(stack: ExitStack, module: str, address: str, count: int, most: int) -> list[Child]:
    """Start processes for ``count`` parts, with ``most`` of them in each."""
    firsts = range(0, count, most)
    return [stack.enter_context(Child(module, address, first, min(most, count - first))) for first in firsts]


async def _rejoin(case: RegistryCase, mesh: _Mesh) -> tuple[float, float]:
    """Kill the coordinator, start it again, and return the seconds and its processor time until all are back."""
    began, epoch = time.monotonic(), mesh.meter.view.coordinator_epoch
    mesh.coordinator.kill()
    mesh.coordinator.start()
    await _until_joined(case, mesh.meter, other_than=epoch)
    seconds, cpu = time.monotonic() - began, mesh.coordinator.cpu_seconds()
    await asyncio.sleep(_PAUSE_SECONDS)  # requests go on
    return seconds, cpu


async def _until_joined(case: RegistryCase, meter: Meter, other_than: int = 0) -> None:
    """Wait until a coordinator shows all engines. ``other_than``: the epoch of the one before it."""

    def holds(view: RegistryView) -> bool:
        return view.coordinator_epoch != other_than and len(view.engines) == case.engines

    async with asyncio.timeout(START_SECONDS):
        await meter.until(holds)


def _cpu_seconds(children: Sequence[Child]) -> float:
    return sum(child.cpu_seconds() for child in children)


async def _reports(mesh: _Mesh) -> int:
    """Return how many reports the coordinator has read: on a machine with few cores, fewer than the engines have
    sent."""
    return await asyncio.to_thread(mesh.coordinator.reports)
