"""Runs a local mesh for the requests of a batch file."""

import asyncio

import typer

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh, run_mesh
from tokenloom.supervisor.output import LineCopier, Tail

from ..failures import INTERRUPTED
from ..model_directory import model_directory
from ..server import Server
from .batch_run import BatchWork


def run_with_mesh(model: str, engines: int, timeout: float, work: BatchWork) -> None:
    """Exit with status 130 after a signal; print the parts' last log lines if the mesh does not start."""
    path, name = model_directory(model, None)
    options = MeshOptions(model=path, served_model_name=name, engines=engines, port=0, drain_timeout=5.0)
    logs = Tail()

    async def ask(mesh: Mesh) -> None:
        await mesh.wait_serving()
        try:
            await asyncio.to_thread(work.run, Server(f"http://{mesh.gateways[0].http}", timeout=timeout))
        finally:
            work.stop()

    try:
        outcome = run_mesh(options, LineCopier(logs), ask)
    except Exception:
        typer.echo(logs.text(), err=True)
        raise
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)
