"""Describes a tenant: the owner of API keys, of cached prefixes and of limits."""

from typing import Annotated

from msgspec import Meta, Struct

_Count = Annotated[int, Meta(ge=1)]


class TenantLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant at one gateway. None: the tenant has no limit of its own; the gateway's default applies."""

    tokens_per_second: Annotated[float, Meta(gt=0)] | None = None
    """Prompt and output tokens that the tenant may use per second, in the long run."""
    token_burst: _Count | None = None
    """Tokens that the tenant may use at once after it was idle; without a limit per second it has no effect."""
    live_outputs: _Count | None = None
    """Outputs (prompts times n) that may be in work at the same time."""
    sessions: _Count | None = None
    """Sessions of the gRPC API that may be open at the same time."""
    pending_grammars: _Count | None = None
    """Different grammars of requests that may wait for their first token at the same time."""
    body_bytes: _Count | None = None
    """Bytes of request bodies that the gateway may hold at the same time."""


class Tenant(Struct, frozen=True, kw_only=True):
    """A tenant. Cached prefixes are shared exactly between requests with equal salts.

    Attributes:
        name: Identifies the tenant in the mesh, in metrics and in logs; empty where clients need no key.
        cache_salt: Part of the hashes of the tenant's KV blocks, 16 bytes; empty where clients need no key. Secret.
        limits: What the tenant may use.
        key: The start of the SHA-256 of the client's key, in hex: a tenant with several keys has several of these
            objects, which differ in this only. Empty where clients need no key.
    """

    name: str
    cache_salt: bytes
    limits: TenantLimits = TenantLimits()
    key: str = ""

    def __repr__(self) -> str:
        """Leave out the salt, which must not reach a log."""
        return f"Tenant({self.name!r})"


NO_TENANT = Tenant(name="", cache_salt=b"")
"""The tenant of all clients where no key is required."""
