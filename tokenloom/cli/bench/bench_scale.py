"""``tokenloom bench scale`` measures the coordinator with many fake engines."""

from typing import Annotated

import typer

from .bench_load import AsJson, OutputJson
from .bench_output import failures, progress, show


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
