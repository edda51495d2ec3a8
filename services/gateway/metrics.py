"""What the gateway measures of requests, under vLLM's names, and the engines' gauges as the coordinator tells them."""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily

from tokenloom.v1 import types_pb2

from ..runtime import metrics
from ..runtime.fast_metrics import Histogram
from ..runtime.token_cost import show_token_cost
from .collector import Delta
from .mesh_view import MeshView

FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_ERROR: "error",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
}
"""As clients and dashboards spell them."""


class GatewayMetrics:
    """The gateway's counters and histograms."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ["model_name"]

        def counter(name: str, text: str) -> Counter:
            return metrics.counter(registry, name, text, labels).labels(model_name)

        def histogram(name: str, text: str, buckets: Sequence[float] = metrics.LATENCY_SECONDS) -> Histogram:
            return metrics.histogram(registry, name, text, {"model_name": model_name}, buckets)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = metrics.fast_counter(
            registry, "generation_tokens", "Output tokens sent on to clients.", {"model_name": model_name}
        )
        show_token_cost(registry, lambda: self.generation_tokens.value)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between outputs of one prompt.")
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the end of one prompt's output.", metrics.REQUEST_SECONDS
        )
        success = metrics.counter(
            registry, "request_success", "Prompts whose output ended.", [*labels, "finished_reason"]
        )
        self.success = {reason: success.labels(model_name, name) for reason, name in FINISH_REASONS.items()}

    def watch(self, num_prompt_tokens: int, num_outputs: int, started_ns: int) -> "RequestWatch":
        """Measures one request from here on."""
        self.prompt_tokens.inc(num_prompt_tokens)
        return RequestWatch(self, num_outputs, started_ns)


class RequestWatch:
    """The times of one request."""

    def __init__(self, gateway: GatewayMetrics, num_outputs: int, started_ns: int) -> None:
        self._gateway = gateway
        self._started = started_ns
        self._last = [0] * num_outputs  # when each had its last tokens; 0: none yet

    def output(self, delta: Delta) -> None:
        """Some output of a prompt is on its way to the client."""
        now = time.monotonic_ns()
        if delta.token_ids:
            if last := self._last[delta.index]:
                self._gateway.inter_token_latency.observe((now - last) / 1e9)
            else:
                self._gateway.time_to_first_token.observe((now - self._started) / 1e9)
            self._last[delta.index] = now
            self._gateway.generation_tokens.inc(len(delta.token_ids))
        if delta.finished is not None:
            self._gateway.e2e_latency.observe((now - self._started) / 1e9)
            self._gateway.success[delta.finished.reason].inc()


class EngineGauges:
    """A Prometheus collector: each engine's last report."""

    def __init__(self, mesh: MeshView, model_name: str) -> None:
        self._mesh = mesh
        self._model_name = model_name

    def collect(self) -> Iterable[GaugeMetricFamily]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily(metrics.VLLM + "num_requests_running", "Requests in the batch.", labels=labels)
        waiting = GaugeMetricFamily(metrics.VLLM + "num_requests_waiting", "Requests not yet running.", labels=labels)
        usage = GaugeMetricFamily(metrics.VLLM + "kv_cache_usage_perc", "Share of KV blocks in use.", labels=labels)
        for entry in self._mesh.engines:
            names = [self._model_name, entry.identity.engine_id]
            running.add_metric(names, entry.report.running)
            waiting.add_metric(names, entry.report.waiting)
            usage.add_metric(names, entry.report.kv_usage)
        return running, waiting, usage
