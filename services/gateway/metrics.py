"""What the gateway measures of requests, under vLLM's names, and the engines' gauges as the coordinator tells them."""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.services.runtime.telemetry.process_metrics import show_token_cost
from tokenloom.v1 import types_pb2

from .health import PARTS, MeshHealth
from .mesh.collector import Delta
from .mesh.mesh_view import MeshView

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
        def histogram(name: str, text: str, buckets: Sequence[float] = process_metrics.LATENCY_SECONDS) -> Histogram:
            return process_metrics.histogram(registry, name, text, {"model_name": model_name}, buckets)

        self.prompt_tokens = process_metrics.fast_counter(
            registry, "prompt_tokens", "Prompt tokens of accepted requests.", {"model_name": model_name}
        )
        self.generation_tokens = process_metrics.fast_counter(
            registry, "generation_tokens", "Output tokens sent on to clients.", {"model_name": model_name}
        )
        show_token_cost(registry, lambda: self.generation_tokens.value)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between outputs of one prompt.")
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds",
            "From arrival to the end of one prompt's output.",
            process_metrics.REQUEST_SECONDS,
        )
        success = process_metrics.counter(
            registry, "request_success", "Prompts whose output ended.", ["model_name", "finished_reason"]
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
    """A Prometheus collector: what the engines last reported.

    Under vLLM's names stand the gauges of the whole mesh, without a label ``engine``: whoever balances over gateways as
    over model servers (the Gateway API Inference Extension) reads one number of each.
    """

    def __init__(self, mesh: MeshView, model_name: str) -> None:
        self._mesh = mesh
        self._model_name = model_name

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return [*self._of_the_mesh(), *self._of_each_engine()]

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The names, so that a second metric of one of them is refused."""
        return self.collect()

    def _of_the_mesh(self) -> Iterator[GaugeMetricFamily]:
        load = self._mesh.load()
        for name, text, value in (
            ("num_requests_running", "Requests in the batches of all engines.", load.num_running),
            ("num_requests_waiting", "Requests that wait at any engine.", load.num_waiting),
            ("kv_cache_usage_perc", "Share of all engines' KV blocks in use, 0 to 1.", load.kv_usage),
        ):
            family = GaugeMetricFamily(process_metrics.VLLM + name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

    def _of_each_engine(self) -> Iterator[GaugeMetricFamily]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily("tokenloom_engine_requests_running", "In an engine's batch.", labels=labels)
        waiting = GaugeMetricFamily("tokenloom_engine_requests_waiting", "Not in its batch yet.", labels=labels)
        usage = GaugeMetricFamily("tokenloom_engine_kv_cache_usage_ratio", "Share of its KV blocks.", labels=labels)
        for entry in self._mesh.engines:
            names = [self._model_name, entry.identity.engine_id]
            running.add_metric(names, entry.report.running)
            waiting.add_metric(names, entry.report.waiting)
            usage.add_metric(names, entry.report.kv_usage)
        yield from (running, waiting, usage)


class HealthGauges:
    """A Prometheus collector: which parts a request would miss, as ``/health`` tells it."""

    def __init__(self, health: MeshHealth) -> None:
        self._health = health

    def collect(self) -> Iterable[GaugeMetricFamily]:
        missing = self._health.missing()
        family = GaugeMetricFamily("tokenloom_part_missing", "1 while a request would miss the part.", labels=["part"])
        for part in PARTS:
            family.add_metric([part], part in missing)
        return [family]

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The name, so that a second metric of this name is refused."""
        return self.collect()
