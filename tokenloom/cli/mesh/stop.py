"""``tokenloom stop``: ends a mesh that ``tokenloom serve`` keeps up on this machine."""

import contextlib
import os
import signal
import time
from typing import Annotated

import typer

from tokenloom.supervisor.state_dir import MeshRecord, running_meshes

from ..failures import CommandFailed, reported

_POLL_SECONDS = 0.1


def stop(
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all meshes of this user.")] = False,
    kill: Annotated[bool, typer.Option(help="Do not let live requests finish.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end.")] = 60.0,
) -> None:
    """Stop the newest mesh of this user that `tokenloom serve` started here; its live requests finish first."""
    with reported():
        meshes = [mesh for mesh in running_meshes() if port is None or mesh.port == port]
        if not meshes:
            where = "" if port is None else f" on port {port}"
            typer.echo(f"No mesh of this user is running{where}.", err=True)
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
