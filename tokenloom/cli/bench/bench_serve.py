"""``tokenloom bench serve`` measures a server with OpenAI's API under load."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.table import Table

from tokenloom.bench.load.slo import Objectives
from tokenloom.bench.mesh.serve import ServeOptions, ServeRun, prompts_for, run_serve, with_vocabulary
from tokenloom.bench.mesh.serve_report import table
from tokenloom.bench.report import machine
from tokenloom.services.runtime.host.options import options_of
from tokenloom.supervisor.state_dir import read_part_state, running_meshes

from ..failures import FAILED, print_error
from ..options import built, offers
from ..server import ApiKey
from .bench_output import AsJson, Goodput, MoreObjectives, Plot, bars, failures, show

_DEFAULTS = ServeOptions()


@offers(options_of(_DEFAULTS).values())
def serve(
    more_objectives: MoreObjectives = None,
    api_key: ApiKey = "",
    temperature: Annotated[float, typer.Option(min=0, help="Temperature; 0: greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate the full length of each answer.")] = True,
    goodput: Goodput = None,
    save_result: Annotated[bool, typer.Option(help="Write the JSON to a file.")] = False,
    save_detailed: Annotated[bool, typer.Option(help="Include the times of every request in that file.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of that file.")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(help="Name of that file; by default from model and time.")
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
    **chosen: Any,
) -> None:
    """Send streamed requests to a server; measure latencies, throughput and goodput."""
    with failures():
        options = built(_DEFAULTS, chosen)
        options = replace(
            options,
            api_key=api_key,
            sampling={"temperature": temperature, "ignore_eos": ignore_eos},
            pace=replace(options.pace, seed=options.dataset.seed),
            objectives=Objectives.parse([*(goodput or ()), *(more_objectives or ())]),
        )
        options, note = with_vocabulary(options)
        if note:
            typer.echo(f"Warning: {note}; --tokenizer or --vocab-size draw from more", err=True)
        prompts = prompts_for(options)
        cpu = _service_cpu(options.base_url)
        with bars() as bar:
            run = asyncio.run(run_serve(options, prompts, bar("requests", len(prompts))))
        if cpu is not None:
            _note_cpu(run, cpu)
        if save_result or save_detailed or result_filename:
            name = result_filename or f"serve-{options.model.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}.json"
            run.write_json(result_dir / name, detailed=save_detailed)
        if plot is not None:
            run.write_plot(plot)
    if run.report["failed"] and not run.report["completed"] and not as_json:
        first = "".join(f": {error}" for error in run.report.get("errors", ())[:1])
        print_error(f"{options.base_url} answered none of {run.report['failed']} requests{first}")
        raise typer.Exit(FAILED)
    tables = [table(run.report, f"{options.model} at {options.base_url}"), *_cpu_tables(run.report)]
    show(run.report, tables, as_json=as_json)
    raise typer.Exit(FAILED if run.report["failed"] else 0)


def _service_cpu(base_url: str) -> machine.ServiceCpu | None:
    """Return the CPU meter of the local mesh that serves at this URL; None for another server."""
    for mesh in running_meshes():
        if base_url.rstrip("/").removesuffix("/v1").endswith((f"//127.0.0.1:{mesh.port}", f"//localhost:{mesh.port}")):
            pids: dict[str, list[int]] = {}
            for part in mesh.parts:
                if (state := read_part_state(Path(part.state_file))) is not None:
                    pids.setdefault(part.service, []).append(state.pid)
            return machine.ServiceCpu(pids)
    return None


def _note_cpu(run: ServeRun, cpu: machine.ServiceCpu) -> None:
    """Add the CPU time per token. Warm-up requests count too, so use few of them where this matters."""
    tokens = max(run.report["total_output_tokens"], 1)
    run.report["cpu_us_per_token"] = {name: round(used / tokens * 1e6, 2) for name, used in cpu.used().items()}


def _cpu_tables(report: dict[str, Any]) -> list[Table]:
    if "cpu_us_per_token" not in report:
        return []
    shown = Table(title="CPU per output token, µs", title_justify="left", title_style="bold", show_header=False)
    for name, used in report["cpu_us_per_token"].items():
        shown.add_row(name.replace("_", " "), f"{used:,.1f}")
    return [shown]
