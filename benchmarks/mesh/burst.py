"""Runs ``bench overload --burst``: a mesh gets many requests at the same moment, on a machine that is busy already.

What counts is that each request is answered, with tokens or with a refusal that says when to retry, and that no part of
the mesh stops serving its other streams meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

from ..load.http_client import Endpoint
from ..load.open_loop import OpenLoop, Shot, Volley
from ..report.stats import percentile
from .local_mesh import http_url, with_mesh
from .observer import Observer, hogs, longest_turns, process_ids
from .overload import bodies, mesh_options
from .overload_case import OverloadCase, Phase
from .overload_report import Verdict, verdict_table

MAX_TURN_MS = 20.0
_PATIENCE_SECONDS = 120.0
_WARM_UPS = 8


@dataclass(frozen=True)
class BurstCase:
    """Describes one run."""

    num_requests: int
    mesh: OverloadCase
    """The mesh, its engine and the hogs; its rates and times are not used."""
    admits_all: bool = False
    """Whether the gateway lets all of them wait, so that every part behind it gets them at once too."""


def burst_options(model: Path, case: BurstCase) -> MeshOptions:
    """Run the mesh of the overload with a worker that computes each token, and measure the turns of event loops."""
    options = mesh_options(model, case.mesh)
    engine = tuple("hash" if flag == "timed" else flag for flag in options.flags["engine"])
    gateway = options.flags["gateway"]
    if case.admits_all:
        gateway += ("--always-queued", str(case.num_requests))
    return msgspec.structs.replace(
        options,
        flags={"engine": engine, "gateway": gateway},
        common_flags=(*options.common_flags, "--measure-turns"),
    )


async def run_burst(model: Path, case: BurstCase, on_phase: Callable[[str], object]) -> dict[str, Any]:
    """Start a mesh, send all requests at once and stop it. ``on_phase`` is called with the name of each phase."""
    report: dict[str, Any] = {}

    async def work(mesh: Mesh) -> None:
        before = process_ids(mesh)
        client = OpenLoop(Endpoint.of(http_url(mesh), "/v1/completions"), bodies(case.mesh))
        observer = Observer(mesh)
        try:
            on_phase("warm-up")
            await _send(client, _WARM_UPS)
            on_phase(f"{case.num_requests} requests")
            with hogs(case.mesh.hogs):
                phase = await observer.phase("burst", 0.0, _send(client, case.num_requests))
                turns = await longest_turns(mesh)
        finally:
            await client.close()
        restarted = sorted(name for name, pid in process_ids(mesh).items() if before[name] != pid)
        report.update(summarize(case, phase, turns), restarted=restarted, missing=sorted(observer.missing))

    await with_mesh(burst_options(model, case), work)
    return report


async def _send(client: OpenLoop, count: int) -> Volley:
    """Send so many requests at once, and return when all have ended."""
    loop = asyncio.get_running_loop()
    volley = Volley(loop.time())
    for _ in range(count):
        client.send(volley.begun_at, volley)
    await client.settle(_PATIENCE_SECONDS)
    volley.ended_at = loop.time()
    return volley


def summarize(case: BurstCase, phase: Phase, turns: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a run; times in ms."""
    shots = phase.volley.shots
    answered = [shot for shot in shots if shot.complete]
    refused = [shot for shot in shots if shot.refused]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "burst": case.num_requests,
        "admits_all": case.admits_all,
        "hogs": case.mesh.hogs,
        "seconds": round(phase.volley.ended_at - phase.volley.begun_at, 2),
        "answered": len(answered),
        "refused": len(refused),
        "without_retry_after": sum(not shot.retry_after for shot in refused),
        "unanswered": case.num_requests - len(answered) - len(refused),
        "ttft_ms": _spread([shot.first_at - shot.sent_at for shot in answered]),
        "answer_ms": _spread([shot.ended_at - shot.sent_at for shot in answered]),
        "refusal_ms": _spread([shot.ended_at - shot.sent_at for shot in refused]),
        "statuses": _statuses(shots),
        "longest_turn_ms": {name: round(seconds * 1e3, 1) for name, seconds in turns.items()},
        "cores": {name: round(cores, 3) for name, cores in phase.cpu.items()},
    }


def _spread(seconds: Sequence[float]) -> list[float]:
    """Return median, 99th percentile and maximum, in ms."""
    return [round(percentile(seconds, percent) * 1e3, 1) for percent in (50, 99, 100)] if seconds else [0.0] * 3


def _statuses(shots: Sequence[Shot]) -> dict[str, int]:
    """Return how many answers had which status; 0 stands for a connection that failed."""
    found = sorted({shot.status for shot in shots})
    return {str(status): sum(shot.status == status for shot in shots) for status in found}


def tables(report: dict[str, Any]) -> list[Table]:
    """Make the tables of a report: the requests, the event loops, and the verdicts."""
    requests = Table(title=f"{report['burst']:,} requests at once (times in ms)", title_justify="left")
    for column in ("", "requests", "median", "p99", "longest"):
        requests.add_column(column, justify="right")
    for text, count, name in (
        ("refused", "refused", "refusal_ms"),
        ("first token", "answered", "ttft_ms"),
        ("whole answer", "answered", "answer_ms"),
    ):
        requests.add_row(text, f"{report[count]:,}", *(f"{value:,.0f}" for value in report[name]))
    loops = Table(title="Longest turn of an event loop, ms of CPU time", title_justify="left")
    for name in report["longest_turn_ms"]:
        loops.add_column(name, justify="right")
    loops.add_row(*(f"{value:.1f}" for value in report["longest_turn_ms"].values()))
    requests.caption = "Statuses: " + ", ".join(f"{status}: {count:,}" for status, count in report["statuses"].items())
    return [requests, loops, verdict_table(verdicts(report))]


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    """Return what was to be shown."""
    bad = report["restarted"] + report["missing"]
    turn = max(report["longest_turn_ms"].values())
    return [
        ("requests without an answer", str(report["unanswered"]), "0", not report["unanswered"]),
        ("requests answered with tokens", str(report["answered"]), "> 0", report["answered"] > 0),
        ("refusals without Retry-After", str(report["without_retry_after"]), "0", not report["without_retry_after"]),
        ("longest turn of an event loop", f"{turn:g} ms", f"<= {MAX_TURN_MS:g} ms", turn <= MAX_TURN_MS),
        ("parts restarted or missing", ", ".join(bad) or "none", "none", not bad),
    ]
