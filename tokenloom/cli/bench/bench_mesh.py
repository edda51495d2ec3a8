"""``tokenloom bench mesh`` measures the cost of the services around an engine."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tokenloom.bench.mesh import idle as idle_bench
from tokenloom.bench.mesh import mesh as mesh_bench
from tokenloom.bench.mesh.idle import IdleCase
from tokenloom.bench.report import machine
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from ..mesh.model_directory import model_directory
from .bench_load import AsJson, OutputJson
from .bench_output import bars, failures, show

_STEPS_MS, _BATCHES = [4.0, 10.0, 20.0], [64, 256]


def mesh(
    step_ms: Annotated[
        list[float] | None, typer.Option(min=0, help="Milliseconds that a step waits; 0: no wait. [default: 4, 10, 20]")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Concurrent streams. [default: 64, 256]")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate seconds of each run.")] = 10.0,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 16,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    async_scheduling: Annotated[
        bool, typer.Option("--async-scheduling", help="Let the engine schedule the next step while one runs.")
    ] = False,
    frame_interval: Annotated[
        float | None,
        typer.Option(min=0, help="Least seconds between an engine's frames; by default the engine's setting."),
    ] = None,
    waiting: Annotated[int, typer.Option(min=0, help="Waiting requests, which keep the batch full when one ends.")] = 0,
    prefill: Annotated[
        int, typer.Option(min=0, help="Prefill engines; with --decode, instead of one engine for both.")
    ] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode engines, each with --batch requests at once.")] = 0,
    idle: Annotated[
        bool, typer.Option("--idle", help="Measure the cores that a mesh without requests uses, part by part, instead.")
    ] = False,
    model: Annotated[str, typer.Option(help="Checkpoint whose tokenizer is used.")] = DEMO_MODEL_NAME,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Run a local mesh whose engine only waits; measure added latency, tokens/s, and CPU per token by service."""
    if bool(prefill) != bool(decode):
        raise typer.BadParameter("--prefill and --decode need each other")
    path, _ = model_directory(model, None)
    if idle:
        _measure_idle(path, IdleCase(seconds, prefill, decode), as_json=as_json, output_json=output_json)
    reports = []
    with failures(), bars() as bar:
        for ms in step_ms or _STEPS_MS:
            for size in batch or _BATCHES:
                case = mesh_bench.MeshCase(
                    ms, size, seconds, input_len, output_len, async_scheduling, frame_interval, waiting, prefill, decode
                )
                reports.append(asyncio.run(mesh_bench.run_case(path, case, partial(bar, case.title))))
    report = {"machine": machine.describe(), "cases": reports}
    show(report, mesh_bench.tables(reports), as_json=as_json, path=output_json)
    raise typer.Exit(1 if any(case["failed"] for case in reports) else 0)


def _measure_idle(model: Path, case: IdleCase, *, as_json: bool, output_json: Path | None) -> NoReturn:
    with failures():
        report = {"machine": machine.describe(), **asyncio.run(idle_bench.run_idle(model, case))}
    show(report, [idle_bench.table(report)], as_json=as_json, path=output_json)
    raise typer.Exit(1 if report["busy"] else 0)
