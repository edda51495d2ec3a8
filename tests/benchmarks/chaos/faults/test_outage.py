"""A mesh that lacks processors: its processes are stopped, and every one of them runs again, whatever happens."""

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos.faults import outage, processes
from benchmarks.chaos.faults.fault import Action, Fault, Kind

SECONDS = 0.3
FAULT = Fault(Action.FREEZE, Kind("gateway", "gateway"), SECONDS, 0.0)
MESH: Any = SimpleNamespace(parts=[])


@pytest.fixture
def part() -> Iterator[int]:
    """A process that looks like a part of a mesh."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)", "tokenloom.services.gateway"]
    with subprocess.Popen(sleeps) as process:
        yield process.pid
        process.kill()


def stopped(pid: int) -> bool:
    return processes.state(pid) == "T"


class FakeInjector:
    """Notes what is killed."""

    now = 5.0

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def is_possible(self, fault: Fault) -> bool:
        return len(self.kinds) < 1

    async def inject(self, fault: Fault) -> None:
        self.kinds.append(fault.kind.name)


async def test_a_paused_mesh_stops_and_runs_again(part: int) -> None:
    pausing = asyncio.create_task(outage.host_paused(MESH, FAULT, 5.0, random.Random(0)))
    assert await processes.until(lambda: stopped(part), SECONDS)
    injection = await pausing
    assert not stopped(part)
    assert injection.effect.endswith("processes were stopped for 0.3 s")
    assert injection.began + SECONDS <= injection.ended
    assert injection.served_again is not None


async def test_a_mesh_that_stutters_stops_again_and_again_and_loses_a_part(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_STOP_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(outage, "_RUN_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(outage, "_LOOK_SECONDS", 0.02)
    injector: Any = FakeInjector()
    injection = await outage.host_stutters(MESH, FAULT, injector, random.Random(0), outage.VICTIMS[1])
    assert not stopped(part)
    assert injection.effect.endswith("within 0.3 s")
    assert injector.kinds == ["gateway"], "once"


@pytest.mark.parametrize("stutters", [False, True])
async def test_no_process_stays_stopped_behind_a_campaign_that_ends(
    part: int, monkeypatch: pytest.MonkeyPatch, stutters: bool
) -> None:
    monkeypatch.setattr(outage, "_RUN_SECONDS", (0.0, 0.0))
    injector: Any = FakeInjector()
    fault = Fault(Action.FREEZE, FAULT.kind, 60.0, 0.0)
    with contextlib.suppress(asyncio.CancelledError):
        if stutters:
            running = asyncio.create_task(outage.host_stutters(MESH, fault, injector, random.Random(0), None))
        else:
            running = asyncio.create_task(outage.host_paused(MESH, fault, 5.0, random.Random(0)))
        assert await processes.until(lambda: stopped(part), 10.0)
        running.cancel()
        await running
    assert not stopped(part)
