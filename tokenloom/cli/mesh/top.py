"""``tokenloom top`` shows a running local mesh, refreshed at an interval."""

import contextlib
import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from tokenloom.supervisor.state_dir import MeshRecord, running_meshes

from ..failures import CommandFailed, reported
from ..tables import print_tables


def top(
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two samples.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one interval as JSON and exit.")] = False,
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
) -> None:
    """Watch a local mesh: parts, health, queues, KV use, tokens/s, latencies. Ctrl-C leaves."""
    from .top_screen import look_once, shown, watch  # here, because they take gRPC, which the help does not need

    with reported():
        mesh = find_mesh(port)
        if once or as_json or not sys.stdout.isatty():
            seen = look_once(mesh, interval)
            print(json.dumps(asdict(seen), indent=2)) if as_json else print_tables(shown(seen))
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(mesh, interval)


def find_mesh(port: int | None) -> MeshRecord:
    """Return the newest local mesh, or the one on a port. Raises ``CommandFailed`` if none runs."""
    for mesh in running_meshes():
        if port in (None, mesh.port):
            return mesh
    where = "" if port is None else f" on port {port}"
    raise CommandFailed(f"no mesh is running{where}; `tokenloom serve` starts one")
