"""``tokenloom run-batch`` answers a file of requests in OpenAI's batch format."""

from pathlib import Path
from typing import Annotated

import typer

from tokenloom.process.uncollected_imports import uncollected_imports

from ..failures import FAILED, INTERRUPTED, reported
from ..server import ApiKey, BaseUrl, Server, connect
from .batch_run import BatchWork
from .jsonl import LineWriter, check_apart


def run_batch(
    requests: Annotated[Path, typer.Option("--input-file", "-i", help="JSONL file of requests; -: standard input.")],
    answers: Annotated[Path, typer.Option("--output-file", "-o", help="JSONL file of answers; -: standard output.")],
    base_url: BaseUrl = None,
    api_key: ApiKey = "",
    model: Annotated[
        str | None,
        typer.Option(help="Start a mesh that serves this checkpoint for the run, instead of using a server."),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, max=64, help="Engines of the mesh that --model starts.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 64,
    max_retries: Annotated[int, typer.Option(min=0, help="Retries while the server is overloaded or unreachable.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one answer may take.")] = 3600.0,
    overwrite: Annotated[
        bool, typer.Option(help="Start over instead of sending only requests without an answer.")
    ] = False,
) -> None:
    """Run a file of requests in OpenAI's batch format. The same command resumes after an interrupt."""
    with reported():
        check_apart(requests, answers, "requests")
    with reported(), LineWriter(answers, overwrite=overwrite) as writer:
        work = BatchWork(requests, writer, concurrency, max_retries)
        if model is None:
            work.run(connect(base_url, api_key, timeout))
        else:
            _run_with_mesh(model, engines, timeout, work)
    if work.num_failed:
        typer.secho(f"{work.num_failed} of {work.num_done} requests failed", fg="red", err=True)
        raise typer.Exit(FAILED)


def _run_with_mesh(model: str, engines: int, timeout: float, work: BatchWork) -> None:
    """Run a mesh of this model for the requests. Exit with status 130 after a signal; print the parts' last log lines
    if the mesh does not start."""
    with uncollected_imports():  # here, because they take gRPC, which the help does not need
        import asyncio

        from tokenloom.supervisor.layout import MeshOptions
        from tokenloom.supervisor.mesh import Mesh, run_mesh
        from tokenloom.supervisor.output import LineCopier, Tail

        from ..model_directory import model_directory

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
