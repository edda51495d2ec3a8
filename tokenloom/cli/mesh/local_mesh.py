"""``tokenloom ps``, ``top`` and ``stop``: list, watch and end the meshes that ``tokenloom serve`` keeps up here."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tokenloom.supervisor.process_tree import processes_of
from tokenloom.supervisor.state_dir import MeshRecord, running_meshes

from ..failures import CommandFailed, reported
from ..tables import UNLIMITED, Column, fitted, output_width, print_tables

if TYPE_CHECKING:
    from .mesh_sample import Row

_POLL_SECONDS = 0.1
Wide = Annotated[
    bool, typer.Option("--wide", help="Show every column whole, also those for which the terminal has no room.")
]


def find_mesh(port: int | None) -> MeshRecord:
    """Return the newest local mesh, or the one on a port. Raises ``CommandFailed`` if none runs."""
    for mesh in _meshes(port):
        return mesh
    raise CommandFailed(f"no mesh is running{_on(port)}; `tokenloom serve` starts one")


def _meshes(port: int | None) -> list[MeshRecord]:
    return [mesh for mesh in running_meshes() if port in (None, mesh.port)]


def _on(port: int | None) -> str:
    return "" if port is None else f" on port {port}"


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects instead of a table.")] = False,
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="List every process with its memory, below the one that started it.")
    ] = False,
    wide: Wide = False,
) -> None:
    """List the parts of the newest running mesh of this user: service, index, role, pid, address, health, placement."""
    with reported():
        meshes = _meshes(port)
    if not meshes:
        if as_json:
            print("[]")
        if not as_json or port is not None:
            typer.echo(f"No mesh is running{_on(port)}; `tokenloom serve` starts one.", err=True)
        raise typer.Exit(0 if port is None else 1)
    if tree:
        _print_tree(meshes[0], as_json=as_json)
        return
    from .mesh_sample import find_rows  # here, because it takes gRPC, which the help does not need

    rows = find_rows(meshes[0])
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_tables(fitted(_columns(rows), UNLIMITED if wide else output_width()))
        for row in rows:
            for plugin in row.plugins:
                typer.echo(f"plugins of {row.service}-{row.index}: {plugin}")
            for fall_back in row.fall_backs:
                typer.echo(f"fall-back of {row.service}-{row.index}: {fall_back}")


def _print_tree(mesh: MeshRecord, *, as_json: bool) -> None:
    found = processes_of(mesh)
    if as_json:
        print(json.dumps([asdict(process) for process in found], indent=2))
        return
    for process in found:
        stopped = " stopped" if process.state == "T" else ""
        memory = "-" if process.memory is None else f"{process.memory / 1e6:.0f} MB"
        print(f"{process.pid:>8} {memory:>8} {'  ' * process.depth}{process.name}{stopped}")


def _columns(rows: "list[Row]") -> Iterator[Column]:
    """Yield the columns; models are named if there are several. A narrow terminal shows the names of sockets without
    their folder, and does without process ids and roles first."""
    yield Column("SERVICE", [row.service for row in rows])
    yield Column("INDEX", [str(row.index) for row in rows], is_right=True)
    if len({row.model for row in rows if row.model}) > 1:
        yield Column("MODEL", [row.model or "-" for row in rows])
    yield Column("ROLE", [row.role or "-" for row in rows], rank=2)
    yield Column("PID", [str(row.pid or "-") for row in rows], is_right=True, rank=1)
    sockets = Column("ADDRESS", [_short_address(row.address or "-") for row in rows])
    yield Column("ADDRESS", [row.address or "-" for row in rows], sockets, rank=5)
    yield Column("METRICS", [row.metrics or "-" for row in rows], rank=3)
    yield Column("HEALTH", [Text(row.health, "green" if row.health == "SERVING" else "red") for row in rows])
    if any(row.placement for row in rows):
        yield Column("PLACEMENT", [str(row.placement or "-") for row in rows], rank=4)


def _short_address(address: str) -> str:
    """``unix:/tmp/tokenloom-0/mesh-xj7nvsbc/engine-0.sock`` → ``…/engine-0.sock``."""
    return f"…/{address.rpartition('/')[2]}" if address.startswith("unix:") else address


def top(
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two samples.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one interval as JSON and exit.")] = False,
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
    wide: Wide = False,
) -> None:
    """Watch a local mesh: parts, health, queues, KV use, tokens/s, latencies. Ctrl-C leaves."""
    from .top_screen import look_once, shown, watch  # here, because they take gRPC, which the help does not need

    with reported():
        mesh = find_mesh(port)
        if once or as_json or not sys.stdout.isatty():
            seen = look_once(mesh, interval)
            width = UNLIMITED if wide else output_width()
            print(json.dumps(asdict(seen), indent=2)) if as_json else print_tables(shown(seen, width))
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(mesh, interval, wide=wide)


def stop(
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all meshes of this user.")] = False,
    kill: Annotated[bool, typer.Option(help="Do not let live requests finish.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end.")] = 60.0,
) -> None:
    """Stop the newest mesh of this user that `tokenloom serve` started here; its live requests finish first."""
    with reported():
        meshes = _meshes(port)
        if not meshes:
            typer.echo(f"No mesh of this user is running{_on(port)}.", err=True)
            raise typer.Exit(0 if port is None else 1)
        stopped = meshes if every else meshes[:1]
        for mesh in stopped:
            _signal(mesh, kill=kill)
        _wait(stopped, timeout)
    for mesh in stopped:
        print(f"The mesh on port {mesh.port} has stopped.")


def _signal(mesh: MeshRecord, *, kill: bool) -> None:
    """Ask the supervisor to drain; a second signal makes it kill the parts. Its process is alive, because the record
    counts as running while that process holds a lock."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(mesh.pid, signal.SIGTERM)
        if kill:
            time.sleep(_POLL_SECONDS)  # two signals at once are one
            os.kill(mesh.pid, signal.SIGTERM)


def _wait(meshes: list[MeshRecord], timeout: float) -> None:
    """Raise `CommandFailed` unless all of them end in time."""
    deadline = time.monotonic() + timeout
    while left := [mesh for mesh in running_meshes() if mesh in meshes]:
        if time.monotonic() >= deadline:
            ports = ", ".join(str(mesh.port) for mesh in left)
            raise CommandFailed(f"the mesh on port {ports} still has live requests; add --kill to end it now")
        time.sleep(_POLL_SECONDS)
