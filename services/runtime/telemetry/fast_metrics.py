"""Prometheus metrics for what happens once a token: one thread observes, without locks; another may scrape.

prometheus_client's own take a lock for each sum and bucket and walk all buckets: five times the cost of these.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Counter:
    """A counter with fixed labels."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str]) -> None:
        """``name`` without ``_total``."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self.value = 0
        """So far."""
        registry.register(self)

    def inc(self, amount: int = 1) -> None:
        """Adds ``amount``, which is not negative."""
        self.value += amount

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The name, so that a second metric of this name is refused."""
        return [CounterMetricFamily(self._name, self._text, labels=list(self._labels))]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The counter now."""
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        return [family]


class CounterReading:
    """A counter that somebody else keeps: asked when it is scraped, it costs nothing between."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str], read: Callable[[], float]
    ) -> None:
        """``name`` without ``_total``; ``read`` is called by the thread that scrapes."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._read = read
        registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The name, so that a second metric of this name is refused."""
        return [CounterMetricFamily(self._name, self._text, labels=list(self._labels))]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The counter now."""
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self._read())
        return [family]


class Histogram:
    """A histogram with fixed labels."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        """``buckets``: ascending upper bounds, without infinity."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The name, so that a second metric of this name is refused."""
        return [HistogramMetricFamily(self._name, self._text, labels=list(self._labels))]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The histogram now; a value observed meanwhile may be in the sum and not yet in a bucket."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]
