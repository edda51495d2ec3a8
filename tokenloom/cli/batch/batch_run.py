"""Runs the requests of ``tokenloom run-batch`` concurrently; each yields one line, in the order in which they end."""

import queue
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..failures import RequestFailed
from ..server import Server, ServerReply
from .batch_request import BadRequest, BatchRequest, error_line, read_request, reply_line

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
