"""Defines the metrics of an output processor."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenloom.services.runtime.telemetry import fast_metrics
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS, show_token_cost
from tokenloom.v1.output_processor_pb2 import RequestFinished
from tokenloom.v1.types_pb2 import FinishReason


class OutputProcessorMetrics:
    """Counts requests, their tokens and where time went. Engines and gateways measure latencies and token rates."""

    def __init__(self, registry: CollectorRegistry, num_live: Callable[[], int], num_links: Callable[[], int]) -> None:
        name = "tokenloom_output_processor_"
        live = Gauge(name + "requests_live", "Requests that have not ended.", registry=registry)
        live.set_function(num_live)
        engines = Gauge(name + "engine_streams", "Open streams to engines.", registry=registry)
        engines.set_function(num_links)
        ended = Counter(name + "requests", "Requests that ended.", ["finished_reason"], registry=registry)
        self._ended = {
            reason: ended.labels(name.removeprefix("FINISH_REASON_").lower()) for name, reason in FinishReason.items()
        }
        self._unknown = self._ended[FinishReason.FINISH_REASON_UNSPECIFIED]
        self._tokens = fast_metrics.Counter(registry, name + "tokens", "Output tokens of requests that ended.", {})
        show_token_cost(registry, lambda: self._tokens.value)
        self._retries = Counter(
            name + "retries", "Legs placed again after their engine died, drained or was full.", registry=registry
        )
        self._mixed = Counter(
            name + "mixed_numerics", "Outputs that engines of different numerics generated.", registry=registry
        )
        self._placement = fast_metrics.Histogram(
            registry,
            name + "placement_seconds",
            "Seconds that a request waited for engines.",
            {},
            LATENCY_SECONDS,
        )
        self._detokenize = Counter(
            name + "detokenize_seconds", "Seconds spent on turning tokens into text.", registry=registry
        )

    def ended(self, finished: RequestFinished) -> None:
        """Count a sample that ended."""
        self._ended.get(finished.reason, self._unknown).inc()  # an engine of a newer release may know more reasons
        self._tokens.inc(finished.completion_tokens)
        self._retries.inc(max(finished.attempts - 1, 0))
        if finished.timeline.mixed_numerics:
            self._mixed.inc()
        self._placement.observe(finished.timeline.placement_ns / 1e9)
        self._detokenize.inc(finished.timeline.detokenize_ns / 1e9)
