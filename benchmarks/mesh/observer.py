"""Watches a mesh from outside while a benchmark loads it: CPU, memory, parts that are missing, turns of event loops."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any
from urllib.parse import urlsplit

from tokenloom.supervisor.mesh import Mesh

from ..load.open_loop import Volley
from ..report import machine
from .local_mesh import http_url, pids_by_service
from .overload_case import Phase

_SAMPLE_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_LONGEST_TURN = "tokenloom_event_loop_longest_turn_seconds "
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Run processes that take all the CPU they get."""
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def process_ids(mesh: Mesh) -> dict[str, int]:
    """Return the process of each part; 0 for one that is down."""
    return {part.spec.name: part.state.pid if part.state is not None else 0 for part in mesh.parts}


async def longest_turns(mesh: Mesh) -> dict[str, float]:
    """Return the longest turn of each part's event loop, in CPU seconds. The parts need ``--measure-turns``."""
    turns = {}
    for part in mesh.parts:
        if part.state is not None and part.state.metrics:
            page = await metrics_page(part.state.metrics)
            values = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(_LONGEST_TURN)]
            turns[part.spec.name] = float(values[0])
    return turns


class Observer:
    """Watches the mesh during the phases.

    Attributes:
        missing: Parts that a gateway's health page has named.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.missing: set[str] = set()

    async def phase(self, name: str, rate: float, run: Coroutine[Any, Any, Volley]) -> Phase:
        """Run a volley and measure the mesh meanwhile."""
        cpu, own, began = machine.ServiceCpu(pids_by_service(self._mesh)), time.process_time(), time.monotonic()
        phase = Phase(name, rate, Volley(0.0), {}, 0.0)
        watch = asyncio.create_task(self._watch(phase))
        try:
            phase.volley = await run
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        self._sample(phase, began)
        seconds = time.monotonic() - began
        phase.cpu = {service: used / seconds for service, used in cpu.used().items()}
        phase.client_cores = (time.process_time() - own) / seconds
        return phase

    async def _watch(self, phase: Phase) -> None:
        began = time.monotonic()
        while True:
            self._sample(phase, began)
            self.missing |= await _missing_parts(self._mesh)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _sample(self, phase: Phase, began: float) -> None:
        phase.resident.append((time.monotonic() - began, machine.resident_mib(pids_by_service(self._mesh))))


async def _missing_parts(mesh: Mesh) -> set[str]:
    """Return the parts that the gateway's metrics report as missing; the gateway itself if its port for clients does
    not answer."""
    try:
        page = await metrics_page(urlsplit(http_url(mesh)).netloc)
    except (OSError, TimeoutError):
        return {"gateway"}
    marks = (line for line in page.splitlines() if line.startswith("tokenloom_part_missing{") and line.endswith(" 1.0"))
    return {line.partition('part="')[2].partition('"')[0] for line in marks}


async def metrics_page(address: str) -> str:
    """Return what ``GET /metrics`` answers at ``host:port``."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = await reader.read()
        writer.close()
    return page.decode()
