"""Shows the engines' load as the coordinator reports it, and the metrics of several models on one page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.v1.coordinator_pb2 import EngineEntry

from ..generation.admission import WaitEstimator
from ..mesh.mesh_view import MeshView, load_of, placement_values


class ModelRegistries:
    """Collects the metrics of all models for one registry: each family once, with the samples of every model.

    A model's metrics have fixed labels and register themselves, so each model has a registry of its own.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: list[CollectorRegistry] = []
        registry.register(self)

    def add(self) -> CollectorRegistry:
        """Return the registry of another model."""
        model = CollectorRegistry()
        self._models.append(model)
        return model

    def collect(self) -> Iterator[Metric]:
        """Return the metrics now."""
        families: dict[str, Metric] = {}
        for registry in self._models:
            for family in registry.collect():
                families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                ).samples += family.samples
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the families are not known before the models are."""
        yield from ()


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


@dataclass(frozen=True, slots=True)
class MeshGauges:
    """Collects gauges for Prometheus: the engines' load as last reported.

    The gauges under vLLM's names cover the engines that balancers are shown, all or ``--beside-engine``, and have no
    label ``engine``: balancers that treat gateways as model servers (the Gateway API Inference Extension) read one
    number of each.
    """

    mesh: MeshView
    estimator: WaitEstimator
    model_name: str

    def collect(self) -> Iterator[GaugeMetricFamily]:
        engines = self.mesh.seen_engines  # not `engines`, which takes loads in: a scrape runs in a thread of its own
        shown = self.mesh.shown(engines)
        load = load_of(shown)
        for name, text, value in (
            ("num_requests_running", "Requests in the batches of the engines that are shown.", load.num_running),
            ("num_requests_waiting", "Requests waiting at the engines that are shown.", load.num_waiting),
            ("kv_cache_usage_perc", "Share of these engines' KV blocks in use, 0 to 1.", load.kv_usage),
        ):
            yield self._gauge(process_metrics.VLLM + name, text, {"": value})
        yield self._cache(shown)
        for name, text, field in (
            ("requests_running", "Requests in the engine's batch.", "running"),
            ("requests_waiting", "Requests waiting at the engine.", "waiting"),
            ("kv_cache_usage_ratio", "Share of the engine's KV blocks in use, 0 to 1.", "kv_usage"),
        ):
            values = {entry.identity.engine_id: getattr(entry.report, field) for entry in engines}
            yield self._gauge("tokenloom_engine_" + name, text, values, "engine")
        yield from self._placement(engines)
        text = "Estimated seconds that a request which arrives now would wait for its first token."
        yield self._gauge("tokenloom_queue_wait_seconds", text, {"": self.estimator.wait_seconds()})
        text = (
            "Outputs that wait because no engine serves, and calls that cannot be admitted before the first one does: "
            "what starts engines that were scaled to zero."
        )
        num_held = 0 if self.mesh.num_serving else self.estimator.pending + self.estimator.early
        yield self._gauge("tokenloom_gateway_held_requests", text, {"": num_held})

    def _placement(self, engines: Sequence[EngineEntry]) -> Iterator[GaugeMetricFamily]:
        """Yield the coordinator's rule, and what it compares of each engine."""
        rule = self.mesh.placement
        text = "1 for the rule by which the coordinator compares engines (--placement)."
        yield self._gauge("tokenloom_placement_rule", text, {rule: 1.0} if rule else {}, "rule")
        values = {entry.identity.engine_id: placement_values(entry, rule) for entry in engines}
        for name in dict.fromkeys(name for each in values.values() for name in each):
            of_engines = {engine: each[name] for engine, each in values.items()}
            yield self._gauge("tokenloom_placement_" + name, _PLACEMENT_TEXTS[name], of_engines, "engine")

    def _cache(self, engines: Sequence[EngineEntry]) -> GaugeMetricFamily:
        """Return what an endpoint picker takes the size of a prefix cache from."""
        info = {
            "block_size": str(self.mesh.block_size),
            "num_gpu_blocks": str(sum(entry.identity.num_kv_blocks for entry in engines)),
        }
        text = "The KV caches of the engines that are shown: tokens of a block, 0 if they differ, and blocks."
        family = GaugeMetricFamily(process_metrics.VLLM + "cache_config_info", text, labels=["model_name", *info])
        family.add_metric([self.model_name, *info.values()], 1)
        return family

    describe = collect  # the names, so that a second metric of one of them is refused

    def _gauge(self, name: str, text: str, values: Mapping[str, float], *label: str) -> GaugeMetricFamily:
        """Return a gauge of the model. ``values``: by the value of ``label``, if there is one."""
        family = GaugeMetricFamily(name, text, labels=["model_name", *label])
        for key, value in values.items():
            family.add_metric([self.model_name, *([key] if label else [])], value)
        return family
