"""``tokenloom bench disaggregated``: colocated engines against prefill and decode engines."""

import asyncio
import math
import shlex
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.bench.load.arrivals import Pace
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions
from tokenloom.bench.load.slo import Objectives
from tokenloom.bench.mesh.disaggregated import Contender, compare, report, serve_command, table, write_plot
from tokenloom.bench.mesh.serve import ServeOptions
from tokenloom.checkpoint import DEMO_MODEL_NAME
from tokenloom.supervisor.ports import choose_ports

from ..mesh.model_directory import model_directory
from .bench_load import (
    AsJson,
    Goodput,
    InputLen,
    LongInputLen,
    LongOutputLen,
    LongShare,
    MaxConcurrency,
    NumPrompts,
    OutputLen,
    RangeRatio,
    RequestRate,
    Seed,
)
from .bench_output import bars, failures, show

_OBJECTIVES = ["ttft:1000", "tpot:100"]


def disaggregated(
    more_objectives: Annotated[
        list[str] | None, typer.Argument(metavar="[OBJECTIVE]...", help="More of --goodput.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="Checkpoint directory or Hugging Face hub id.")] = DEMO_MODEL_NAME,
    engines: Annotated[int, typer.Option(min=1, help="Engines of the colocated mesh.")] = 2,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines of the other.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines of the other.")] = 1,
    serve_flags: Annotated[str, typer.Option(help="More flags of `tokenloom serve` for both, quoted.")] = "",
    num_prompts: NumPrompts = 60,
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 0.25,
    long_share: LongShare = 0.2,
    long_input_len: LongInputLen = 400,
    long_output_len: LongOutputLen = 16,
    request_rate: RequestRate = math.inf,
    max_concurrency: MaxConcurrency = 16,
    goodput: Goodput = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each mesh takes its turn.")] = 3,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Write the latencies' distributions as SVG.")] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the JSON to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load N colocated engines and prefill and decode engines with the same long prompts and short chats, in turns."""
    path, name = model_directory(model, None)
    with failures():
        options = ServeOptions(
            base_url="",
            model=name,
            tokenizer=str(path),
            dataset=DatasetOptions(
                name=DatasetName.MIXED,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                range_ratio=range_ratio,
                long_share=long_share,
                long_input_len=long_input_len,
                long_output_len=long_output_len,
                seed=seed,
            ),
            pace=Pace(request_rate, max_concurrency=max_concurrency, seed=seed),
            num_warmups=4,
            objectives=Objectives.parse([*(goodput or ()), *(more_objectives or ())] or _OBJECTIVES),
        )
        common = ("--served-model-name", name, *shlex.split(serve_flags))
        split = (f"{prefill}P{decode}D", ("--prefill", str(prefill), "--decode", str(decode)))
        kinds = ((f"{engines} colocated", ("--engines", str(engines))), split)
        ports = choose_ports("127.0.0.1", len(kinds), 0, 0)
        contenders = [
            Contender(
                title,
                serve_command(str(path), port.http, "--grpc-port", str(port.grpc), *flags, *common),
                f"http://127.0.0.1:{port.http}",
            )
            for (title, flags), port in zip(kinds, ports, strict=True)
        ]
        with bars() as bar:
            results = asyncio.run(compare(contenders, options, rounds, bar))
        if plot is not None:
            write_plot(plot, results)
        findings = report(results, options)
    show(findings, [table(findings)], as_json=as_json, path=output_json)
