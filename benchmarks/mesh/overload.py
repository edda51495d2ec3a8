"""Runs ``bench overload``: a mesh at its peak, then at a multiple of it, then at half of it, with open-loop arrivals.

The engine only waits, so its peak is known: ``batch`` requests in the time of ``output_len`` steps. All other work is
real: HTTP, tokenization, placement, tokens to text.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

from ..load.http_client import Endpoint
from ..load.open_loop import OpenLoop, Volley
from ..report import machine
from .local_mesh import http_url, pids_by_service, with_mesh
from .overload_case import OverloadCase, Phase, Phases
from .overload_report import summarize

_NAME = "bench"
_SAMPLE_SECONDS = 5.0
_NUM_BODIES = 128
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
_TEXT = "How much water does a river carry in spring, and where does all of it come from? "


def mesh_options(model: Path, case: OverloadCase) -> MeshOptions:
    """Run one part of each service around one timed engine that has seats for ``case.batch`` requests."""
    engine = {
        "worker": "timed",
        "hash-step-seconds": case.step_ms / 1e3,
        "max-num-seqs": case.batch,
        "max-num-batched-tokens": 8192,
        "num-kv-blocks": case.batch * (case.output_len // 16 + 16) * 2,
    }
    return MeshOptions(
        model=model,
        served_model_name=_NAME,
        port=0,
        drain_timeout=5.0,
        flags={
            "engine": tuple(text for name, value in engine.items() for text in (f"--{name}", str(value))),
            "gateway": ("--max-queue-seconds", str(case.max_queue_seconds)),
        },
        common_flags=("--log-level", "warning"),
    )


async def run_case(model: Path, case: OverloadCase, on_phase: Callable[[str], object]) -> dict[str, Any]:
    """Start a mesh, run all phases and stop it. ``on_phase`` is called with the name of each phase."""
    report: dict[str, Any] = {}

    async def work(mesh: Mesh) -> None:
        before = _process_ids(mesh)
        phases = await _run_phases(mesh, case, on_phase)
        restarted = sorted(name for name, pid in _process_ids(mesh).items() if before[name] != pid)
        report.update(summarize(case, phases), restarted=restarted, missing=phases.missing)

    await with_mesh(mesh_options(model, case), work)
    return report


async def _run_phases(mesh: Mesh, case: OverloadCase, on_phase: Callable[[str], object]) -> Phases:
    endpoint = Endpoint.of(http_url(mesh), "/v1/completions")
    client = OpenLoop(endpoint, _bodies(case))
    observer = _Observer(mesh)
    peak_rate, over_rate = case.peak_rate, case.peak_rate * case.times
    try:
        # The first seconds fill the batch, and the engine measures its queue.
        on_phase("warm-up")
        await client.run(1.5 * peak_rate, max(case.peak_seconds / 3, 2.0), case.seed)
        on_phase("peak")
        peak = await observer.phase("peak", peak_rate, client.run(peak_rate, case.peak_seconds, case.seed + 1))
        on_phase(f"{case.times:g}x")
        with hogs(case.hogs):
            run = client.run(over_rate, case.seconds, case.seed + 2)
            overload = await observer.phase(f"{case.times:g}x", over_rate, run)
        on_phase("recovery")
        run = client.run(peak_rate / 2, case.recovery_seconds, case.seed + 3)
        recovery = await observer.phase("recovery", peak_rate / 2, run)
    finally:
        await client.close()
    return Phases(peak, overload, recovery, sorted(observer.missing))


def _bodies(case: OverloadCase) -> list[tuple[bytes, int]]:
    """Return bodies whose answers have half to one and a half of the usual length, so that they do not end together."""
    lengths = [max(case.output_len * (_NUM_BODIES // 2 + number) // _NUM_BODIES, 1) for number in range(_NUM_BODIES)]
    random.Random(case.seed).shuffle(lengths)
    return [
        (
            msgspec.json.encode(
                {
                    "model": _NAME,
                    "prompt": f"{number}: {_TEXT}",
                    "max_tokens": length,
                    "ignore_eos": True,
                    "stream": True,
                }
            ),
            length,
        )
        for number, length in enumerate(lengths)
    ]


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


def _process_ids(mesh: Mesh) -> dict[str, int]:
    return {part.spec.name: part.state.pid if part.state is not None else 0 for part in mesh.parts}


class _Observer:
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
    """Return the parts that the gateway's metrics report as missing; the gateway itself if it does not answer."""
    url = urlsplit(http_url(mesh))
    try:
        async with asyncio.timeout(10.0):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            page = (await reader.read()).decode()
            writer.close()
    except (OSError, TimeoutError):
        return {"gateway"}
    marks = (line for line in page.splitlines() if line.startswith("tokenloom_part_missing{") and line.endswith(" 1.0"))
    return {line.partition('part="')[2].partition('"')[0] for line in marks}
