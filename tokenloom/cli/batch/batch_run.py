"""Reads the requests of a batch file, sends them concurrently, and writes the lines that answer them."""

import contextlib
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..failures import RequestFailed
from ..server import Server, ServerReply
from .jsonl import LineWriter, count_lines, parse, read_lines

_PATH = re.compile(r"[!-~]+")
"""What a line of HTTP can carry."""


@dataclass(frozen=True)
class BatchRequest:
    """Holds a request from the file."""

    custom_id: str
    url: str
    """The path, such as ``/v1/chat/completions``."""
    body: Mapping[str, Any]


class BadRequest(ValueError):
    """The line is not a valid request; the message says why."""

    def __init__(self, custom_id: str, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_request(number: int, line: str) -> BatchRequest:
    """Read a line. Raises `BadRequest`, with the id ``line-N`` for a line without one."""
    unnamed = f"line-{number}"
    try:
        value = parse(line)
    except ValueError as error:
        raise BadRequest(unnamed, f"line {number} {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(unnamed, f"line {number} must be an object")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequest(unnamed, f"line {number}: custom_id must be a string")
    if value.get("method", "POST") != "POST":
        raise BadRequest(custom_id, f"line {number}: method must be POST")
    if not isinstance(url, str) or not url.startswith("/v1/") or not _PATH.fullmatch(url):
        raise BadRequest(custom_id, f"line {number}: url must be a path such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise BadRequest(custom_id, f"line {number}: body must be an object")
    if body.get("stream"):
        raise BadRequest(custom_id, f"line {number}: stream must not be set in a batch")
    return BatchRequest(custom_id, url, body)


def reply_line(request: BatchRequest, reply: ServerReply) -> dict[str, Any]:
    """Make the line for a request that the server answered, with success or an error."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    return _line(request.custom_id, response, None)


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Make the line for a request that got no answer."""
    return _line(custom_id, None, {"code": code, "message": message})


def failed(line: Mapping[str, Any]) -> bool:
    """Return whether the line reports a failure."""
    return line.get("error") is not None or line["response"]["status_code"] != 200


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}


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
                self.num_failed += failed(line)
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


Line = dict[str, Any]

_TRY_AGAIN = (429, 502, 503)
"""HTTP statuses of a server that is overloaded or restarting."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0


class BatchSender:
    """Sends requests from daemon threads, so that an interrupt need not wait for them."""

    def __init__(self, server: Server, concurrency: int, max_retries: int) -> None:
        """``max_retries``: how often a request is retried while the server is overloaded or unreachable."""
        self._server = server
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._stopping = threading.Event()
        # Each holds at most the requests in flight.
        self._asked: queue.SimpleQueue[BatchRequest | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[Line] = queue.SimpleQueue()

    def run(self, lines: Iterable[tuple[int, str]], done: Collection[str]) -> Iterator[Line]:
        """Yield an answer to each numbered line whose id is not in `done`; a repeated id is an error."""
        seen, left = set(done), iter(lines)
        for _ in range(self._concurrency):
            threading.Thread(target=self._work, name="batch", daemon=True).start()
        in_flight = 0
        is_more = True
        try:
            while is_more or in_flight:
                while is_more and in_flight < self._concurrency:
                    if (numbered := next(left, None)) is None:
                        is_more = False
                        break
                    made = _request(*numbered, seen, done)
                    if isinstance(made, BatchRequest):
                        self._asked.put(made)
                        in_flight += 1
                    elif made is not None:
                        yield made
                if in_flight:
                    answer = self._answered.get()
                    in_flight -= 1
                    if self._stopping.is_set():
                        return
                    yield answer
        finally:
            for _ in range(self._concurrency):
                self._asked.put(None)

    def stop(self) -> None:
        """Make `run` return when the next request ends. Called from another thread."""
        self._stopping.set()

    def _work(self) -> None:
        while (request := self._asked.get()) is not None:
            try:
                line = reply_line(request, self._post(request))
            except RequestFailed as error:
                line = error_line(request.custom_id, "no_answer", str(error))
            except Exception as error:  # whatever went wrong, `run` waits for a line
                line = error_line(request.custom_id, "internal_error", f"{type(error).__name__}: {error}")
            self._answered.put(line)

    def _post(self, request: BatchRequest) -> ServerReply:
        wait = _FIRST_WAIT
        for retries_left in reversed(range(self._max_retries + 1)):
            is_last = not retries_left or self._stopping.is_set()
            after = None
            try:
                reply = self._server.post(request.url, request.body)
                if is_last or reply.status not in _TRY_AGAIN:
                    return reply
                after = reply.retry_after
            except RequestFailed:
                if is_last:
                    raise
            self._stopping.wait(min(wait if after is None else after, _LONGEST_WAIT))
            wait *= 2
        raise AssertionError("the last attempt returns or raises")


def _request(number: int, text: str, seen: set[str], done: Collection[str]) -> BatchRequest | Line | None:
    """Return the line's request, or the line that reports what is wrong with it; None if an earlier run answered it."""
    try:
        request = read_request(number, text)
    except BadRequest as error:
        return None if error.custom_id in done else error_line(error.custom_id, "invalid_request", str(error))
    if request.custom_id in done:
        return None
    if request.custom_id in seen:
        return error_line(
            request.custom_id, "invalid_request", f"line {number}: an earlier line has the same custom_id"
        )
    seen.add(request.custom_id)
    return request
