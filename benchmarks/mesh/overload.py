"""Runs ``bench overload``: a mesh at its peak, then at a multiple of it, then at half of it, with open-loop arrivals.

The engine only waits, so its peak is known: ``batch`` requests in the time of ``output_len`` steps. All other work is
real: HTTP, tokenization, placement, tokens to text.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

from ..load.http_client import Endpoint
from ..load.open_loop import OpenLoop
from .local_mesh import http_url, with_mesh
from .observer import Observer, hogs, process_ids
from .overload_case import OverloadCase, Phases
from .overload_report import summarize

_NAME = "bench"
_NUM_BODIES = 128
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
        before = process_ids(mesh)
        phases = await _run_phases(mesh, case, on_phase)
        restarted = sorted(name for name, pid in process_ids(mesh).items() if before[name] != pid)
        report.update(summarize(case, phases), restarted=restarted, missing=phases.missing)

    await with_mesh(mesh_options(model, case), work)
    return report


async def _run_phases(mesh: Mesh, case: OverloadCase, on_phase: Callable[[str], object]) -> Phases:
    endpoint = Endpoint.of(http_url(mesh), "/v1/completions")
    client = OpenLoop(endpoint, bodies(case))
    observer = Observer(mesh)
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


def bodies(case: OverloadCase) -> list[tuple[bytes, int]]:
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
