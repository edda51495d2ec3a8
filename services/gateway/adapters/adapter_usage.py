"""Counts what was generated with each LoRA adapter."""

from typing import Final

from prometheus_client import CollectorRegistry

from ..usage_counts import UsageCounts, Used

MAX_ADAPTERS: Final = 1000
"""Adapters with series of their own; further ones are counted together, under the name ``other``."""


class AdapterUsage:
    """Counts by adapter, for all models of the gateway. Requests without an adapter are not counted here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts = UsageCounts(registry, "adapter", "the LoRA adapter's name", ("adapter",), MAX_ADAPTERS)

    def add(self, name: str, used: Used) -> None:
        """Count what a call has used that has ended. ``name``: ``model:adapter``."""
        self._counts.add((name,), used)
