"""Counts what was generated with each API key."""

from typing import Final

from prometheus_client import CollectorRegistry

from ..usage_counts import UsageCounts, Used
from .tenant import Tenant

MAX_KEYS: Final = 1000
"""Keys with series of their own; further ones are counted together, under the name ``other``."""


class KeyUsage:
    """Counts by key.

    The label ``key`` is :attr:`Tenant.key`, so a key itself is in no metric; it is empty where clients need no key.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        of = "the start of the SHA-256 of the client's key"
        self._counts = UsageCounts(registry, "key", of, ("key", "tenant"), MAX_KEYS)

    def add(self, tenant: Tenant, used: Used) -> None:
        """Count what a call has used that has ended."""
        self._counts.add((tenant.key, tenant.name), used)
