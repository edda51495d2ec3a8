"""Shows how tokens are spread over the experts of a model: a counter for each expert and a gauge for each layer, and,
where experts move between ranks, how evenly the ranks are loaded. There is no series for each expert of each layer,
which would be thousands.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenloom.engine_core.data.messages import ExpertLoads

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
