"""Runs work with a local mesh; a first signal drains the mesh, a second one kills it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .layout import MeshOptions, parts_of, write_meshes
from .mesh import Mesh
from .output import LineCopier
from .part_spec import PartSpec
from .ports import held_ports
from .process import Process, fork_first
from .state_dir import mesh_directory

Work = Callable[[Mesh], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class MeshOutcome:
    """How the run ended."""

    interrupted: bool
    """A signal ended it, not the return of the work."""
    clean: bool
    """Every part ended by itself; none had to be killed."""


def run_mesh(options: MeshOptions, output: LineCopier, work: Work) -> MeshOutcome:
    """Start a mesh, run `work` until it returns or a signal arrives, then drain the mesh.

    Call it outside an event loop: the first processes of the parts are forks of this process, if that is possible.
    Exceptions of `work` are raised again after every part has ended. Raises `PortTaken` before any part starts.
    """
    with _planned(options, output) as plan:
        mesh = plan.mesh(fork_first(plan.specs, output))
        return asyncio.run(supervise(mesh, work))


async def run_mesh_in_loop(options: MeshOptions, output: LineCopier, work: Work) -> MeshOutcome:
    """Do the same within an event loop; every process is started anew."""
    with _planned(options, output) as plan:
        return await supervise(plan.mesh({}), work)


async def supervise(mesh: Mesh, work: Work) -> MeshOutcome:
    """Run `work` with a given mesh in the same way, within an event loop."""
    interrupted = asyncio.Event()
    with _signals(interrupted, mesh.kill):
        async with mesh:
            await _until(interrupted, asyncio.create_task(work(mesh)))
            return MeshOutcome(clean=await mesh.drain(), interrupted=interrupted.is_set())


@dataclass(frozen=True)
class _Plan:
    specs: Sequence[PartSpec]
    directory: Path
    output: LineCopier
    port: int
    drain_timeout: float

    def mesh(self, first: Mapping[str, Process]) -> Mesh:
        port, timeout = self.port, self.drain_timeout
        return Mesh(self.specs, self.directory, self.output, port=port, drain_timeout=timeout, first=first)


@contextlib.contextmanager
def _planned(options: MeshOptions, output: LineCopier) -> Iterator[_Plan]:
    held = held_ports(options.host, options.gateways, options.port, options.grpc_port)
    with held as ports, mesh_directory() as directory, contextlib.closing(output):
        write_meshes(options, directory)
        yield _Plan(parts_of(options, directory, ports), directory, output, ports[0].http, options.drain_timeout)


async def _until(interrupted: asyncio.Event, working: "asyncio.Task[None]") -> None:
    interruption = asyncio.create_task(interrupted.wait())
    both: list[asyncio.Task[Any]] = [working, interruption]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


@contextlib.contextmanager
def _signals(first: asyncio.Event, second: Callable[[], None]) -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP (a closed terminal) set `first`; a further signal calls `second`.

    A SIGHUP that is ignored stays ignored: `nohup` asks for a mesh that outlives its terminal.
    """
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def on_signal() -> None:
        if first.is_set():
            second()
        first.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
