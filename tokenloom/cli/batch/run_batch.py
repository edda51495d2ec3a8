"""``tokenloom run-batch`` answers a file of requests in OpenAI's batch format."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier, Tail
from tokenloom.supervisor.run import run_mesh

from ..failures import FAILED, INTERRUPTED, reported
from ..mesh.model_directory import model_directory
from ..server import Server
from ..server_options import ApiKey, BaseUrl, connect
from . import batch_request
from .batch_run import Batch
from .jsonl import LineWriter, count_lines, read_lines


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
    with reported(), LineWriter(answers, overwrite=overwrite) as writer:
        work = _Work(requests, writer, concurrency, max_retries)
        if model is None:
            work.run(connect(base_url, api_key, timeout))
        else:
            _with_mesh(model, engines, timeout, work)
    if work.num_failed:
        typer.secho(f"{work.num_failed} of {work.num_done} requests failed", fg="red", err=True)
        raise typer.Exit(FAILED)


class _Work:
    """Sends the requests that have no answer yet, and counts."""

    def __init__(self, requests: Path, writer: LineWriter, concurrency: int, max_retries: int) -> None:
        self._requests = requests
        self._writer = writer
        self._limits = (concurrency, max_retries)
        self._batch: Batch | None = None
        self.num_done = self.num_failed = 0

    def run(self, server: Server) -> None:
        """Block until every request is answered or `stop` is called."""
        self._batch = Batch(server, *self._limits)
        done = {str(line.get("custom_id")) for line in self._writer.written}
        with _bar(count_lines(self._requests), len(done)) as advance:
            for line in self._batch.run(read_lines(self._requests), done):
                self._writer.write(line)
                self.num_done += 1
                self.num_failed += batch_request.failed(line)
                advance()

    def stop(self) -> None:
        if self._batch is not None:
            self._batch.stop()


def _with_mesh(model: str, engines: int, timeout: float, work: _Work) -> None:
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
        outcome = asyncio.run(run_mesh(options, LineCopier(logs), ask))
    except Exception:
        typer.echo(logs.text(), err=True)
        raise
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _bar(total: int | None, done: int) -> Iterator[Callable[[], Any]]:
    """Show a progress bar on standard error if it is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task("requests", total=total, completed=done)
        yield lambda: shown.advance(task)
