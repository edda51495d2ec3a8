"""Shows what the gateway's batches do."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily

from ..files.file_store import FileStore
from .batch import ENDED, STATUSES
from .batch_store import BatchStore

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
