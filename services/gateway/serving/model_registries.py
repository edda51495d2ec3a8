"""Shows the metrics of several models as one page."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric


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
