"""``tokenloom bench kv`` measures how fast KV blocks move between engines."""

from typing import Annotated

import typer

from .bench_load import AsJson, OutputJson
from .bench_output import failures, progress, show


def kv(
    ways: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WAY]...", help="shm, socket, nixl or offload; by default all that work on this machine."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for each way and shape.")] = 1.0,
    pool_mib: Annotated[int, typer.Option(min=4, help="Size of each pool in MiB; a quarter of it moves.")] = 256,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Move KV blocks between processes by every transport, in turns, and compare with a copy in one process."""
    from tokenloom.bench.kv import kv_transfer as kv_bench  # torch, seconds
    from tokenloom.bench.kv.kv_shape import SHAPES

    with failures(), progress() as bars:
        task = bars.add_task("shapes", total=len(SHAPES))
        report = kv_bench.run(ways or [], pool_mib << 20, seconds, lambda: bars.advance(task))
    show(report, kv_bench.tables(report), as_json=as_json, path=output_json)
