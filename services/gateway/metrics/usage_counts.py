"""Counts requests and tokens by API key and by LoRA adapter, of which there may be many."""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

from ..tenants.tenant import Tenant

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

CALL_TOKENS: Final = 200
"""So many output tokens cost the gateway as much as the begin and the end of a call: 1.4 ms, and 3.5 µs for each token
where engines are so fast that frames hold many."""
MAX_KEYS: Final = 1000
"""Keys with series of their own; further ones are counted together, under the name ``other``."""
MAX_ADAPTERS: Final = 1000
"""Adapters with series of their own; further ones are counted together, under the name ``other``."""
_TEXTS = {
    "requests": "Requests that have ended, by {of}.",
    "prompt_tokens": "Prompt tokens of these requests.",
    "cached_tokens": "Prompt tokens of these requests that were in the prefix cache.",
    "output_tokens": "Output tokens of these requests.",
}


class CallBill:
    """Bills what a call costs this process, and adds up what it costs tokenizers. It exists with ``--bill`` only.

    Attributes:
        counts: Output tokens so far, by output.
        tokenizer_ns: CPU time of the calls of tokenizers.
    """

    def __init__(self, bill: "CpuBill", tenant: str) -> None:
        self.counts: Sequence[int] = ()
        self.tokenizer_ns = 0
        self._account = bill.open(tenant, self._work)

    def charge(self) -> int:
        """Return the CPU time of this process so far, in nanoseconds."""
        return self._account.charge()

    def close(self) -> None:
        """End the call."""
        self._account.close()

    def _work(self) -> int:
        return CALL_TOKENS + sum(self.counts)


CALL_BILL: Final[ContextVar[CallBill | None]] = ContextVar("CALL_BILL", default=None)
"""The bill of the call that this task answers; None without ``--bill``."""


class Used(msgspec.Struct, frozen=True):
    """Describes what a request has used, or the part of it that was not counted yet."""

    requests: int = 0
    """1, or 0 if the request was counted before."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are charged."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class _Total:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class UsageCounts:
    """Counts in the event loop's thread, once for each request; a scrape reads the counts."""

    def __init__(self, registry: CollectorRegistry, kind: str, of: str, labels: Sequence[str], most: int) -> None:
        """Args:
        kind: Begins the metrics' names, after ``tokenloom_``.
        of: Describes the labels in the metrics' help.
        labels: Names of the labels.
        most: Values of the labels with series of their own; further ones are counted together, as ``other``.
        """
        self._kind, self._of, self._labels, self._most = kind, of, labels, most
        self._other = ("other", *("" for _ in labels[1:]))
        self._used: dict[tuple[str, ...], _Total] = {}
        registry.register(self)

    def add(self, values: tuple[str, ...], used: Used) -> None:
        """Count what a call has used that has ended. ``values``: of the labels."""
        if values not in self._used and len(self._used) >= self._most:
            values = self._other
        total = self._used.setdefault(values, _Total())
        total.requests += used.requests
        total.prompt_tokens += used.prompt_tokens
        total.cached_tokens += used.cached_tokens
        total.output_tokens += used.output_tokens

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        for field, text in _TEXTS.items():
            yield CounterMetricFamily(f"tokenloom_{self._kind}_{field}", text.format(of=self._of), labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the counts now."""
        used = list(self._used.items())  # a copy: a scrape runs in a thread of its own
        for field, family in zip(_TEXTS, self.describe(), strict=True):
            for values, counts in used:
                family.add_metric(values, getattr(counts, field))
            yield family


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


class AdapterUsage:
    """Counts by adapter, for all models of the gateway. Requests without an adapter are not counted here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts = UsageCounts(registry, "adapter", "the LoRA adapter's name", ("adapter",), MAX_ADAPTERS)

    def add(self, name: str, used: Used) -> None:
        """Count what a call has used that has ended. ``name``: ``model:adapter``."""
        self._counts.add((name,), used)
