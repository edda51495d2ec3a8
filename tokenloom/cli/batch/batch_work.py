"""Sends the requests of a batch file that have no answer yet, and writes the answers."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..server import Server
from . import batch_request
from .batch_run import BatchSender
from .jsonl import LineWriter, count_lines, read_lines


class BatchWork:
    """Sends the requests that have no answer yet, and counts."""

    def __init__(self, requests: Path, writer: LineWriter, concurrency: int, max_retries: int) -> None:
        self._requests = requests
        self._writer = writer
        self._limits = (concurrency, max_retries)
        self._batch: BatchSender | None = None
        self.num_done = self.num_failed = 0

    def run(self, server: Server) -> None:
        """Block until every request is answered or `stop` is called."""
        self._batch = BatchSender(server, *self._limits)
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


@contextlib.contextmanager
def _bar(total: int | None, done: int) -> Iterator[Callable[[], Any]]:
    """Show a progress bar on standard error if it is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task("requests", total=total, completed=done)
        yield lambda: shown.advance(task)
