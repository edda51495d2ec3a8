"""Measures requests, under vLLM's names, and shows the engines' load as the coordinator reports it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import TracedHistogram
from tokenloom.services.runtime.telemetry.tracing import CURRENT, trace_id_of
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.coordinator_pb2 import EngineEntry

from .adapters.adapter_usage import AdapterUsage
from .generation.backlog import Backlog
from .mesh.collector import Delta
from .mesh.engine_words import placement_values
from .mesh.kv_flow import KvFlow
from .mesh.mesh_view import MeshView, load_of
from .request_sizes import RequestSizes, Sized
from .tenants.key_usage import KeyUsage
from .tenants.tenant import Tenant
from .usage_counts import Used

_PLACEMENT_TEXTS = {
    "waiting": "Requests waiting at the engine as placement counts them, those on their way included.",
    "running": "Requests in the engine's batch as placement counts them.",
    "score": "Waiting * 4 + running: --placement score picks the engine with the least, less what it has cached.",
    "seats": "Requests that may run at the same time, for --placement cost.",
    "step_seconds": "Mean seconds of the engine's steps, of which --placement cost takes the mean of all engines.",
    "uncached_tokens": "Prompt tokens to compute for the requests at the engine, for --placement cost.",
    "uncached_tokens_per_second": "Rate at which --placement cost expects the engine to compute them.",
    "expected_seconds": "Seconds that --placement cost expects of a request there, without those of its own prompt.",
}
"""What the gauges of :func:`.placement_values` are."""

FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_ERROR: "error",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
}
"""Their names for clients and dashboards."""


class GatewayMetrics:
    """Holds the gateway's counters and histograms, and what its page shows besides."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, key_usage: KeyUsage, adapter_usage: AdapterUsage
    ) -> None:
        """``key_usage``, ``adapter_usage``: count what is generated with each key and each adapter, for all models."""
        labels = {"model_name": model_name}

        def traced(name: str, text: str, buckets: Sequence[float]) -> TracedHistogram:
            return TracedHistogram(registry, process_metrics.VLLM + name, text, labels, buckets)

        self.prompt_tokens = process_metrics.fast_counter(
            registry, "prompt_tokens", "Prompt tokens of accepted requests.", labels
        )
        self.generation_tokens = process_metrics.fast_counter(
            registry, "generation_tokens", "Output tokens sent to clients.", labels
        )
        self.time_to_first_token = traced(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            process_metrics.LATENCY_SECONDS,
        )
        self.inter_token_latency = process_metrics.histogram(
            registry, "inter_token_latency_seconds", "Time between two outputs of one prompt.", labels
        )
        self.e2e_latency = traced(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to the end of one prompt's output.",
            process_metrics.REQUEST_SECONDS,
        )
        success = process_metrics.counter(
            registry, "request_success", "Prompts whose output has ended.", ["model_name", "finished_reason"]
        )
        self.kv_flow = KvFlow()
        self.success = {reason: success.labels(model_name, name) for reason, name in FINISH_REASONS.items()}
        self._model_name = model_name
        self._pooled_prompts = Counter(
            "tokenloom_gateway_pooled_prompts",
            "Prompts from which a vector, classes or a score were computed.",
            ["model_name", "task"],
            registry=registry,
        )
        self._pooling_seconds = Histogram(
            "tokenloom_gateway_pooling_seconds",
            "Time from the arrival of a pooling call to its last result.",
            ["model_name", "task"],
            buckets=process_metrics.REQUEST_SECONDS,
            registry=registry,
        )
        self._sizes = RequestSizes(registry, labels)
        self._model_name = model_name
        self._key_usage = key_usage
        self._adapter_usage = adapter_usage

    def observe_pooled(
        self, task: str, usage: inference_pb2.Usage, tenant: Tenant, num_prompts: int, seconds: float
    ) -> None:
        """Observe a pooling call that has ended. ``num_prompts``: those that have a result; ``seconds``: it took."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self._pooled_prompts.labels(self._model_name, task).inc(num_prompts)
        self._pooling_seconds.labels(self._model_name, task).observe(seconds)
        used = Used(1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self._key_usage.add(tenant, used)

    def observe_end(self, generation: "EndedGeneration", tenant: Tenant, used: Used) -> None:
        """Observe a call that has ended, whatever ended it. ``used``: what no other call of its request has counted."""
        self._sizes.observe(generation)
        self._key_usage.add(tenant, used)
        if generation.model != self._model_name:
            self._adapter_usage.add(generation.model, used)


class EndedGeneration(Sized, Protocol):
    """Describes what is read of a generation at its end."""

    @property
    def model(self) -> str:
        """The name of the model or adapter."""


def count_moved(registry: CollectorRegistry) -> Counter:
    """Add the counter of requests that were sent again."""
    return Counter(
        "tokenloom_gateway_requests_moved",
        "Requests that were sent again because their output processor was lost, full or leaving.",
        registry=registry,
    )


class RequestWatch:
    """Measures one request: counts its tokens and observes its times. In a request that is traced, the times carry the
    id of its trace.

    Attributes:
        ttft_seconds: From the arrival to the first token; None: the request has none yet.
    """

    def __init__(
        self,
        gateway: GatewayMetrics,
        num_prompt_tokens: int,
        num_outputs: int,
        started_ns: int,
        on_first_token: Callable[[int], None] | None = None,
    ) -> None:
        """``on_first_token``: called with the index of each output that has its first token."""
        gateway.prompt_tokens.inc(num_prompt_tokens)
        self._on_first_token = on_first_token
        self._gateway = gateway
        self._started = started_ns
        self._trace_id = trace_id_of(CURRENT.get())
        self.ttft_seconds: float | None = None
        self._last = [0] * num_outputs  # when each output had its last tokens; 0: none yet

    def output(self, delta: Delta) -> None:
        """Record output that is on its way to the client."""
        now = time.monotonic_ns()
        if delta.token_ids:
            if last := self._last[delta.index]:
                self._gateway.inter_token_latency.observe((now - last) / 1e9)
            else:
                ttft = (now - self._started) / 1e9
                self._gateway.time_to_first_token.observe_traced(ttft, self._trace_id)
                if self.ttft_seconds is None:
                    self.ttft_seconds = ttft
                if self._on_first_token is not None:
                    self._on_first_token(delta.index)
            self._last[delta.index] = now
            self._gateway.generation_tokens.inc(len(delta.token_ids))
        if delta.finished is not None:
            self._gateway.e2e_latency.observe_traced((now - self._started) / 1e9, self._trace_id)
            self._gateway.success[delta.finished.reason].inc()
            self._gateway.kv_flow.add(delta.finished)


@dataclass(frozen=True, slots=True)
class MeshGauges:
    """Collects gauges for Prometheus: the engines' load as last reported.

    The gauges under vLLM's names cover the whole mesh and have no label ``engine``: balancers that treat gateways as
    model servers (the Gateway API Inference Extension) read one number of each.
    """

    mesh: MeshView
    backlog: Backlog
    model_name: str

    def collect(self) -> Iterator[GaugeMetricFamily]:
        engines = self.mesh.seen_engines  # not `engines`, which takes loads in: a scrape runs in a thread of its own
        load = load_of(engines)
        for name, text, value in (
            ("num_requests_running", "Requests in the batches of all engines.", load.num_running),
            ("num_requests_waiting", "Requests waiting at the engines.", load.num_waiting),
            ("kv_cache_usage_perc", "Share of all engines' KV blocks in use, 0 to 1.", load.kv_usage),
        ):
            yield self._gauge(process_metrics.VLLM + name, text, {"": value})
        for name, text, field in (
            ("requests_running", "Requests in the engine's batch.", "running"),
            ("requests_waiting", "Requests waiting at the engine.", "waiting"),
            ("kv_cache_usage_ratio", "Share of the engine's KV blocks in use, 0 to 1.", "kv_usage"),
        ):
            values = {entry.identity.engine_id: getattr(entry.report, field) for entry in engines}
            yield self._gauge("tokenloom_engine_" + name, text, values, "engine")
        yield from self._placement(engines)
        text = "Estimated seconds that a request which arrives now would wait for its first token."
        yield self._gauge("tokenloom_queue_wait_seconds", text, {"": self.backlog.wait_seconds()})

    def _placement(self, engines: Sequence[EngineEntry]) -> Iterator[GaugeMetricFamily]:
        """Yield the coordinator's rule, and what it compares of each engine."""
        rule = self.mesh.placement
        text = "1 for the rule by which the coordinator compares engines (--placement)."
        yield self._gauge("tokenloom_placement_rule", text, {rule: 1.0} if rule else {}, "rule")
        values = {entry.identity.engine_id: placement_values(entry, rule) for entry in engines}
        for name in dict.fromkeys(name for each in values.values() for name in each):
            of_engines = {engine: each[name] for engine, each in values.items()}
            yield self._gauge("tokenloom_placement_" + name, _PLACEMENT_TEXTS[name], of_engines, "engine")

    describe = collect  # the names, so that a second metric of one of them is refused

    def _gauge(self, name: str, text: str, values: Mapping[str, float], *label: str) -> GaugeMetricFamily:
        """Return a gauge of the model. ``values``: by the value of ``label``, if there is one."""
        family = GaugeMetricFamily(name, text, labels=["model_name", *label])
        for key, value in values.items():
            family.add_metric([self.model_name, *([key] if label else [])], value)
        return family
