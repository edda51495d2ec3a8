"""Holds the shares of all tenants of a gateway, and what they divide."""

import time
from collections.abc import Callable, Iterator

from tokenloom.request.limits import DividedLimit

from .tenant import Tenant, TenantLimits
from .tenant_limits import merged, with_burst
from .tenant_share import TenantShare


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
