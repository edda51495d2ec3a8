"""Defines metrics of KV that moves between engines, named ``tokenloom_…`` because vLLM has none."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenloom.engine_core.data.kv_messages import KV_FAILURES
from tokenloom.engine_core.data.messages import SchedulerStats
from tokenloom.services.runtime.telemetry.fast_metrics import Counter as FastCounter

PREFIX = "tokenloom_"


class KVMetrics:
    """Observes the KV that this engine reads from other engines and holds for them."""

    def __init__(self, registry: CollectorRegistry, model: str, engine: str) -> None:
        labels = ("model_name", "engine")
        self._labels = (model, engine)
        self._seen = SchedulerStats()
        FastCounter(
            registry,
            f"{PREFIX}kv_transfer_blocks",
            "Valid KV blocks read from other engines.",
            dict(zip(labels, self._labels, strict=True)),
            lambda: self._seen.kv_blocks_received,
        )
        self._bytes = Counter(
            f"{PREFIX}kv_transfer_bytes",
            "Bytes of valid KV blocks read from other engines, by transport.",
            (*labels, "transport"),
            registry=registry,
        )
        self._recomputes = Counter(
            f"{PREFIX}kv_recompute",
            "Requests whose KV on another engine was not used, by reason.",
            (*labels, "reason"),
            registry=registry,
        )
        leases = Gauge(f"{PREFIX}kv_leases", "Leases on KV blocks held for other engines.", labels, registry=registry)
        leases.labels(*self._labels).set_function(lambda: self._seen.num_leases)
        for reason in KV_FAILURES:  # a rate needs a first value
            self._recomputes.labels(*self._labels, reason)

    def start_transports(self, names: Iterable[str]) -> None:
        """Show zero bytes for each transport that may be used: a rate needs a first value."""
        for name in names:
            self._bytes.labels(*self._labels, name)

    def observe_recompute(self, reason: str) -> None:
        """Count a request that went to the core without the KV of another engine."""
        self._recomputes.labels(*self._labels, reason).inc()

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Take the present values of the core's counters."""
        seen, self._seen = self._seen, stats
        for transport, count in stats.kv_bytes_received.items():
            self._bytes.labels(*self._labels, transport).inc(count - seen.kv_bytes_received.get(transport, 0))
        for reason, count in stats.kv_recomputes.items():
            self._recomputes.labels(*self._labels, reason).inc(count - seen.kv_recomputes.get(reason, 0))
