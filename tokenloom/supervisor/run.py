"""Runs work with a local mesh; a first signal drains the mesh, a second one kills it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from .layout import MeshOptions, parts_of
from .mesh import Mesh
from .output import LineCopier
from .ports import held_ports
from .state_dir import mesh_directory

Work = Callable[[Mesh], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Outcome:
    """How the run ended."""

    interrupted: bool
    """A signal ended it, not the return of the work."""
    clean: bool
    """Every part ended by itself; none had to be killed."""


async def run_mesh(options: MeshOptions, output: LineCopier, work: Work) -> Outcome:
    """Start a mesh, run `work` until it returns or a signal arrives, then drain the mesh.

    Exceptions of `work` are raised again after every part has ended. Raises `PortTaken` before any part starts.
    """
    held = held_ports(options.host, options.gateways, options.port, options.grpc_port)
    with held as ports, mesh_directory() as directory, contextlib.closing(output):
        parts, timeout = parts_of(options, directory, ports), options.drain_timeout
        mesh = Mesh(parts, directory, output, port=ports[0].http, drain_timeout=timeout)
        return await supervise(mesh, work)


async def supervise(mesh: Mesh, work: Work) -> Outcome:
    """Do the same for a given mesh."""
    interrupted = asyncio.Event()
    with _signals(interrupted, mesh.kill):
        async with mesh:
            await _until(interrupted, asyncio.create_task(work(mesh)))
            return Outcome(clean=await mesh.drain(), interrupted=interrupted.is_set())


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
    """Make SIGINT, SIGTERM and SIGHUP (a closed terminal) set `first`; a further signal calls `second`."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

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
