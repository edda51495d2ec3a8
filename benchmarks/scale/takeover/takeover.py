"""Kills the active coordinator while engines report and requests come, and sees the one that stands by take over."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.services.runtime.tasks import first_of
from tokenloom.supervisor.ports import reserved_ports

from ..askers import COORDINATORS
from ..child import Child
from ..fake_engines import BUSY
from ..meter import Meter
from .pair import KINDS, Pair
from .probe import picks_counted

ENGINES_PER_PROCESS = 100
ASKERS = 2
JOIN_SECONDS = 240.0
_PAUSE_SECONDS = 2.0
"""Time for the one that stands by to follow, and for requests to come between two takeovers."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """What one takeover took; times are seconds from SIGKILL of the active coordinator.

    Attributes:
        listens: Until the other one listened.
        answers: Until it had answered a pick of every asker.
        engines_back: Until it showed every engine.
        by_snapshot: Requests that were placed without a coordinator meanwhile.
        refused: Requests that were not placed.
        old_answers: Answers to picks with the old epoch after the first one with the new epoch.
        old_picks: Picks of the old epoch that the new coordinator counted.
    """

    listens: float
    answers: float
    engines_back: float
    asked: int
    by_snapshot: int
    refused: int
    old_answers: int
    old_picks: int


@dataclass(frozen=True, slots=True)
class _Mesh:
    address: str
    pair: Pair
    meter: Meter
    askers: Sequence[Child]
    engines: int


async def run_takeovers(kind: str, engines: int, rounds: int) -> list[Takeover]:
    """Return what each takeover took. ``kind``: what the coordinators compete for, of :data:`.KINDS`.

    Raises ``TimeoutError`` when the engines do not join in time, and ``CoordinatorEnded``.
    """
    results: list[Takeover] = []

    async def measure(mesh: _Mesh) -> None:
        for number in range(1, rounds + 1):
            results.append(await _take_over(mesh, number))

    async with _running(kind, engines) as mesh:
        await first_of(measure(mesh), mesh.pair.watch())
    return results


def medians(takeovers: Sequence[Takeover]) -> Takeover:
    """Return the medians of times, and the sums of what should not happen."""
    return Takeover(
        listens=statistics.median(each.listens for each in takeovers),
        answers=statistics.median(each.answers for each in takeovers),
        engines_back=statistics.median(each.engines_back for each in takeovers),
        asked=sum(each.asked for each in takeovers),
        by_snapshot=sum(each.by_snapshot for each in takeovers),
        refused=sum(each.refused for each in takeovers),
        old_answers=sum(each.old_answers for each in takeovers),
        old_picks=sum(each.old_picks for each in takeovers),
    )


async def _take_over(mesh: _Mesh, number: int) -> Takeover:
    """Start one that stands by, kill the active one, and wait until all is as before. ``number``: of the takeover."""
    await mesh.pair.start()
    await asyncio.sleep(_PAUSE_SECONDS)
    before, epoch = await _counts(mesh.askers), mesh.meter.view.coordinator_epoch
    late = sum(each["late"] for each in await _counts_of_each(mesh.askers, COORDINATORS))
    began = time.monotonic()
    mesh.pair.kill()
    listening = asyncio.create_task(_seconds_until_listening(mesh.pair, began))
    try:
        await _until_joined(mesh.meter, mesh.engines, other_than=epoch)
        engines_back = time.monotonic() - began
        answered = await _until_answered(mesh.askers, number + 1)
        old_picks = await picks_counted(mesh.meter, mesh.address, epoch)
        await asyncio.sleep(_PAUSE_SECONDS)
        after = await _counts(mesh.askers)
        return Takeover(
            listens=await listening,
            answers=max(each["since"] for each in answered) - began,
            engines_back=engines_back,
            asked=int(sum(after.values()) - sum(before.values())),
            by_snapshot=int(after["by_snapshot"] - before["by_snapshot"]),
            refused=int(after["refused"] - before["refused"]),
            old_answers=int(sum(each["late"] for each in await _counts_of_each(mesh.askers, COORDINATORS)) - late),
            old_picks=old_picks,
        )
    finally:
        listening.cancel()  # otherwise it would go on after an error


async def _seconds_until_listening(pair: Pair, began: float) -> float:
    await pair.listening()
    return time.monotonic() - began


async def _until_answered(askers: Sequence[Child], number: int) -> list[dict[str, float]]:
    """Wait until so many coordinators have answered every asker; return what each of these has counted."""
    async with asyncio.timeout(JOIN_SECONDS):
        while True:
            counts = await _counts_of_each(askers, COORDINATORS)
            if all(each["number"] == number for each in counts):
                return counts
            await asyncio.sleep(0.1)


async def _counts(askers: Sequence[Child]) -> dict[str, float]:
    """Return what all askers have counted together."""
    counts = await _counts_of_each(askers)
    return {name: sum(each[name] for each in counts) for name in counts[0]}


async def _counts_of_each(askers: Sequence[Child], order: str = "") -> list[dict[str, float]]:
    return [await asyncio.to_thread(asker.counts, order) for asker in askers]


async def _until_joined(meter: Meter, engines: int, other_than: int = 0) -> None:
    """Wait until a coordinator shows so many engines. ``other_than``: the epoch of the one before it."""

    def holds(view: RegistryView) -> bool:
        return view.coordinator_epoch != other_than and len(view.engines) >= engines

    async with asyncio.timeout(JOIN_SECONDS):
        await meter.until(holds)


@asynccontextmanager
async def _running(kind: str, engines: int) -> AsyncIterator[_Mesh]:
    with TemporaryDirectory() as name, reserved_ports("127.0.0.1", 2, 0, 0) as ports, ExitStack() as stack:
        address, folder = f"127.0.0.1:{ports[0].grpc}", Path(name)
        pair = Pair(folder, address, [f"127.0.0.1:{each.http}" for each in ports], KINDS[kind](folder, stack))
        stack.callback(pair.close)
        await pair.start()
        meter = Meter(address)
        watching = asyncio.create_task(meter.run())
        try:
            children = [
                stack.enter_context(Child("fake_engines", address, first, min(ENGINES_PER_PROCESS, engines - first)))
                for first in range(0, engines, ENGINES_PER_PROCESS)
            ]
            await _until_joined(meter, engines)
            await meter.until(lambda view: view.complete)
            for child in children:
                await asyncio.to_thread(child.counts, BUSY)
            askers = [stack.enter_context(Child("askers", address)) for _ in range(ASKERS)]
            await _until_answered(askers, 1)
            yield _Mesh(address, pair, meter, askers, engines)
        finally:
            watching.cancel()
