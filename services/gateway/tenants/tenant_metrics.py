"""Shows what each tenant has in work, what it was charged and why its requests were refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .tenant import TenantLimits
from .tenant_share import MAX_BODY_BYTES_IN_FLIGHT, MAX_LIVE_REQUESTS, MAX_QUEUE_SECONDS, MAX_SESSIONS
from .tenant_shares import TenantShares

LIMITS = (
    *TenantLimits.__struct_fields__,
    MAX_BODY_BYTES_IN_FLIGHT,
    MAX_LIVE_REQUESTS,
    MAX_QUEUE_SECONDS,
    MAX_SESSIONS,
)
"""Values of the label ``limit``: a tenant's limits by their names in the key file, and the gateway's own."""

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class TenantMetrics:
    """Collects the tenants' counts for Prometheus when it scrapes, so a request pays nothing for them.

    The label ``tenant`` is a name from the key file, ``key:`` and the start of a digest for a key without a name, and
    empty where clients need no key.
    """

    shares: TenantShares

    def collect(self) -> Iterator[_Family]:
        for name, text in (
            ("live_outputs", "Outputs of the tenant in work: prompts times samples."),
            ("sessions", "Open sessions of the tenant, streams of the Open Inference Protocol included."),
            ("pending_grammars", "Different grammars of the tenant's requests that wait for their first token."),
            ("body_bytes", "Bytes of the tenant's request bodies that the gateway holds."),
        ):
            gauge = GaugeMetricFamily(f"tokenloom_tenant_{name}", text, labels=["tenant"])
            for share in self.shares:
                gauge.add_metric([share.name], getattr(share, name))
            yield gauge
        tokens = CounterMetricFamily(
            "tokenloom_tenant_tokens", "Prompt and output tokens charged to the tenant.", labels=["tenant"]
        )
        text = "Requests of the tenant that were refused, by the limit that refused them."
        refused = CounterMetricFamily("tokenloom_tenant_refused_requests", text, labels=["tenant", "limit"])
        for share in self.shares:
            tokens.add_metric([share.name], share.tokens)
            for limit in LIMITS:
                refused.add_metric([share.name, limit], share.refused[limit])
        yield tokens
        yield refused

    describe = collect  # the names, so that a second metric of one of them is refused
