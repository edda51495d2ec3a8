"""``tokenloom bench overload`` measures a mesh that gets more requests than it can answer."""

import asyncio
from typing import Annotated, Any

import typer

from tokenloom.bench.mesh import burst as burst_bench
from tokenloom.bench.mesh import overload as overload_bench
from tokenloom.bench.mesh import overload_report
from tokenloom.bench.mesh.burst import BurstCase
from tokenloom.bench.mesh.overload_case import OverloadCase
from tokenloom.bench.report import machine
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from ..mesh.model_directory import model_directory
from .bench_load import AsJson, OutputJson
from .bench_output import failures, show

_DEFAULTS = OverloadCase()


def overload(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of overload.")] = _DEFAULTS.seconds,
    times: Annotated[float, typer.Option(min=1, help="The overload, as a multiple of the peak.")] = _DEFAULTS.times,
    peak_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds at the peak, for comparison.")
    ] = _DEFAULTS.peak_seconds,
    recovery_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds at half of the peak afterwards.")
    ] = _DEFAULTS.recovery_seconds,
    step_ms: Annotated[float, typer.Option(min=1, help="Milliseconds that a step waits.")] = _DEFAULTS.step_ms,
    batch: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.")] = _DEFAULTS.batch,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = _DEFAULTS.output_len,
    max_queue_seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds that the gateway lets a request wait.")
    ] = _DEFAULTS.max_queue_seconds,
    hogs: Annotated[
        int, typer.Option("--hogs", "--hog", min=0, help="Processes that take all the CPU they get meanwhile.")
    ] = _DEFAULTS.hogs,
    burst: Annotated[
        int, typer.Option(min=0, help="Send so many requests at once instead of all that; the times have no effect.")
    ] = 0,
    admit_all: Annotated[bool, typer.Option("--admit-all", help="Let all requests of the burst wait.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = _DEFAULTS.seed,
    model: Annotated[str, typer.Option(help="Checkpoint whose tokenizer is used.")] = DEMO_MODEL_NAME,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Run a local mesh at its peak, at a multiple of it and at half of it; measure goodput, refusals and recovery."""
    path, _ = model_directory(model, None)
    case = OverloadCase(
        seconds,
        times,
        peak_seconds,
        recovery_seconds,
        step_ms,
        batch,
        output_len,
        max_queue_seconds,
        hogs,
        seed,
    )

    def on_phase(name: str) -> None:
        typer.echo(f"{name} …", err=True)

    report: dict[str, Any] = {"machine": machine.describe()}
    with failures():
        if burst:
            report |= asyncio.run(burst_bench.run_burst(path, BurstCase(burst, case, admit_all), on_phase))
            tables, verdicts = burst_bench.tables(report), burst_bench.verdicts(report)
        else:
            report |= asyncio.run(overload_bench.run_case(path, case, on_phase))
            tables, verdicts = overload_report.tables(report), overload_report.verdicts(report)
    show(report, tables, as_json=as_json, path=output_json)
    raise typer.Exit(0 if all(is_met for *_, is_met in verdicts) else 1)
