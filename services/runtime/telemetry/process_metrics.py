"""Prometheus metrics of one process, under vLLM's name if vLLM has the metric."""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NoReturn

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tokenloom.process.fall_backs import KINDS, FallBacks

from . import fast_metrics

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

TURN_SECONDS: Final = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_PERIOD_SECONDS: Final = 0.001


class LoopTurns:
    """Wakes up every millisecond and observes the CPU time that this thread used between two wake-ups, in seconds.

    A wake-up comes in the first turn of the loop after its time, so what it observes is the longest turn since the one
    before, and at most one millisecond of shorter ones. CPU time is measured instead of time, because a process that
    waits for a core does nothing wrong.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock`` returns the CPU seconds of the calling thread."""
        self._clock = clock
        self._last: float | None = None
        self._longest = 0.0
        self._histogram = fast_metrics.Histogram(
            registry, "tokenloom_event_loop_turn_seconds", "CPU time of turns of the event loop.", {}, TURN_SECONDS
        )
        Gauge(
            "tokenloom_event_loop_longest_turn_seconds",
            "CPU time of the longest turn of the event loop.",
            registry=registry,
        ).set_function(lambda: self._longest)

    async def run(self) -> NoReturn:
        """Observe this event loop until cancelled."""
        while True:
            self.observe()
            await asyncio.sleep(_PERIOD_SECONDS)

    def observe(self) -> None:
        """Observe the CPU time since the last call; the first one only begins."""
        now = self._clock()
        if self._last is not None:
            seconds = now - self._last
            self._histogram.observe(seconds)
            self._longest = max(self._longest, seconds)
        self._last = now


VLLM = "vllm:"
"""Prefix of the metrics that existing dashboards read."""

LATENCY_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
"""Buckets of TTFT, ITL and times inside one service."""
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Buckets of whole requests."""
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Buckets of tokens of a request, as in vLLM: 1, 2, 5, 10 to 500,000."""
_PART_LABELS = ("service", "instance_id", "version")

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # columns of /proc/PID/stat behind the command's closing parenthesis

disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise each counter gets an unused gauge


def new_registry() -> CollectorRegistry:
    """Return a registry with this process's CPU time, memory and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def observe_part(registry: CollectorRegistry, service: str, instance: str, is_serving: Callable[[], bool]) -> None:
    """Add the name of this service and whether it serves."""
    info = Gauge(
        "tokenloom_part_info",
        "1, labelled with the service, its instance and version.",
        _PART_LABELS,
        registry=registry,
    )
    info.labels(service, instance, _version()).set(1)
    serving = Gauge(
        "tokenloom_serving", "1 while the service is SERVING, 0 while it starts or drains.", registry=registry
    )
    serving.set_function(is_serving)


@functools.cache
def _version() -> str:
    return version("tokenloom")  # reading the package's metadata takes a millisecond


@dataclass(frozen=True, slots=True)
class _FallBackMetrics:
    fall_backs: FallBacks

    def collect(self) -> Iterator[Metric]:
        began = CounterMetricFamily("tokenloom_fall_backs", "How often a fall-back has begun.", labels=["kind"])
        counts = self.fall_backs.counts
        for kind in KINDS:
            began.add_metric([kind], counts[kind])
        yield began
        text = "1 while a fall-back is in effect; the subject is an engine, or empty for the part itself."
        active = GaugeMetricFamily("tokenloom_fall_back_active", text, labels=["kind", "subject"])
        found = {(each.kind, each.subject) for each in self.fall_backs.active}
        for kind, subject in sorted({(kind, "") for kind in KINDS} | found):
            active.add_metric([kind, subject], (kind, subject) in found)
        yield active

    describe = collect  # the names, so that a second metric with one of them is refused


def observe_fall_backs(registry: CollectorRegistry, fall_backs: FallBacks) -> None:
    """Add what this service does without."""
    registry.register(_FallBackMetrics(fall_backs))


class CertificateExpiries:
    """Shows when the certificates of this process expire; without certificates it shows nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "tokenloom_certificate_expiry_timestamp_seconds",
            "Unix time at which a certificate expires that the service uses now: mesh (its own), authority, public "
            "(for clients) or operator (for admin routes).",
            ("certificate",),
            registry=registry,
        )

    def show(self, certificate: str, expiry: Callable[[], float]) -> None:
        """Add a certificate; each scrape calls ``expiry``."""
        self._gauge.labels(certificate).set_function(expiry)


def observe_process(registry: CollectorRegistry, prefix: str, pid: Callable[[], int | None]) -> None:
    """Add another process's CPU time and memory as ``prefix_process_…``; nothing while ``pid`` returns None."""
    ProcessCollector(namespace=prefix, pid=lambda: pid() or "none", registry=registry)


def show_token_cost(
    registry: CollectorRegistry,
    num_tokens: Callable[[], float],
    *,
    prefix: str = "tokenloom",
    cpu_seconds: Callable[[], float] = time.process_time,
) -> None:
    """Add ``prefix_cpu_seconds_per_output_token``: CPU time since now over ``num_tokens()``; 0 before the first token.

    ``cpu_seconds`` returns the CPU time, by default this process's. For a shorter period, divide the rates of
    ``process_cpu_seconds_total`` and of the service's tokens.
    """
    started = cpu_seconds()

    def cost() -> float:
        tokens = num_tokens()
        return max(cpu_seconds() - started, 0.0) / tokens if tokens else 0.0

    text = "CPU time since the service became ready, divided by the output tokens that passed through it."
    Gauge(f"{prefix}_cpu_seconds_per_output_token", text, registry=registry).set_function(cost)


def cpu_seconds_of(pid: int | None) -> float:
    """Return the CPU time of a process, all its threads, in seconds; 0 without a process or without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            columns = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(columns[_UTIME]) + int(columns[_STIME])) / _TICKS_PER_SECOND


class BillMetrics:
    """Shows the CPU time of each tenant in parts of this process and of those that it has started. Read when metrics
    are scraped; the tenants are bounded where they are billed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._parts: dict[str, Callable[[], Mapping[str, int]]] = {}
        registry.register(self)

    def show(self, part: str, totals: Callable[[], Mapping[str, int]]) -> None:
        """Add a part. ``totals``: returns the nanoseconds of each tenant."""
        self._parts[part] = totals

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Return the name, so that the registry refuses a second metric with it."""
        yield self._family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the values now."""
        family = self._family()
        for part, totals in self._parts.items():
            for tenant, nanoseconds in totals().items():
                family.add_metric([part, tenant], nanoseconds / 1e9)
        yield family

    def _family(self) -> CounterMetricFamily:
        text = "CPU time by tenant (--bill); (overhead) is that which no request has caused. Together it is all of it."
        return CounterMetricFamily("tokenloom_bill_cpu_seconds", text, labels=["part", "tenant"])


def open_bill(part: str, metrics: BillMetrics, without: Callable[[], int | None]) -> "CpuBill":
    """Return the bill of this process and of those that it has started, and show it under the name ``part``.

    ``without``: returns the id of a child that has a bill of its own; None: there is none.
    """
    from tokenloom.process.cpu_bill import CpuBill, ProcessCpu  # here: most meshes bill nothing

    bill = CpuBill(ProcessCpu(without).read)
    metrics.show(part, bill.totals)
    return bill


def gauge(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """Add a gauge ``vllm:name``."""
    return Gauge(VLLM + name, text, labels, registry=registry)


def counter(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """Add a counter ``vllm:name`` (shown with ``_total``)."""
    return Counter(VLLM + name, text, labels, registry=registry)


def fast_counter(
    registry: CollectorRegistry,
    name: str,
    text: str,
    labels: Mapping[str, str],
    read: Callable[[], float] | None = None,
) -> fast_metrics.Counter:
    """Add a counter ``vllm:name`` for the event loop's thread. A scrape calls ``read``, if any, for its value."""
    return fast_metrics.Counter(registry, VLLM + name, text, labels, read)


def histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    labels: Mapping[str, str],
    buckets: Sequence[float] = LATENCY_SECONDS,
) -> fast_metrics.Histogram:
    """Add a histogram ``vllm:name`` with fixed labels, for the event loop's thread only."""
    return fast_metrics.Histogram(registry, VLLM + name, text, labels, buckets)
