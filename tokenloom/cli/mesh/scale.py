"""``tokenloom scale`` changes how many ranks a data-parallel group of a running mesh has, and loses no request.

It starts and stops no engines, as ``tokenloom plan``: new ranks are started before, and those that have left are
stopped afterwards.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ..failures import reported


def scale(
    group: Annotated[str, typer.Argument(help="The group; `serve --data-parallel-size` calls its own data-parallel.")],
    size: Annotated[int, typer.Argument(min=1, help="Ranks that the group should have.")],
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for ranks that were started and have not joined yet.")
    ] = 0.0,
    coordinator: Annotated[
        str | None, typer.Option(help="Address of the coordinator; otherwise that of the newest local mesh.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The local mesh on this HTTP port.")] = None,
    certs: Annotated[Path | None, typer.Option(help="Folder with ca.crt, operator.crt and operator.key.")] = None,
) -> None:
    """Change how many ranks a data-parallel group of a running mesh has, under load.

    To grow, start the new ranks first: engines with the options of the others, --data-parallel-size SIZE and their
    --data-parallel-rank. After the group has shrunk, the ranks beyond SIZE have no requests and may be stopped.
    """
    from .coordinator import coordinator_of  # here, because they take gRPC, which the help does not need
    from .scale_run import run

    with reported():
        address = coordinator or coordinator_of(port)
        typer.echo(asyncio.run(run(address, certs, group, size, wait)))
