"""Runs ``bench mesh``: an engine whose steps only wait, so that all other time is spent by the mesh."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

from ..load.arrivals import Done, LoadResult, Pace, run_load
from ..load.bodies import CompletionBody
from ..load.datasets import DatasetOptions, make_prompts
from ..load.events import Outcome
from ..load.http_client import Client, Endpoint
from ..report import machine
from ..report.bar_plot import write_stacks
from ..report.stats import Distribution
from .local_mesh import http_url, pids_by_service, with_mesh

_NAME = "bench"
_FLAT_OUT_TOKENS = 40_000
"""The tokens a second for which a run without a wait is sized."""
_LEAST_REQUESTS = 2
"""Requests in each place of the batch."""


@dataclass(frozen=True)
class MeshCase:
    """Describes one run."""

    step_ms: float
    """0: the steps do not wait."""
    batch: int
    """How many requests stream at once."""
    seconds: float = 10.0
    """About how long the run takes."""
    input_len: int = 16
    output_len: int = 256
    async_scheduling: bool = False
    frame_interval: float | None = None
    """The engine's setting; None: its default."""
    waiting: int = 0
    """Requests beyond the batch. Without them a place stays empty from one request's end to the next one's first
    step."""
    prefill: int = 0
    decode: int = 0
    """Engines that compute only prompts, and only outputs, with ``batch`` requests in each; 0: one engine for both."""

    @property
    def num_streams(self) -> int:
        """How many requests are in flight."""
        return self.batch + self.waiting

    @property
    def num_prompts(self) -> int:
        rate = self.batch / self.step_ms * 1e3 if self.step_ms else _FLAT_OUT_TOKENS
        return max(_LEAST_REQUESTS * self.num_streams, round(rate * self.seconds / self.output_len))

    @property
    def title(self) -> str:
        return f"{self.step_ms:g} ms, batch {self.batch}" if self.step_ms else f"flat out, batch {self.batch}"


def mesh_options(model: Path, case: MeshCase) -> MeshOptions:
    """Run one part of each service around one timed engine that always has room."""
    blocks = case.batch * (case.input_len + 2 * case.output_len) // 16 + 256
    engine = {
        "worker": "timed",
        "hash-step-seconds": case.step_ms / 1e3,
        "max-num-seqs": case.batch,
        "max-num-batched-tokens": 8192,
        "prefill-tokens-beside-decode": 8192,
        "num-kv-blocks": 2 * blocks,
    }
    flags = tuple(text for name, value in engine.items() for text in (f"--{name}", str(value)))
    if case.async_scheduling:
        flags += ("--async-scheduling",)
    if case.frame_interval is not None:
        flags += ("--frame-interval", str(case.frame_interval))
    return MeshOptions(
        model=model,
        served_model_name=_NAME,
        port=0,
        drain_timeout=5.0,
        flags={
            "engine": flags,
            "coordinator": ("--pd-threshold", "0") if case.prefill else (),
            "gateway": ("--always-queued", str(case.num_streams)),  # the requests that wait are part of the case
        },
        prefill=case.prefill,
        decode=case.decode,
        common_flags=("--log-level", "warning"),
    )


async def run_case(model: Path, case: MeshCase, on_start: Callable[[int], Done]) -> dict[str, Any]:
    """Start a mesh, load it and stop it. ``on_start`` maps the number of requests to a callback for each end."""
    prompts = make_prompts(
        DatasetOptions(
            num_prompts=case.num_prompts, input_len=case.input_len, output_len=case.output_len, range_ratio=0.25
        ),
        load_tokenizer(model).get_vocab_size(with_added_tokens=True),
    )
    body = CompletionBody(_NAME, {"temperature": 0, "ignore_eos": True, "return_timeline": True})
    pace = Pace(max_concurrency=case.num_streams, ramp_up=min(1.0, case.seconds / 4))
    report: dict[str, Any] = {}

    async def work(mesh: Mesh) -> None:
        async with Client(Endpoint.of(http_url(mesh), "/v1/completions"), body) as client:
            await run_load(client, prompts[: case.num_streams], Pace())  # warm every part up
            cpu, load = machine.ServiceCpu(pids_by_service(mesh)), machine.Load()
            result = await run_load(client, prompts, pace, on_start(len(prompts)))
            used, memory = cpu.used(), machine.resident_mib(pids_by_service(mesh))
            report.update(summarize(case, result, used, memory), **load.cores())

    await with_mesh(mesh_options(model, case), work)
    return report


def summarize(
    case: MeshCase, result: LoadResult, cpu_seconds: dict[str, float], resident_mib: dict[str, float]
) -> dict[str, Any]:
    """Report what the mesh added, in ms, and the CPU of a token by service, in µs."""
    good = [outcome for outcome in result.outcomes if not outcome.error]
    tokens = sum(outcome.output_tokens for outcome in good)
    report: dict[str, Any] = {
        "step_ms": case.step_ms,
        "batch": case.batch,
        "waiting": case.waiting,
        "async_scheduling": case.async_scheduling,
        "prefill": case.prefill,
        "decode": case.decode,
        "frame_interval": case.frame_interval,
        "duration": round(result.seconds, 3),
        "failed": len(result.outcomes) - len(good),
        "output_tokens": tokens,
        "output_throughput": round(tokens / result.seconds, 1),
        "steady_throughput": round(steady_rate(good), 1),
        "tokens_per_event": round(tokens / max(1, sum(1 + len(outcome.itl) for outcome in good)), 3),
        "resident_mib": resident_mib,
        "cpu_us_per_token": {name: round(used / max(tokens, 1) * 1e6, 2) for name, used in cpu_seconds.items()},
    }
    report["cpu_us_per_token"]["all"] = round(sum(cpu_seconds.values()) / max(tokens, 1) * 1e6, 2)
    if case.step_ms:
        report["ideal_throughput"] = round(case.batch / case.step_ms * 1e3, 1)
    for name, values in added_ms(case, good).items():
        report |= Distribution.of(values).fields(name)
    report["lag_ms_by_quarter"] = lag_by_quarter(good)
    if errors := sorted({outcome.error for outcome in result.outcomes if outcome.error}):
        report["errors"] = errors[:5]
    return report


def steady_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the tokens a second while the batch was full: from the first end of a request to the last start."""
    begin = min((outcome.start + outcome.latency for outcome in outcomes), default=0.0)
    end = max((outcome.start for outcome in outcomes), default=0.0)
    if end <= begin:
        return 0.0
    tokens = 0.0
    for outcome in outcomes:
        times = itertools.accumulate(outcome.itl, initial=outcome.start + outcome.ttft)
        tokens += sum(begin < now <= end for now in times) * outcome.output_tokens / (1 + len(outcome.itl))
    return tokens / (end - begin)


def added_ms(case: MeshCase, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the time beyond the engine core's own: to the first token, between tokens, and at the end of the answer,
    where a lag that grows over a run shows."""
    timed = [outcome for outcome in outcomes if outcome.timeline]
    return {
        "added_ttft_ms": [o.ttft * 1e3 - _engine_ms(o, "queued_ms", "prefill_ms") for o in timed],
        "added_itl_ms": [seconds * 1e3 - case.step_ms for o in outcomes for seconds in o.itl],
        "lag_ms": [_lag_ms(o) for o in timed],
    }


def lag_by_quarter(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the median lag at the end of the answers, in the order of their ends: it grows if the mesh does not keep
    up."""
    ended = sorted((o for o in outcomes if o.timeline), key=lambda o: o.start + o.latency)
    quarters = [ended[len(ended) * i // 4 : len(ended) * (i + 1) // 4] for i in range(4)]
    return [round(statistics.median(map(_lag_ms, quarter)), 3) for quarter in quarters if quarter]


def _lag_ms(outcome: Outcome) -> float:
    return outcome.latency * 1e3 - _engine_ms(outcome, "queued_ms", "prefill_ms", "decode_ms")


def _engine_ms(outcome: Outcome, *names: str) -> float:
    return sum(float(outcome.timeline[name]) for name in names)


def tables(reports: Sequence[dict[str, Any]]) -> list[Table]:
    """Make the tables of latency and throughput, then of CPU and memory by service."""
    latency = Table(title="What the mesh adds, ms (median / p99)", title_justify="left", title_style="bold")
    for column in ("step", "batch", "tokens/s", "ideal", "tokens/event", "first token", "between", "at the end"):
        latency.add_column(column, justify="right")
    for report in reports:
        cells = [_pair(report, name) for name in ("added_ttft_ms", "added_itl_ms", "lag_ms")]
        ideal = f"{report['ideal_throughput']:,.0f}" if report["step_ms"] else "-"
        step = f"{report['step_ms']:g} ms" if report["step_ms"] else "none"
        rate, per_event = f"{report['steady_throughput']:,.0f}", f"{report['tokens_per_event']:.2f}"
        latency.add_row(step, str(report["batch"]), rate, ideal, per_event, *cells)
    services = [name for name in reports[0]["cpu_us_per_token"] if name != "all"]
    cpu = Table(title="CPU per token, µs", title_justify="left", title_style="bold")
    for column in ("step", "batch", *services, "all"):
        cpu.add_column(column.replace("_", " "), justify="right")
    for report in reports:
        per_token = report["cpu_us_per_token"]
        step = f"{report['step_ms']:g} ms" if report["step_ms"] else "none"
        cpu.add_row(step, str(report["batch"]), *(f"{per_token[name]:.1f}" for name in (*services, "all")))
    return [latency, cpu, _memory(reports, services)]


def write_plot(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Draw the CPU of a token, by service, of each run."""
    rows = {}
    for report in reports:
        step = f"{report['step_ms']:g} ms" if report["step_ms"] else "no wait"
        costs = {name.replace("_", " "): used for name, used in report["cpu_us_per_token"].items() if name != "all"}
        rows[f"{step}, {report['batch']}"] = costs
    write_stacks(path, rows, "µs", "CPU of a token, by step and batch")


def _memory(reports: Sequence[dict[str, Any]], services: Sequence[str]) -> Table:
    table = Table(title="Resident memory, MiB (largest of all runs)", title_justify="left", title_style="bold")
    for name in services:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{max(report['resident_mib'][name] for report in reports):.0f}" for name in services))
    return table


def _pair(report: dict[str, Any], name: str) -> str:
    median, p99 = report[f"median_{name}"], report[f"p99_{name}"]
    return "-" if median is None else f"{median:.2f} / {p99:.2f}"
