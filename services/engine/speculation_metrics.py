"""Shows what became of drafts, under vLLM's names."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.services.runtime.telemetry.process_metrics import VLLM

_TEXTS = {
    "num_drafts": "Times that a request had drafts in a step.",
    "num_draft_tokens": "Draft tokens that steps verified.",
    "num_accepted_tokens": "Draft tokens that equalled the tokens drawn at their positions.",
}
"""Fields of ``SpecDecodingStats`` that are metrics of the same name, with their texts."""
_PER_POSITION = "num_accepted_tokens_per_pos"


class SpeculationMetrics:
    """Reads the core's counters when metrics are scraped, so steps pay nothing for them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        num_speculative_tokens: int,
        read: Callable[[], SpecDecodingStats | None],
    ) -> None:
        """``labels``: the fixed labels. ``read`` returns the counters; None before the first step."""
        self._labels = dict(labels)
        self._none = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)
        self._read = read
        registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        names = list(self._labels)
        families = [CounterMetricFamily(f"{VLLM}spec_decode_{key}", text, labels=names) for key, text in _TEXTS.items()]
        text = "Draft tokens that equalled those drawn, by their position after the last known token, from 0."
        return [*families, CounterMetricFamily(f"{VLLM}spec_decode_{_PER_POSITION}", text, labels=[*names, "position"])]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Return the values now."""
        stats, values = self._read() or self._none, list(self._labels.values())
        *families, per_position = self.describe()
        for family, key in zip(families, _TEXTS, strict=True):
            family.add_metric(values, getattr(stats, key))
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            per_position.add_metric([*values, str(position)], count)
        return [*families, per_position]
