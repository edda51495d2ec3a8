"""Counts the responses of the HTTP and gRPC APIs for Prometheus, so that no refusal is invisible."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

OTHER = "other"
"""Stands for paths that are not served: their number must not depend on clients."""
MAX_SERIES = 1000
"""Limits the combinations of labels: a reason may come from a newer part of the mesh."""
_API = "/v1/"
_LEFT = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Family:
    """Describes a metric of responses."""

    name: str
    text: str
    labels: tuple[str, str, str]
    """Of the route, of the status and of the reason."""


HTTP = Family(
    "tokenloom_http_responses",
    "Responses by route, status and reason; the reason is empty for answers. A stream that fails has status 200 and "
    "the reason of its error. Status 499: the client left before the response began. Status 0: the connection was "
    "refused and closed without a response.",
    ("route", "status", "reason"),
)
GRPC = Family(
    "tokenloom_grpc_responses",
    "Ends of gRPC calls by method, status code and reason; the reason is empty for answers.",
    ("method", "code", "reason"),
)


class ResponseCounts:
    """Counts in the event loop's thread: an increment is one dictionary access, as it happens for every request."""

    def __init__(self, registry: CollectorRegistry, family: Family = HTTP) -> None:
        self._family = family
        self._counts: dict[tuple[str, str, str], int] = {}
        registry.register(self)

    def count(self, route: str, status: int | str, reason: str = "") -> None:
        """Count a response. ``reason``: of an error."""
        key = (route, str(status), reason)
        if key not in self._counts and len(self._counts) >= MAX_SERIES:
            key = (OTHER, str(status), OTHER)
        self._counts[key] = self._counts.get(key, 0) + 1

    def refused(self) -> dict[str, int]:
        """Return how many requests of the API ended in an error, by its reason. Clients that left are not counted."""
        refused: dict[str, int] = {}
        for (route, _, reason), count in self._counts.items():
            if reason and reason != _LEFT and route.startswith(_API):
                refused[reason] = refused.get(reason, 0) + count
        return refused

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Return the name, so that the registry refuses a second metric with it."""
        yield CounterMetricFamily(self._family.name, self._family.text, labels=self._family.labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the counts now."""
        (family,) = self.describe()
        for labels, count in list(self._counts.items()):
            family.add_metric(labels, count)
        yield family
