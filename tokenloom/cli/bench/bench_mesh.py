"""Benchmarks of the services around an engine: ``tokenloom bench mesh``, ``overload``, ``scale`` and ``agents``."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from tokenloom.bench.load.agent_sessions import AgentClient
from tokenloom.bench.mesh import agents as agents_bench
from tokenloom.bench.mesh import agents_report, overload_report
from tokenloom.bench.mesh import burst as burst_bench
from tokenloom.bench.mesh import idle as idle_bench
from tokenloom.bench.mesh import mesh as mesh_bench
from tokenloom.bench.mesh import overload as overload_bench
from tokenloom.bench.mesh.agents import AgentsCase, AgentWorker, Placement, Policy
from tokenloom.bench.mesh.burst import BurstCase
from tokenloom.bench.mesh.idle import IdleCase
from tokenloom.bench.mesh.overload_case import OverloadCase
from tokenloom.bench.report import machine
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from ..model_directory import model_directory
from .bench_output import AsJson, OutputJson, bars, failures, progress, show

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
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart of CPU per token to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a local mesh whose engine only waits; measure added latency, tokens/s, and CPU per token by service."""
    if bool(prefill) != bool(decode):
        raise typer.BadParameter("--prefill and --decode need each other")
    if idle and plot is not None:
        raise typer.BadParameter("--plot draws the CPU per token, which --idle does not measure", param_hint="--plot")
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
    if plot is not None:
        mesh_bench.write_plot(plot, reports)
    report = {"machine": machine.describe(), "cases": reports}
    show(report, mesh_bench.tables(reports), as_json=as_json, path=output_json)
    raise typer.Exit(1 if any(case["failed"] for case in reports) else 0)


def _measure_idle(model: Path, case: IdleCase, *, as_json: bool, output_json: Path | None) -> NoReturn:
    with failures():
        report = {"machine": machine.describe(), **asyncio.run(idle_bench.run_idle(model, case))}
    show(report, [idle_bench.table(report)], as_json=as_json, path=output_json)
    raise typer.Exit(1 if report["busy"] else 0)


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


def scale(
    engines: Annotated[
        list[int] | None,
        typer.Argument(metavar="[ENGINES]...", min=1, help="Numbers of fake engines. [default: 10, 100, 1000]"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each measurement.")] = 10.0,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Run a coordinator with fake engines and output processors that follow it; kill it, and see the engines rejoin."""
    from tokenloom.bench.scale import scale as scale_bench  # gRPC and the services

    counts = engines or scale_bench.ENGINES
    with failures(), progress() as bars:
        task = bars.add_task("meshes", total=len(counts))
        report = scale_bench.run(counts, seconds, lambda: bars.advance(task))
    show(report, [scale_bench.table(report)], as_json=as_json, path=output_json)
    raise typer.Exit(1 if any(case["exceeded"] for case in report["cases"]) else 0)


_AGENTS = AgentsCase()


def agents(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = _AGENTS.sessions,
    client: Annotated[
        list[AgentClient] | None, typer.Option(help="Clients, which the sessions take in turn. [default: all]")
    ] = None,
    turns: Annotated[
        tuple[int, int], typer.Option(min=1, help="Fewest and most requests of a session, without its sub-agents'.")
    ] = _AGENTS.turns,
    kv: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            help="KV blocks of all engines, as a multiple of what all sessions hold at their mean length. "
            "[default: 0.333]",
        ),
    ] = None,
    placement: Annotated[list[Placement] | None, typer.Option(help="[default: score, cost]")] = None,
    policy: Annotated[
        list[Policy] | None,
        typer.Option(
            help="sessions: the mesh knows sessions; shared: and its engines share a folder of KV blocks; lru: it "
            "knows none, and evicts what was used least recently. [default: all]",
        ),
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload", help="Keep evicted KV blocks in a file.")
    ] = _AGENTS.offload,
    worker: Annotated[
        AgentWorker,
        typer.Option(help="timed: a device that only waits; model: random weights in the demo model's shape."),
    ] = _AGENTS.worker,
    engines: Annotated[int, typer.Option(min=1, help="Engines, which share the KV blocks evenly.")] = _AGENTS.engines,
    time_scale: Annotated[
        float,
        typer.Option(
            min=1, help="So many times shorter gaps and answers, and so many times quicker prompts of the timed worker."
        ),
    ] = _AGENTS.time_scale,
    step_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds of the timed worker's step, beside its tokens.")
    ] = _AGENTS.step_ms,
    prefill_rate: Annotated[
        float, typer.Option(min=1, help="Prompt tokens a second of the timed worker, before --time-scale.")
    ] = _AGENTS.prefill_rate,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm; the arms take turns.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = _AGENTS.seed,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Replay sessions of coding agents on a local mesh; measure tokens computed again, TTFT and cached shares."""
    path, _ = model_directory(DEMO_MODEL_NAME, None)
    case = AgentsCase(
        sessions=sessions,
        clients=tuple(client or AgentClient),
        turns=(min(turns), max(turns)),
        offload=offload,
        worker=worker,
        engines=engines,
        time_scale=time_scale,
        step_ms=step_ms,
        prefill_rate=prefill_rate,
        seed=seed,
    )
    arms = agents_bench.arms(case, rounds, kv or [case.kv], placement or Placement, policy or Policy)
    with failures(), bars() as bar:
        reports = [asyncio.run(agents_bench.run_case(path, arm, partial(bar, arm.title))) for arm in arms]
    report = {"machine": machine.describe(), "cases": reports}
    show(report, agents_report.tables(reports), as_json=as_json, path=output_json)
    raise typer.Exit(1 if any(case["failed"] for case in reports) else 0)
