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

from .control import served
from .layout import MeshOptions, engines_of, parts_of, relay_ports, with_size_of, write_meshes
from .output import LineCopier
from .part import SupervisedPart
from .part_spec import PartFailed, PartSpec
from .ports import held_ports
from .process import Process, Starter, fork_first
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
        starter: Starter | None = None,
        engines_of: Callable[[int], Sequence[PartSpec]] | None = None,
    ) -> None:
        """``first``: The processes that run already, by the names of their parts. ``starter``: starts the others; None:
        each is a new one. ``engines_of``: returns the
        specifications of so many engines, or raises ``ValueError``; None: their number does not change."""
        self._starter = starter or Starter(output)
        self.parts = [SupervisedPart(spec, output, first.get(spec.name), self._starter) for spec in specs]
        self.directory = directory
        self._output = output
        self._port = port
        self._drain_timeout = drain_timeout
        self._engines_of = engines_of
        self._is_draining = False
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Mesh":
        self._write_record()
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
        self._is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        clean = True
        # A copy: engines that a change of their number stops leave the lists meanwhile.
        pairs = list(zip(self.parts, self._keepers, strict=True))
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

    async def resize_engines(self, count: int, *, serving: bool) -> tuple[list[str], list[str]]:
        """Start engines, or stop those with the highest numbers, until there are ``count``. Returns the names of those
        that were started, with ``serving`` when they serve; and of those that have ended, after their requests.

        Raises ``ValueError`` if the number cannot change, `PartFailed` if an engine cannot be started; those that were
        started with it are stopped.
        """
        if self._engines_of is None or self._is_draining:
            raise ValueError("the number of engines of this mesh does not change, or it is about to end")
        specs = self._engines_of(count)
        places = [at for at, part in enumerate(self.parts) if part.spec.service == "engine"]
        for at, spec in zip(places, specs, strict=False):  # a rank that is started again finds a group of this size
            self.parts[at].spec = with_size_of(self.parts[at].spec, spec)
        if (more := specs[len(places) :]) and places:
            return [spec.name for spec in await self._add(more, places[-1] + 1, serving=serving)], []
        leaving = [self.parts[at] for at in places[count:]]
        await self._remove(leaving)
        return [], [part.spec.name for part in leaving]

    def crash_engine(self) -> SupervisedPart:
        """Kill an engine without a drain, as a failure would, and return it; it is started again. It is one that
        decodes, if there is one.

        Raises ``ValueError`` if fewer than two engines serve: no other one could go on with the answers.
        """
        serving = [part for part in self.parts if part.spec.service == "engine" and part.serving.is_set()]
        if len(serving) < 2:
            raise ValueError(f"{len(serving)} of the engines serve now, but two must; wait until one has restarted")
        chosen = next((part for part in serving if part.spec.role == "decode"), serving[-1])
        chosen.crash()
        return chosen

    async def _add(self, specs: Sequence[PartSpec], place: int, *, serving: bool) -> Sequence[PartSpec]:
        parts = [SupervisedPart(spec, self._output, None, self._starter) for spec in specs]
        keepers = [asyncio.create_task(part.keep(), name=part.spec.name) for part in parts]
        self.parts[place:place] = parts  # beside the other engines, with which they are drained
        self._keepers[place:place] = keepers
        try:
            self._write_record()
            for part, keeper in zip(parts, keepers, strict=True):
                if serving:
                    await _serves(part, keeper)
        except BaseException:
            await self._remove(parts)
            raise
        return specs

    async def _remove(self, leaving: Sequence[SupervisedPart]) -> None:
        """Stop parts, wait until they have ended, and forget them."""
        keepers = [keeper for part, keeper in zip(self.parts, self._keepers, strict=True) if part in leaving]
        for part in leaving:
            part.stop()
        if keepers:
            await asyncio.wait(keepers, timeout=self._drain_timeout + KILL_GRACE)
        for part in leaving:
            part.kill()
        if keepers:
            await asyncio.wait(keepers)
        left = [pair for pair in zip(self.parts, self._keepers, strict=True) if pair[0] not in leaving]
        self.parts[:], self._keepers[:] = [part for part, _ in left], [keeper for _, keeper in left]
        self._write_record()

    def _write_record(self) -> None:
        records = [part.spec.record for part in self.parts]
        write_record(self.directory, MeshRecord(os.getpid(), self._port, records))

    def kill(self) -> None:
        """Kill every part."""
        for part in self.parts:
            part.kill()

    async def _all_serving(self) -> None:
        for part in list(self.parts):
            await part.serving.wait()


async def _serves(part: SupervisedPart, keeper: "asyncio.Task[None]") -> None:
    """Wait until a part serves. Raises `PartFailed` if it cannot be started, or is stopped before."""
    while not part.serving.is_set():
        await asyncio.wait((keeper,), timeout=_MOMENT)
        if keeper.done():
            keeper.result()
            raise PartFailed(f"{part.spec.name} was stopped before it served")


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
        first, starter = fork_first(plan.specs, output, has_standby=bool(options.standby))
        with contextlib.closing(starter):
            return asyncio.run(supervise(plan.mesh(first, starter), work))


async def run_mesh_in_loop(options: MeshOptions, output: LineCopier, work: Work) -> MeshOutcome:
    """Do the same within an event loop; every process is started anew."""
    with _planned(options, output) as plan:
        return await supervise(plan.mesh({}), work)


async def supervise(mesh: Mesh, work: Work) -> MeshOutcome:
    """Run `work` with a given mesh in the same way, within an event loop."""
    interrupted = asyncio.Event()
    with _signals(interrupted, mesh.kill):
        async with mesh, served(mesh.resize_engines, lambda: mesh.crash_engine().spec.name, mesh.directory):
            await _until(interrupted, asyncio.create_task(work(mesh)))
            return MeshOutcome(clean=await mesh.drain(), interrupted=interrupted.is_set())


@dataclass(frozen=True)
class _Plan:
    specs: Sequence[PartSpec]
    directory: Path
    output: LineCopier
    port: int
    options: MeshOptions

    def mesh(self, first: Mapping[str, Process], starter: Starter | None = None) -> Mesh:
        return Mesh(
            self.specs,
            self.directory,
            self.output,
            port=self.port,
            drain_timeout=self.options.drain_timeout,
            first=first,
            starter=starter,
            engines_of=lambda count: engines_of(self.options, self.directory, count),
        )


@contextlib.contextmanager
def _planned(options: MeshOptions, output: LineCopier) -> Iterator[_Plan]:
    held = held_ports(options.gateway_host, options.gateways, options.port, options.grpc_port)
    with held as ports, relay_ports(options) as of_relays, mesh_directory() as directory, contextlib.closing(output):
        write_meshes(options, directory)
        yield _Plan(parts_of(options, directory, ports, of_relays), directory, output, ports[0].http, options)


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
