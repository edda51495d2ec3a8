"""``tokenloom run-batch`` answers a file of requests in OpenAI's batch format."""

from pathlib import Path
from typing import Annotated

import typer

from tokenloom.process.uncollected_imports import uncollected_imports

from ..failures import FAILED, reported
from ..server import ApiKey, BaseUrl, connect
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
            with uncollected_imports():
                from .batch_mesh import run_with_mesh  # here, because it takes gRPC, which the help does not need

            run_with_mesh(model, engines, timeout, work)
    if work.num_failed:
        typer.secho(f"{work.num_failed} of {work.num_done} requests failed", fg="red", err=True)
        raise typer.Exit(FAILED)
