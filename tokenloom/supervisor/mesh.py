"""Keeps the parts of a local mesh running, and stops them in order: a first signal drains the mesh, a second one kills
it."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenloom.services.runtime.tasks import first_of

from .layout import MeshOptions, parts_of, write_meshes
from .output import LineCopier
from .part import SupervisedPart
from .part_spec import PartFailed, PartSpec
from .ports import held_ports
from .process import Process, fork_first
from .state_dir import MeshRecord, PartReport, mesh_directory, read_part_state, write_record

KILL_GRACE = 2.0
"""Seconds after the drain timeout within which a part must end before it is killed."""
_MOMENT, _MOST_MOMENTS = 0.1, 10


class Mesh:
    """Owns the parts. Use as ``async with``: entering starts them, leaving kills those that are left."""

    def __init__(
        self,
        specs: Sequence[PartSpec],
        directory: Path,
        output: LineCopier,
        *,
        port: int,
        drain_timeout: float,
        first: Mapping[str, Process] = {},
    ) -> None:
        """``first``: The processes that run already, by the names of their parts."""
        self.parts = [SupervisedPart(spec, output, first.get(spec.name)) for spec in specs]
        self._directory = directory
        self._output = output
        self._port = port
        self._drain_timeout = drain_timeout
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Mesh":
        records = [part.spec.record for part in self.parts]
        write_record(self._directory, MeshRecord(os.getpid(), self._port, records))
        self._keepers = [asyncio.create_task(part.keep(), name=part.spec.name) for part in self.parts]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        while pending := [keeper for keeper in self._keepers if not keeper.done()]:
            await asyncio.wait(pending)

    @property
    def gateways(self) -> Sequence[PartReport]:
        """The states of the running gateways, with their HTTP addresses."""
        return self.states("gateway")

    def states(self, service: str) -> Sequence[PartReport]:
        """Return the states of the running parts of a service."""
        return [part.state for part in self.parts if part.spec.service == service and part.state is not None]

    def fall_backs(self, service: str) -> Sequence[str]:
        """Return what the parts of a service do without by now, each once."""
        states = [read_part_state(part.spec.state_file) for part in self.parts if part.spec.service == service]
        return list(dict.fromkeys(str(each) for state in states if state for each in state.fall_backs))

    async def output_settled(self) -> None:
        """Return when the parts have written nothing for a moment, or after ten such moments."""
        for _ in range(_MOST_MOMENTS):
            if self._output.quiet_seconds() >= _MOMENT:
                return
            await asyncio.sleep(_MOMENT)

    async def wait_serving(self) -> None:
        """Wait until every part is SERVING. Raises `PartFailed` if a part cannot be started."""
        await first_of(self._all_serving(), self.wait_failed())

    async def wait_failed(self) -> None:
        """Wait until a part has failed for good, and raise its error. Never returns."""
        await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
        raise PartFailed("every part has ended")

    async def drain(self) -> bool:
        """Stop the parts, service by service in the order of the layout, so that their last requests can finish.

        Returns True if all parts ended by themselves within the drain timeout, which they share.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        clean = True
        pairs = zip(self.parts, self._keepers, strict=True)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].spec.service):
            members = list(group)
            for part, _ in members:
                part.stop()
            left = max(deadline - loop.time(), 0.0) + KILL_GRACE
            _, late = await asyncio.wait([keeper for _, keeper in members], timeout=left)
            clean = clean and not late
            for part, _ in members:
                part.kill()
        return clean

    def kill(self) -> None:
        """Kill every part."""
        for part in self.parts:
            part.kill()

    async def _all_serving(self) -> None:
        for part in self.parts:
            await part.serving.wait()


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
