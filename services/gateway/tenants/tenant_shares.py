"""Holds the shares of all tenants of a gateway and what they divide, and shows both as metrics."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenloom.request.limits import DividedLimit

from .tenant import Tenant, TenantLimits, merged, with_burst
from .tenant_share import MAX_BODY_BYTES_IN_FLIGHT, MAX_LIVE_REQUESTS, MAX_QUEUE_SECONDS, MAX_SESSIONS, TenantShare

LIMITS = (
    *TenantLimits.__struct_fields__,
    MAX_BODY_BYTES_IN_FLIGHT,
    MAX_LIVE_REQUESTS,
    MAX_QUEUE_SECONDS,
    MAX_SESSIONS,
)
"""Values of the label ``limit``: a tenant's limits by their names in the key file, and the gateway's own."""
_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class TenantShares:
    """Finds the share of a tenant. Only tenants that have sent a request have one, so metrics name no others.

    Attributes:
        outputs: The gateway's places for outputs in work.
        sessions: Its places for open sessions.
        messages: Its room for the bytes of gRPC messages that are not answered.
        is_shared: Whether the gateway has several tenants.
    """

    def __init__(
        self,
        defaults: TenantLimits,
        *,
        is_shared: bool,
        max_live: int,
        max_sessions: int,
        max_message_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        defaults: The limits of tenants that have none of their own.
        is_shared: Whether the gateway has several tenants.
        max_live: Outputs that may be in work.
        max_sessions: Sessions that may be open.
        max_message_bytes: Bytes of gRPC messages that may be held until they are answered.
        clock: Seconds, for the tokens per second.
        """
        self.is_shared = is_shared
        self.outputs = DividedLimit(max_live, is_divided=is_shared)
        self.sessions = DividedLimit(max_sessions, is_divided=is_shared)
        self.messages = DividedLimit(max_message_bytes, is_divided=is_shared)
        self._defaults = defaults
        self._clock = clock
        self._shares: dict[str, TenantShare] = {}  # bounded by the tenants of the key file

    def of(self, tenant: Tenant) -> TenantShare:
        """Return the share of a tenant."""
        share = self._shares.get(tenant.name)
        if share is None:
            limits = with_burst(merged(tenant.limits, self._defaults))
            share = self._shares[tenant.name] = TenantShare(tenant.name, limits, self._clock)
        return share

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(list(self._shares.values()))  # a copy: a scrape runs in a thread of its own


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
