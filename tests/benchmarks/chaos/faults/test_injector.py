"""The injector chooses among healthy parts, and counts a fault only if it saw its effect."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.chaos.faults import processes
from benchmarks.chaos.faults.fault import WHOLE, Action, Fault, Injection, Kind
from benchmarks.chaos.faults.injector import Injector
from benchmarks.chaos.faults.part_link import PartLink
from benchmarks.chaos.faults.proxy import Proxy
from tokenloom.supervisor.mesh import Mesh

TOKENIZER = next(kind for kind in WHOLE if kind.name == "tokenizer")
COORDINATOR = next(kind for kind in WHOLE if kind.name == "coordinator")
CORE = next(kind for kind in WHOLE if kind.name == "engine core")
_SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
_DEAF = (sys.executable, "-c", "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(600)")


class FakePart:
    """A part whose process sleeps."""

    def __init__(self, kind: Kind, index: int, process: asyncio.subprocess.Process) -> None:
        self.spec = SimpleNamespace(service=kind.service, role=kind.role, name=f"{kind.service}-{index}")
        self.state: Any = SimpleNamespace(pid=process.pid)
        self.serving = asyncio.Event()
        self.serving.set()
        self.process = process

    async def restart(self) -> None:
        self.process = await asyncio.create_subprocess_exec(*_SLEEP)
        self.state = SimpleNamespace(pid=self.process.pid)


def mesh_of(*parts: FakePart) -> Mesh:
    return cast(Mesh, SimpleNamespace(parts=list(parts)))


def fault(action: Action, kind: Kind = TOKENIZER, seconds: float = 0.0, choice: float = 0.0) -> Fault:
    return Fault(action, kind, seconds, choice)


@pytest.fixture
async def two() -> AsyncIterator[list[FakePart]]:
    parts = [FakePart(TOKENIZER, i, await asyncio.create_subprocess_exec(*_SLEEP)) for i in range(2)]
    yield parts
    for part in parts:
        if part.process.returncode is None:
            part.process.kill()
        await part.process.wait()


async def test_a_kill_is_seen_and_the_return_is_measured(two: list[FakePart]) -> None:
    injector = Injector(mesh_of(*two), {})
    injection = await injector.inject(fault(Action.KILL, choice=0.9))
    assert injection.part == "tokenizer-1"
    assert injection.took_effect
    assert processes.state(injection.pid) is None
    assert not injector.is_possible(fault(Action.KILL)), "the other one would be the last"
    await two[1].restart()
    await injector.settle()
    assert injection.served_again is not None
    assert injector.is_possible(fault(Action.KILL))


async def test_a_freeze_is_seen_and_taken_back(two: list[FakePart]) -> None:
    injector = Injector(mesh_of(*two), {})
    injection = await injector.inject(fault(Action.FREEZE))
    assert "state T and continued" in injection.effect
    assert await processes.until(lambda: processes.state(injection.pid) not in ("T", None), 10)
    assert injector.is_possible(fault(Action.KILL))


async def test_a_starved_process_runs_behind_all_others(two: list[FakePart]) -> None:
    injector = Injector(mesh_of(*two), {})
    starving = asyncio.create_task(injector.inject(fault(Action.STARVE, seconds=0.2)))
    pid = two[0].process.pid
    assert await processes.until(lambda: processes.policies(pid) == {os.SCHED_IDLE}, 10)
    assert (await starving).took_effect
    assert processes.policies(pid) == {os.SCHED_OTHER}


async def test_a_signal_that_is_ignored_has_no_effect(two: list[FakePart], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.chaos.faults.injector._DRAIN_SECONDS", 0.05)
    monkeypatch.setattr("benchmarks.chaos.faults.injector.RETURN_SECONDS", 0.0)
    deaf = await asyncio.create_subprocess_exec(*_DEAF, stdout=asyncio.subprocess.PIPE)
    assert deaf.stdout is not None
    await deaf.stdout.readline()
    part = FakePart(TOKENIZER, 2, deaf)
    try:
        injector = Injector(mesh_of(*two, part), {})
        injection = await injector.inject(fault(Action.TERM, choice=0.99))
        await injector.settle()
    finally:
        deaf.kill()
        await deaf.wait()
    assert injection.pid == deaf.pid
    assert not injection.took_effect
    assert injection.served_again is None


async def test_only_healthy_parts_are_chosen(two: list[FakePart]) -> None:
    injector = Injector(mesh_of(*two), {})
    two[0].serving.clear()
    assert not injector.is_possible(fault(Action.KILL)), "the last one of its kind is spared"
    assert not injector.is_possible(fault(Action.KILL, CORE)), "no engine"


async def test_the_only_coordinator_may_be_met() -> None:
    process = await asyncio.create_subprocess_exec(*_SLEEP)
    injector = Injector(mesh_of(FakePart(COORDINATOR, 0, process)), {})
    try:
        assert injector.is_possible(fault(Action.KILL, COORDINATOR))
    finally:
        process.kill()
        await process.wait()


async def _no_server() -> Any:
    raise OSError


@pytest.mark.parametrize("action", [Action.CUT, Action.CUT_TO, Action.CUT_FROM, Action.RESET, Action.DELAY])
async def test_a_link_without_traffic_shows_no_effect(two: list[FakePart], action: Action) -> None:
    injector = Injector(mesh_of(*two), {part.spec.name: PartLink([Proxy(_no_server)]) for part in two})
    assert not (await injector.inject(fault(action))).took_effect


async def test_the_bytes_that_a_cut_held_are_its_effect(two: list[FakePart]) -> None:
    proxy = Proxy(_no_server)
    injector = Injector(mesh_of(*two), {part.spec.name: PartLink([proxy]) for part in two})
    task = asyncio.create_task(injector.inject(fault(Action.CUT_TO, seconds=0.05)))
    while not injector.injections:  # noqa: ASYNC110
        await asyncio.sleep(0)
    passing = asyncio.create_task(proxy.to_server.pass_on(11))
    await proxy.from_server.pass_on(5)
    injection: Injection = await task
    await passing
    assert injection.effect == "11 bytes were held"


async def test_parts_without_a_proxy_have_no_link_to_cut(two: list[FakePart]) -> None:
    assert not Injector(mesh_of(*two), {}).is_possible(fault(Action.CUT))
