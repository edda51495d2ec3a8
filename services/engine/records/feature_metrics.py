"""Shows how tokens are spread over the experts of a model: a counter for each expert and a gauge for each layer, and,
where experts move between ranks, how evenly the ranks are loaded.

There is no series for each expert of each layer, which would be thousands.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.engine_core.data.lora import LoraState
from tokenloom.engine_core.data.messages import ExpertLoads
from tokenloom.services.runtime.telemetry.process_metrics import VLLM

_TOKENS = "tokenloom_expert_tokens", "Tokens that each expert computed, over all layers with experts."
_IMBALANCE = (
    "tokenloom_expert_imbalance",
    "Tokens of the most used expert of a layer, divided by the mean of its experts; 1 is even. Layers without experts "
    "are not numbered.",
)
_BALANCEDNESS = (
    "tokenloom_expert_balancedness",
    "Mean load of the ranks over which experts are spread, divided by that of the busiest one, before the latest plan; "
    "1 is even, 0 before any.",
)
_PLANS = "tokenloom_expert_plans", "How often the places of experts were planned by their load."
_MOVED = "tokenloom_experts_moved", "Experts that the rank which draws tokens has taken over from others."


class ExpertMetrics:
    """Shows the latest loads when metrics are scraped, so that steps pay nothing for them.

    Attributes:
        loads: Those of the latest step.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        """``labels``: the fixed labels of both."""
        self._labels = dict(labels)
        self.loads = ExpertLoads([], [])
        registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Return the names, so that the registry refuses other metrics with them."""
        return [*self._families(), *self._balance()]

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Return the values now."""
        tokens, imbalance = self._families()
        for family, values in ((tokens, self.loads.tokens), (imbalance, self.loads.imbalance)):
            for number, value in enumerate(values):
                family.add_metric([*self._labels.values(), str(number)], value)
        return [tokens, imbalance, *(self._balance() if self.loads.balance is not None else ())]

    def _balance(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        names, values, balance = list(self._labels), list(self._labels.values()), self.loads.balance
        plans, moved = CounterMetricFamily(*_PLANS, labels=names), CounterMetricFamily(*_MOVED, labels=names)
        balancedness = GaugeMetricFamily(*_BALANCEDNESS, labels=names)
        if balance is not None:
            balancedness.add_metric(values, balance.balancedness)
            plans.add_metric(values, balance.num_plans)
            moved.add_metric(values, balance.num_moved)
        return balancedness, plans, moved

    def _families(self) -> tuple[CounterMetricFamily, GaugeMetricFamily]:
        names = list(self._labels)
        tokens = CounterMetricFamily(*_TOKENS, labels=[*names, "expert"])
        return tokens, GaugeMetricFamily(*_IMBALANCE, labels=[*names, "layer"])


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


_RUNNING, _WAITING = "tokenloom_lora_requests_running", "tokenloom_lora_requests_waiting"


class LoraMetrics:
    """Reads the adapters when metrics are scraped, so steps pay nothing for them. Only loaded adapters have labels, so
    their number is bounded."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        max_loras: int,
        read: Callable[[], Sequence[LoraState]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``labels``: the fixed labels. ``read`` returns the adapters that are loaded. ``clock``: Unix time."""
        self._labels = dict(labels)
        self._max_loras = max_loras
        self._read = read
        self._clock = clock
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        text = "Unix time of this page, labelled with the LoRA adapters that have requests."
        info = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        names = list(self._labels)
        return [
            GaugeMetricFamily(f"{VLLM}lora_requests_info", text, labels=[*names, *info]),
            GaugeMetricFamily(_RUNNING, "Requests with a LoRA adapter that are running.", labels=[*names, "adapter"]),
            GaugeMetricFamily(_WAITING, "Requests with a LoRA adapter that wait to run.", labels=[*names, "adapter"]),
        ]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the values now."""
        adapters, values = self._read(), list(self._labels.values())
        info, running, waiting = self.describe()
        waiting_names = ",".join(each.name for each in adapters if each.num_waiting)
        running_names = ",".join(each.name for each in adapters if each.num_running)
        info.add_metric([*values, str(self._max_loras), waiting_names, running_names], self._clock())
        for each in adapters:
            running.add_metric([*values, each.name], each.num_running)
            waiting.add_metric([*values, each.name], each.num_waiting)
        return [info, running, waiting]
