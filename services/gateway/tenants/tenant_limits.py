"""Decides which limits apply to a tenant: its own ones, the gateway's options, or defaults."""

import msgspec

from .tenant import TenantLimits

MAX_SESSIONS = 1024
"""Limit on the open sessions of a gateway; each holds the tokens of at most one context."""
BURST_SECONDS = 60
"""Size of a token bucket without one of its own, as the time in which it fills."""
SHARED_SESSIONS = 256
"""Sessions of one tenant where several share a gateway."""
SHARED_GRAMMARS = 32
"""Grammars of one tenant that wait for their first token where several share a gateway."""


def gateway_limits(options: TenantLimits, *, is_shared: bool, max_live: int, max_body_bytes: int) -> TenantLimits:
    """Return the limits of tenants that have none of their own.

    Args:
        options: What the gateway's options set; None: not set.
        is_shared: Whether the gateway has several tenants. A gateway with one tenant has no defaults: its own limits
            protect it.
        max_live: Outputs that may be in work at the gateway.
        max_body_bytes: Bytes of request bodies that the gateway may hold.
    """
    if not is_shared:
        return options
    defaults = TenantLimits(
        live_outputs=max(max_live // 2, 1),
        sessions=SHARED_SESSIONS,
        pending_grammars=SHARED_GRAMMARS,
        body_bytes=max(max_body_bytes // 2, 1),
    )
    return merged(options, defaults)


def merged(own: TenantLimits, defaults: TenantLimits) -> TenantLimits:
    """Return each limit of ``own``, or the default where it has none."""
    chosen = {
        name: getattr(defaults, name) if (value := getattr(own, name)) is None else value
        for name in TenantLimits.__struct_fields__
    }
    return TenantLimits(**chosen)


def with_burst(limits: TenantLimits) -> TenantLimits:
    """Return the limits with the size of the token bucket, if tokens are limited and it is not set."""
    if limits.tokens_per_second is None or limits.token_burst is not None:
        return limits
    return msgspec.structs.replace(limits, token_burst=max(round(limits.tokens_per_second * BURST_SECONDS), 1))
