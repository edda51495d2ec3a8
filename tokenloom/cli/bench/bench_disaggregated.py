"""``tokenloom bench disaggregated`` compares colocated engines with prefill and decode engines."""

import asyncio
import shlex
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from tokenloom.bench.load.arrivals import Pace
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions
from tokenloom.bench.load.slo import Objectives
from tokenloom.bench.mesh.contenders import Contender, compare, serve_command
from tokenloom.bench.mesh.disaggregated import report, table, write_plot
from tokenloom.bench.mesh.serve import ServeOptions
from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.services.runtime.host.options import options_of
from tokenloom.supervisor.ports import reserved_ports

from ..model_directory import model_directory
from ..options import built, offers
from .bench_output import AsJson, Goodput, MoreObjectives, OutputJson, Plot, bars, failures, show

_OBJECTIVES = ["ttft:1000", "tpot:100"]
_DEFAULTS = ServeOptions(
    dataset=DatasetOptions(
        DatasetName.MIXED, num_prompts=60, input_len=32, output_len=64, range_ratio=0.25, long_input_len=400
    ),
    pace=Pace(max_concurrency=16),
    num_warmups=4,
)
_OFFERED = (
    *("num_prompts", "input_len", "output_len", "range_ratio", "long_share", "long_input_len", "long_output_len"),
    *("request_rate", "max_concurrency", "seed"),
)


@offers(options_of(_DEFAULTS)[name] for name in _OFFERED)
def disaggregated(
    more_objectives: MoreObjectives = None,
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    engines: Annotated[int, typer.Option(min=1, help="Engines of the colocated mesh.")] = 2,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines of the disaggregated mesh.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines of the disaggregated mesh.")] = 1,
    serve_flags: Annotated[str, typer.Option(help="Further flags of `tokenloom serve` for both meshes, quoted.")] = "",
    goodput: Goodput = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each mesh; the meshes alternate.")] = 3,
    plot: Plot = None,
    output_json: OutputJson = None,
    as_json: AsJson = False,
    **chosen: Any,
) -> None:
    """Send the same long prompts and short chats to colocated and to prefill and decode engines, in turns."""
    path, name = model_directory(model, None)
    with failures():
        options = built(_DEFAULTS, chosen)
        options = replace(
            options,
            model=name,
            tokenizer=str(path),
            pace=replace(options.pace, seed=options.dataset.seed),
            objectives=Objectives.parse([*(goodput or ()), *(more_objectives or ())] or _OBJECTIVES),
        )
        # Requests wait as long as the load makes them: a refused one would not be measured.
        waits = ("--max-queue-seconds", "600", "--always-queued", str(options.dataset.num_prompts))
        common = ("--served-model-name", name, *waits, *shlex.split(serve_flags))
        split = (f"{prefill}P{decode}D", ("--prefill", str(prefill), "--decode", str(decode)))
        kinds = ((f"{engines} colocated", ("--engines", str(engines))), split)
        with reserved_ports("127.0.0.1", len(kinds), 0, 0) as ports, bars() as bar:
            contenders = [
                Contender(
                    title,
                    serve_command(str(path), port.http, "--grpc-port", str(port.grpc), *flags, *common),
                    f"http://127.0.0.1:{port.http}",
                )
                for (title, flags), port in zip(kinds, ports, strict=True)
            ]
            results = asyncio.run(compare(contenders, options, rounds, bar))
        if plot is not None:
            write_plot(plot, results)
        findings = report(results, options)
    show(findings, [table(findings)], as_json=as_json, path=output_json)
