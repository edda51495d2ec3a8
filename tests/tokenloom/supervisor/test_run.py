"""Work beside a mesh, and what signals do."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tokenloom.supervisor.mesh import Mesh, MeshOutcome, supervise
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartSpec

MakeSpec = Callable[..., PartSpec]


@pytest.fixture
def make_mesh(make_spec: MakeSpec, socket_dir: Path, output: LineCopier) -> Callable[[str], Mesh]:
    def make(behaviour: str) -> Mesh:
        return Mesh([make_spec(behaviour=behaviour)], socket_dir, output, port=8000, drain_timeout=20)

    return make


async def forever(mesh: Mesh) -> None:
    await mesh.wait_failed()


async def test_the_mesh_ends_with_the_work(make_mesh: Callable[[str], Mesh]) -> None:
    pids: list[int] = []

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        pids.extend(part.state.pid for part in mesh.parts if part.state is not None)

    assert await supervise(make_mesh("serve"), work) == MeshOutcome(interrupted=False, clean=True)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


async def test_what_the_work_raises_comes_out_after_the_end(make_mesh: Callable[[str], Mesh]) -> None:
    mesh = make_mesh("serve")

    async def work(mesh: Mesh) -> None:
        raise LookupError("no answer")

    with pytest.raises(LookupError, match="no answer"):
        await supervise(mesh, work)
    assert mesh.parts[0].state is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_drains(make_mesh: Callable[[str], Mesh], number: signal.Signals) -> None:
    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        os.kill(os.getpid(), number)
        await forever(mesh)

    before = signal.getsignal(number)
    if before == signal.SIG_IGN:  # the tests themselves run under `nohup`
        signal.signal(number, signal.SIG_DFL)
    try:
        async with asyncio.timeout(60):
            assert await supervise(make_mesh("serve"), work) == MeshOutcome(interrupted=True, clean=True)
    finally:
        signal.signal(number, before)


async def test_an_ignored_hangup_stays_ignored(make_mesh: Callable[[str], Mesh]) -> None:
    """``nohup tokenloom serve &`` outlives the terminal."""

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)  # the loop would handle the signal here

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert await supervise(make_mesh("serve"), work) == MeshOutcome(interrupted=False, clean=True)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_the_second_signal_kills(make_mesh: Callable[[str], Mesh]) -> None:
    """The part is deaf to SIGTERM and has 20 s to drain; two signals end it at once."""

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await forever(mesh)
        finally:  # the drain has begun
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)

    async with asyncio.timeout(60):
        assert (await supervise(make_mesh("deaf"), work)).interrupted
