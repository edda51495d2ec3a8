"""Runs ``bench mesh --idle``: a mesh that has answered requests and now has none should use no processor."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.supervisor.mesh import Mesh

from ..load.arrivals import Pace, run_load
from ..load.bodies import CompletionBody
from ..load.datasets import DatasetOptions, make_prompts
from ..load.http_client import Client, Endpoint
from ..report import machine
from .local_mesh import http_url, with_mesh
from .mesh import MeshCase, mesh_options

MOST_CORES = 0.02
"""What a part may use, with the processes that it started."""
_SETTLE_SECONDS = 5.0
_WARM_UPS = 4
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class IdleCase:
    """Describes one run."""

    seconds: float = 10.0
    """How long the mesh is observed."""
    prefill: int = 0
    decode: int = 0
    """Engines that compute only prompts, and only outputs; 0: one engine for both."""

    @property
    def mesh(self) -> MeshCase:
        """The mesh, whose engine waits for 1 ms in each step."""
        tokens = _WARM_UP_TOKENS
        return MeshCase(1.0, _WARM_UPS, input_len=tokens, output_len=tokens, prefill=self.prefill, decode=self.decode)


async def run_idle(model: Path, case: IdleCase) -> dict[str, Any]:
    """Start a mesh, have requests answered, and observe it without any."""
    size = load_tokenizer(model).get_vocab_size(with_added_tokens=True)
    tokens = _WARM_UP_TOKENS
    prompts = make_prompts(DatasetOptions(num_prompts=_WARM_UPS, input_len=tokens, output_len=tokens), size)
    name = mesh_options(model, case.mesh).served_model_name
    body = CompletionBody(name, {"temperature": 0, "ignore_eos": True})
    report: dict[str, Any] = {}

    async def work(mesh: Mesh) -> None:
        async with Client(Endpoint.of(http_url(mesh), "/v1/completions"), body) as client:
            await run_load(client, prompts, Pace())  # so that whatever begins with the first request has begun
        await asyncio.sleep(_SETTLE_SECONDS)
        cpu, began = machine.ServiceCpu(_pids_by_part(mesh)), time.monotonic()
        await asyncio.sleep(case.seconds)
        report.update(summarize(cpu.used(), time.monotonic() - began))

    await with_mesh(mesh_options(model, case.mesh), work)
    return report


def summarize(cpu_seconds: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Report the cores that each part used, and the parts that used too much."""
    cores = {part: round(used / seconds, 4) for part, used in cpu_seconds.items()}
    busy = [part for part, used in cores.items() if used >= MOST_CORES]
    return {"seconds": round(seconds, 2), "cores": cores, "all": round(sum(cores.values()), 4), "busy": busy}


def table(report: dict[str, Any]) -> Table:
    """Make a table with a row for each part."""
    title = f"Cores used without requests, over {report['seconds']:g} s (at most {MOST_CORES:g} for each part)"
    shown = Table(title=title, title_justify="left", title_style="bold")
    shown.add_column("part")
    shown.add_column("cores", justify="right")
    for part, used in (*report["cores"].items(), ("all", report["all"])):
        shown.add_row(part, f"{used:.4f}")
    return shown


def _pids_by_part(mesh: Mesh) -> dict[str, list[int]]:
    return {part.spec.name: [part.state.pid] for part in mesh.parts if part.state is not None}
