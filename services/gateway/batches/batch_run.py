"""Runs one batch: sends its lines as requests, and collects the results."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import BinaryIO, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily

from ..files.disk import Disk
from ..files.file_store import FileRoom, FileStore
from ..http.internal_call import InternalResponse
from ..tenants.tenant import Tenant
from .batch import ENDED, STATUSES, StoredBatch
from .batch_lines import InputLines, LineError, LineRequest, answer_line, error_line, expiry_of
from .batch_store import BatchStore
from .results import Results

OUTCOMES = ("completed", "failed", "expired")


class LineMetrics:
    """Counts the lines of batches.

    Attributes:
        in_flight: Lines that are being answered now.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.in_flight = 0
        lines = CounterMetric(
            "tokenloom_batch_lines", "Lines of batches that have a result, by its kind.", ["outcome"], registry=registry
        )
        self.ended = {outcome: lines.labels(outcome) for outcome in OUTCOMES}
        self.postponed = CounterMetric(
            "tokenloom_batch_lines_postponed",
            "Attempts to run a line of a batch that were refused, because more important requests had the capacity or "
            "the tenant was at a limit. The line is tried again.",
            registry=registry,
        )


@dataclass(frozen=True, slots=True)
class BatchGauges:
    """Collects the state of batches and files when Prometheus scrapes."""

    batches: BatchStore
    files: FileStore
    lines: LineMetrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges now."""
        counts = Counter(batch.status for batch in self.batches.open_batches)
        batches = GaugeMetricFamily("tokenloom_batches", "Batches that have not ended, by status.", labels=["status"])
        for status in STATUSES:
            if status not in ENDED:
                batches.add_metric([status], counts[status])
        yield batches
        text = "Lines of batches that are being answered."
        yield GaugeMetricFamily("tokenloom_batch_lines_in_flight", text, value=self.lines.in_flight)
        text = "Bytes of the files that clients have uploaded and batches have written."
        yield GaugeMetricFamily("tokenloom_stored_file_bytes", text, value=self.files.num_bytes)

    describe = collect  # the names, so that a second metric of one of them is refused


log = logging.getLogger(__name__)

READ_BYTES = 256 << 10
"""Read from the input at a time; a longer line is read alone."""
LONGEST_WAIT = 30.0
"""Seconds after which a line that was refused is tried again, at most."""


class BatchCalls(Protocol):
    """Sends requests to the gateway's own API."""

    async def post(self, path: str, body: bytes, tenant: Tenant) -> InternalResponse:
        """Return the response to a body."""


@dataclass(frozen=True, slots=True)
class BatchResources:
    """Holds what every batch runs with.

    Attributes:
        disk: Reads and writes files.
        metrics: Counts lines.
        random: Spreads the times of retries.
        now: Returns seconds since 1970.
    """

    disk: Disk
    metrics: LineMetrics
    random: Random
    now: Callable[[], float]


class BatchFailed(Exception):
    """Raised when a batch cannot continue. ``code`` and the message are shown to the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BatchRun:
    """Answers the lines of a batch that have no result yet. Cancelling :meth:`run` stops it; what has a result stays.

    Attributes:
        has_expired: Whether a line was given up because the time of the batch was over.
    """

    def __init__(
        self,
        batch: StoredBatch,
        tenant: Tenant,
        results: Results,
        around: BatchResources,
        calls: BatchCalls,
        *,
        places: Callable[[], int],
        room: FileRoom,
    ) -> None:
        """Args:
        calls: Sends requests.
        places: Returns how many lines of the batch may be answered at the same time.
        room: Holds the bytes of the results; the batch fails when it cannot grow.
        """
        self._calls = calls
        self._places = places
        self._batch = batch
        self._tenant = tenant
        self._results = results
        self._around = around
        self._room = room
        # From here on by a clock that is never set: a step of the wall clock would give up every line, or none.
        self._left_until = asyncio.get_running_loop().time() + batch.expires_at - around.now()
        self._num_running = 0
        self._ended = asyncio.Event()
        self.has_expired = False

    async def run(self, file: BinaryIO, max_line_bytes: int) -> None:
        """Answer every line. Raises ``BatchFailed``, and ``OSError`` if results cannot be written.

        ``file``: the input, at its beginning.
        """
        lines = InputLines(file, self._batch.endpoint, max_line_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                while taken := await self._around.disk.run(lambda: lines.take(READ_BYTES)):
                    for line in taken:
                        # A restarted gateway reads the input from its beginning and skips what has a result: a bit for
                        # each of 50,000 lines, instead of a position that would have to be written after each.
                        if not self._results.done[line.number]:
                            await self._wait_for_place()
                            self._num_running += 1
                            group.create_task(self._answer(line), name=f"line {line.number} of {self._batch.id}")
        except ExceptionGroup as group:
            raise _first(group) from None

    async def _wait_for_place(self) -> None:
        while self._num_running >= self._places():
            self._ended.clear()
            await self._ended.wait()

    async def _answer(self, line: LineRequest | LineError) -> None:
        try:
            if isinstance(line, LineError):
                await self._fail(line, "failed")
                return
            try:
                reply = await self._reply(line)
            except Exception:  # a bug: the other lines are not to blame
                log.exception("%s: line %d failed", self._batch.id, line.number)
                message = "the gateway has failed to run this request"
                await self._fail(LineError(line.number, line.custom_id, "internal_error", message), "failed")
                return
            if reply is None:
                self.has_expired = True
                await self._fail(expiry_of(line), "expired")
                return
            is_error = reply.status != 200
            result = answer_line(self._batch.id, line, reply.status, reply.request_id, reply.body)
            del reply
            await self._add(line.number, result, "failed" if is_error else "completed")
        finally:
            self._num_running -= 1
            self._ended.set()

    async def _fail(self, error: LineError, outcome: str) -> None:
        await self._add(error.number, error_line(self._batch.id, error), outcome)

    async def _add(self, number: int, line: bytes, outcome: str) -> None:
        if not self._room.grow(len(line)):
            raise BatchFailed("results_too_large", "the results take as many bytes as may be stored; delete files")
        await self._results.add(number, line, is_error=outcome != "completed")
        self._results.show(self._batch)
        self._around.metrics.ended[outcome].inc()

    async def _reply(self, line: LineRequest) -> InternalResponse | None:
        """Return the response to a line, which is sent again while it is refused for load; None when it is too late."""
        around, wait, loop = self._around, 1.0, asyncio.get_running_loop()
        while (left := self._left_until - loop.time()) > 0:
            around.metrics.in_flight += 1
            try:
                async with asyncio.timeout(left):
                    reply = await self._calls.post(self._batch.endpoint, line.body, self._tenant)
            except TimeoutError:
                return None
            finally:
                around.metrics.in_flight -= 1
            if (retry_after := reply.retry_after) is None:
                return reply
            around.metrics.postponed.inc()
            del reply
            seconds = min(max(wait, retry_after), LONGEST_WAIT, left) * around.random.uniform(0.5, 1.0)
            await asyncio.sleep(seconds)
            wait *= 2
        return None


def _first(group: "ExceptionGroup[Exception]") -> Exception:
    """Return one error of a group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
