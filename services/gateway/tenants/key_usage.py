"""Counts what was generated with each API key."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

from tokenloom.v1 import inference_pb2

from .tenant import Tenant

MAX_KEYS: Final = 1000
"""Keys with series of their own; further ones are counted together, under the name ``other``."""
_OTHER = ("other", "")
_TEXTS = {
    "requests": "Requests that have ended, by the start of the SHA-256 of the client's key.",
    "prompt_tokens": "Prompt tokens of these requests.",
    "cached_tokens": "Prompt tokens of these requests that were in the prefix cache.",
    "output_tokens": "Output tokens of these requests.",
}


@dataclass(slots=True)
class _Used:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class KeyUsage:
    """Counts by key in the event loop's thread, once for each request; a scrape reads the counts.

    The label ``key`` is :attr:`Tenant.key`, so a key itself is in no metric; it is empty where clients need no key.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._used: dict[tuple[str, str], _Used] = {}
        registry.register(self)

    def add(self, tenant: Tenant, usage: inference_pb2.Usage) -> None:
        """Count a request that has ended."""
        labels = (tenant.key, tenant.name)
        if labels not in self._used and len(self._used) >= MAX_KEYS:
            labels = _OTHER
        used = self._used.setdefault(labels, _Used())
        used.requests += 1
        used.prompt_tokens += usage.prompt_tokens
        used.cached_tokens += usage.cached_tokens
        used.output_tokens += usage.completion_tokens

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        for field, text in _TEXTS.items():
            yield CounterMetricFamily(f"tokenloom_key_{field}", text, labels=["key", "tenant"])

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the counts now."""
        used = list(self._used.items())  # a copy: a scrape runs in a thread of its own
        for field, family in zip(_TEXTS, self.describe(), strict=True):
            for labels, counts in used:
                family.add_metric(labels, getattr(counts, field))
            yield family
