"""``tokenloom bench serve``: load on a server with OpenAI's API."""

import asyncio
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tokenloom.bench.load.arrivals import Pace
from tokenloom.bench.load.bodies import Backend
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions
from tokenloom.bench.load.slo import Objectives
from tokenloom.bench.mesh.serve import ServeOptions, ServeRun, prompts_for, run_serve
from tokenloom.bench.mesh.serve_report import table
from tokenloom.bench.report import machine
from tokenloom.checkpoint import DEMO_MODEL_NAME
from tokenloom.supervisor.state_dir import read_part_state, running_meshes

from .bench_load import (
    AsJson,
    Dataset,
    Goodput,
    InputLen,
    LongInputLen,
    LongOutputLen,
    LongShare,
    MaxConcurrency,
    NumPrefixes,
    NumPrompts,
    OutputLen,
    PrefixLen,
    RangeRatio,
    RequestRate,
    Seed,
)
from .bench_output import bars, failures, show


def serve(
    more_objectives: Annotated[
        list[str] | None, typer.Argument(metavar="[OBJECTIVE]...", help="More of --goodput.", show_default=False)
    ] = None,
    base_url: Annotated[str, typer.Option(help="Server, as http://host:port.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name that the server knows.")] = DEMO_MODEL_NAME,
    backend: Annotated[Backend, typer.Option(help="Completions or chat completions.")] = Backend.OPENAI,
    endpoint: Annotated[str, typer.Option(help="Path; by default the backend's.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Directory or hub id of the tokenizer; by default --model.")] = "",
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Draw token ids below this, without a tokenizer.")
    ] = None,
    dataset_name: Dataset = DatasetName.RANDOM,
    num_prompts: NumPrompts = 100,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 512,
    num_prefixes: NumPrefixes = 1,
    long_share: LongShare = 0.2,
    long_input_len: LongInputLen = 1500,
    long_output_len: LongOutputLen = 16,
    request_rate: RequestRate = math.inf,
    burstiness: Annotated[float, typer.Option(min=1e-3, help="1: Poisson arrivals; less: burstier.")] = 1.0,
    max_concurrency: MaxConcurrency = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before, not measured.")] = 0,
    seed: Seed = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers have their full length.")] = True,
    goodput: Goodput = None,
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, parted by commas.")] = "99",
    save_result: Annotated[bool, typer.Option(help="Write the JSON to a file.")] = False,
    save_detailed: Annotated[bool, typer.Option(help="With every request's times in it.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to.")] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="Named; by default by time.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the latencies' distributions as SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a server with streamed requests; measure latencies, throughput and goodput."""
    with failures():
        options = ServeOptions(
            base_url=base_url,
            model=model,
            backend=backend,
            endpoint=endpoint,
            api_key=api_key,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            sampling={"temperature": temperature, "ignore_eos": ignore_eos},
            dataset=DatasetOptions(
                name=dataset_name,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                range_ratio=range_ratio,
                prefix_len=prefix_len,
                num_prefixes=num_prefixes,
                long_share=long_share,
                long_input_len=long_input_len,
                long_output_len=long_output_len,
                seed=seed,
            ),
            pace=Pace(request_rate, burstiness, max_concurrency, seed=seed),
            num_warmups=num_warmups,
            objectives=Objectives.parse([*(goodput or ()), *(more_objectives or ())]),
            percents=tuple(float(percent) for percent in metric_percentiles.split(",")),
        )
        prompts = prompts_for(options)
        cpu = _service_cpu(base_url)
        with bars() as bar:
            run = asyncio.run(run_serve(options, prompts, bar("requests", len(prompts))))
        if cpu is not None:
            _note_cpu(run, cpu)
        if save_result or save_detailed or result_filename:
            name = result_filename or f"serve-{model.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}.json"
            run.write_json(result_dir / name, detailed=save_detailed)
        if plot is not None:
            run.write_plot(plot)
    tables = [table(run.report, f"{model} at {base_url}"), *_cpu_tables(run.report)]
    show(run.report, tables, as_json=as_json)
    raise typer.Exit(1 if run.report["failed"] else 0)


def _service_cpu(base_url: str) -> machine.ServiceCpu | None:
    """Of the local mesh that serves at this URL, if it is one."""
    for mesh in running_meshes():
        if base_url.rstrip("/").removesuffix("/v1").endswith((f"//127.0.0.1:{mesh.port}", f"//localhost:{mesh.port}")):
            pids: dict[str, list[int]] = {}
            for part in mesh.parts:
                if (state := read_part_state(Path(part.state_file))) is not None:
                    pids.setdefault(part.service, []).append(state.pid)
            return machine.ServiceCpu(pids)
    return None


def _note_cpu(run: ServeRun, cpu: machine.ServiceCpu) -> None:
    """Warm-ups count too, so there should be few or none of them where this matters."""
    tokens = max(run.report["total_output_tokens"], 1)
    run.report["cpu_us_per_token"] = {name: round(used / tokens * 1e6, 2) for name, used in cpu.used().items()}


def _cpu_tables(report: dict[str, Any]) -> list[Table]:
    if "cpu_us_per_token" not in report:
        return []
    shown = Table(title="CPU per output token, µs", title_justify="left", title_style="bold", show_header=False)
    for name, used in report["cpu_us_per_token"].items():
        shown.add_row(name.replace("_", " "), f"{used:,.1f}")
    return [shown]
